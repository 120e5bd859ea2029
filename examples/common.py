"""What agent.py, supervisor.py and swarm.py share: which model they take, what instructs it, what is printed.

The default model has half a billion parameters. It picks the right tool and the right arguments, but rarely knows when
to call one and when to talk. So most system prompts here hold a worked example, and `tool_first` settles the rest.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

from langgraph_latent import LatentWorkspace
from langgraph_latent.disk_cache import cache_dir

HUB_ID = "Qwen/Qwen2.5-Coder-0.5B-Instruct"


def chosen_model(description: str) -> str:
    """`--model`, else $LANGGRAPH_LATENT_TOOL_MODEL, else the folder in the user's cache, else the hub id."""
    folder = cache_dir() / "models" / HUB_ID.split("/")[1].lower()
    default = os.environ.get("LANGGRAPH_LATENT_TOOL_MODEL") or (str(folder) if folder.is_dir() else HUB_ID)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=default, help=f"folder or hub id of a model that calls tools; or {HUB_ID}")
    return str(parser.parse_args().model)


def worked_example(question: str, tool: str, arguments: dict[str, Any], result: str, answer: str) -> str:
    """One question from the call of a tool to the answer, for a system prompt."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return (
        f"\nExample:\nuser: {question}\nassistant: <tool_call>\n{call}\n</tool_call>\n"
        f"user: <tool_response>\n{result}\n</tool_response>\nassistant: {answer}"
    )


@wrap_model_call
def tool_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """After a question a tool must be called; which one, and with what, is the model's choice. Hand-overs are not
    shown to the agent that was handed the question: it would go on handing over."""
    messages = [message for message in request.messages if not is_hand_over(message)]
    asked = isinstance(messages[-1], HumanMessage)
    return handler(request.override(messages=messages, tool_choice="any" if asked else None))


def is_hand_over(message: AnyMessage) -> bool:
    """Whether a message calls for another agent, or says that it took over."""
    names = [call["name"] for call in message.tool_calls] if isinstance(message, AIMessage) else [message.name]
    return any((name or "").startswith("transfer_to_") for name in names)


def show(messages: list[AnyMessage]) -> None:
    """Print a conversation, and of each reply how much of its prompt was still in memory."""
    for message in messages:
        if isinstance(message, HumanMessage):
            print(f"\n{'user':10} {message.text}")
        elif isinstance(message, ToolMessage):
            print(f"{'':10} -> {message.text}")
        elif isinstance(message, AIMessage):
            calls = ", ".join(f"{call['name']}({_arguments(call['args'])})" for call in message.tool_calls)
            print(f"{message.name or 'agent':10} {calls or message.text}", end="")
            if usage := message.usage_metadata:  # none where no model was called
                reused = usage["input_token_details"]["cache_read"]
                print(f"   [{reused} of {usage['input_tokens']} prompt tokens reused]", end="")
            print(flush=True)


def show_totals(ws: LatentWorkspace) -> None:
    """Print what the model calls of all agents have cost."""
    total = ws.tracer.summary()
    print(f"\n{total.tokens_prefilled} prompt tokens read, {total.tokens_reused} reused; models loaded: ", end="")
    print(total.events["loaded"])


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
