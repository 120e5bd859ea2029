"""Messages to token ids and back: templates, prompts, answers, tool calls, grammars. Nothing here knows tensors."""
