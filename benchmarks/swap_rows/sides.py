"""One run of a graph with either chat model, and what it read and wrote. It alone knows `langchain_huggingface`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.outputs import LLMResult

from benchmarks.bench import Bench
from benchmarks.swap_rows.graphs import Graph
from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.handle.message import Message


class Call(NamedTuple):
    prompt: list[BaseMessage]
    reply: AIMessage

    @property
    def transcript(self) -> tuple[tuple[str, str], ...]:
        return tuple((message.type, message.text) for message in self.prompt)


class Calls(BaseCallbackHandler):
    """Notes every call of a chat model, from whichever thread."""

    raise_error = True

    def __init__(self) -> None:
        self._begun: dict[UUID, list[BaseMessage]] = {}
        self.done: list[Call] = []

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        self._begun[run_id] = messages[0]

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        generation: Any = response.generations[0][0]
        self.done.append(Call(self._begun.pop(run_id), generation.message))


@dataclass
class Run:
    """One run: its wall time, and its calls of the model in the order of their prompts."""

    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)


def run(graph: Any, turns: Sequence[str], history: Sequence[Message], **config: Any) -> Run:
    """Send all turns to a compiled graph, the history before the first."""
    notes = Calls()
    settings = {"callbacks": [notes], "configurable": {"thread_id": "1"}, **config}
    before = convert_to_messages(history)
    begin = time.perf_counter()
    for turn in turns:
        graph.invoke({"messages": [*before, ("human", turn)]}, settings)
        before = []
    return Run(time.perf_counter() - begin, sorted(notes.done, key=lambda call: call.transcript))


class HuggingFace:
    """`ChatHuggingFace` over a transformers pipeline of the same weights, greedy, as its documentation sets it up."""

    def __init__(self, bench: Bench, max_tokens: int) -> None:
        from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
        from transformers import AutoTokenizer, pipeline

        self._pipeline: Any = pipeline(
            "text-generation",
            model=bench.stock.model,
            tokenizer=AutoTokenizer.from_pretrained(bench.name),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_full_text=False,
        )
        self.chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=self._pipeline, model_id=bench.name))
        self.chat.invoke("Hello")

    def run(self, graph: Graph, history: Sequence[Message]) -> Run:
        return run(graph.build(self.chat), graph.turns, history)

    def num_prompt_tokens(self, call: Call) -> int:
        """Tokens that the pipeline fed for a call's prompt: all of it, every time."""
        text = self.chat._to_chat_prompt(call.prompt)
        return int(self._pipeline.preprocess(text)["input_ids"].shape[-1])


class Latent:
    """`ChatLatent` on the same weights; every run begins in an empty workspace."""

    def __init__(self, bench: Bench, max_tokens: int, *, reuse: bool = True) -> None:
        self._bench = bench
        self._max_tokens = max_tokens
        self._reuse = reuse

    @contextmanager
    def chat(self) -> Iterator[ChatLatent]:
        with LatentWorkspace() as workspace:
            options: dict[str, Any] = {"max_tokens": self._max_tokens, "reuse": self._reuse}
            yield ChatLatent(model=self._bench.name, workspace=workspace, **options).load()

    def run(self, graph: Graph, history: Sequence[Message]) -> Run:
        with self.chat() as chat:
            return run(graph.build(chat), graph.turns, history)


def usage(call: Call) -> Any:
    """What a reply of `ChatLatent` reports of its tokens."""
    assert call.reply.usage_metadata is not None
    return call.reply.usage_metadata


def num_prefilled(call: Call) -> int:
    """Prompt tokens that `ChatLatent` computed for a call."""
    return int(usage(call)["input_tokens"] - usage(call)["input_token_details"]["cache_read"])
