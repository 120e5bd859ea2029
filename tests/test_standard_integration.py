"""LangChain's standard integration tests on a real model that calls tools, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langgraph_latent import ChatLatent, LatentWorkspace

pytestmark = pytest.mark.slow

LONG = "You are told a story. " + "The team that reads the report hands over what it knows. " * 10
SAMPLED = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1}
"""Greedily, so small a model repeats one sentence until its tokens are used up when only JSON is asked of it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "json_mode": SAMPLED,
    "unicode": {"max_tokens": 96},
    "structured": {"max_tokens": 96},
    "agent": {"max_tokens": 40},
    "tool_c": {"max_tokens": 40},
    "as_tools": {"max_tokens": 40},
}
"""By a word in a test's name: a call, or JSON, must not be cut; all other answers may be."""


@pytest.fixture(scope="module")
def shared_ws() -> Iterator[LatentWorkspace]:
    """One workspace for all tests: many ask with the same tools, which then are read once."""
    with LatentWorkspace(memory="1GiB") as workspace:
        yield workspace
        workspace.check_integrity()


class TestChatLatent(ChatModelIntegrationTests):
    """Multimodal tests are skipped by the suite: the model reads text only."""

    @pytest.fixture(autouse=True)
    def _resident(
        self, request: pytest.FixtureRequest, tool_model: Path, tool_lease: None, shared_ws: LatentWorkspace
    ) -> None:
        self.folder, self.workspace = str(tool_model), shared_ws
        found = (options for word, options in OPTIONS.items() if word in request.node.name)
        self.options = next(found, {"max_tokens": 16})

    @property
    def chat_model_class(self) -> type[ChatLatent]:
        return ChatLatent

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": self.folder, "workspace": self.workspace, "device": "cpu", **self.options}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        """A `ChatLatent` is one model; another one is another `ChatLatent`."""
        return False

    @property
    def returns_usage_metadata(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """The second of two calls with one beginning, the whole of which it reuses."""
        chat = ChatLatent(**self.chat_model_params)
        chat.invoke([("system", LONG), ("human", "Who hands over?")], max_tokens=2)
        again = [("system", LONG), ("human", "Who knows?")]
        reply = chat.invoke(again, max_tokens=2)
        if stream:
            chunks = [chunk for chunk in chat.stream(again, max_tokens=2) if isinstance(chunk, AIMessageChunk)]
            reply = sum(chunks[1:], chunks[0])  # type: ignore[assignment]
        assert reply.usage_metadata is not None
        assert reply.usage_metadata["input_token_details"]["cache_read"] > 100
        return reply
