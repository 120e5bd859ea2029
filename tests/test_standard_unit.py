"""LangChain's standard unit tests, which every chat model of its ecosystem passes."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumpd, load
from langchain_tests.unit_tests import ChatModelUnitTests

from langgraph_latent import ChatLatent


class TestChatLatent(ChatModelUnitTests):
    """No test here loads a model: the folder does not exist."""

    @property
    def chat_model_class(self) -> type[ChatLatent]:
        return ChatLatent

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "/models/of-no-one"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """All of the standard ones but the API key: a local model has none, and an unknown option is an error."""
        params = super().standard_chat_model_params
        del params["api_key"]
        return params

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

    @pytest.mark.xfail(
        raises=ValueError,
        reason="LangChain's load() knows classes of other packages only by allowed_objects=[...], the test says 'all'.",
    )
    def test_serdes(self, model: ChatLatent, snapshot: Any) -> None:
        """What is serialized is compared with the snapshot first; only the loading fails."""
        super().test_serdes(model, snapshot)

    @pytest.mark.filterwarnings("ignore:The function `load` is in beta")
    def test_serdes_with_the_class_allowed(self, model: ChatLatent) -> None:
        """The standard test's second half, with the class named as `load` asks for it."""
        back = load(dumpd(model), allowed_objects=[ChatLatent], valid_namespaces=["langgraph_latent"])
        assert back.asdict() == model.asdict()
