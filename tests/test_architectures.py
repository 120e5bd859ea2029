"""Chat models over every kind of cache layer: the laws hold, and what a model's caches can't do is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.testing.catalogue import save_toy

KINDS = ("qwen3_next", "mamba2", "falcon_h1", "gemma3_text", "deepseek_v3", "llama4_text", "llama-yarn", "jamba")
STORY = "the team that reads the report hands over what it knows to the team that decides. "


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = str(save_toy(tmp_path_factory.mktemp(name), name))
        return made[name]

    return folder


@pytest.fixture
def alone() -> Callable[..., str]:
    """The text of an answer in an empty workspace."""

    def text(model: str, *messages: str) -> str:
        with LatentWorkspace() as empty:
            chat = ChatLatent(model=model, workspace=empty, max_tokens=8)
            return str(chat.invoke([("user", message) for message in messages]).text)

    return text


@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_hold_for_every_kind_of_layer(
    kind: str, toy_folder: Callable[[str], str], alone: Callable[..., str], ws: LatentWorkspace
) -> None:
    """Laws 1, 3, 4 and 5: read then ask, after eviction, over a file, and by several at a time."""
    model = toy_folder(kind)
    chat = ChatLatent(model=model, workspace=ws, max_tokens=8)
    handle = chat.read([("user", STORY)])
    expected = alone(model, STORY, "who decides?")
    first = chat.invoke([("user", "who decides?")], inherit=handle)
    assert first.text == expected
    assert first.response_metadata["kv_route"]["route"] == "cache"
    assert first.usage_metadata["input_token_details"]["cache_read"] > 0
    questions = ["who decides?", "and then?", "who decides?"]
    replies = chat.batch([[("user", question)] for question in questions], inherit=handle)
    assert [reply.text for reply in replies] == [expected, alone(model, STORY, "and then?"), expected]
    blob = chat.export_kv_cache(handle)
    ws.evict(handle)
    assert chat.invoke([("user", "who decides?")], inherit=handle).text == expected
    with LatentWorkspace() as other:
        receiver = ChatLatent(model=model, workspace=other, max_tokens=8)
        came = receiver.ingest_kv_cache(blob)
        assert receiver.invoke([("user", "who decides?")], inherit=came).text == expected


def test_a_wish_for_a_quantised_cache_needs_no_backend(
    toy_folder: Callable[[str], str], alone: Callable[..., str], tmp_path: Path
) -> None:
    """Field case 35: a checkpoint's generation config may ask for one whose package is not installed."""
    folder = Path(shutil.copytree(toy_folder("llama-yarn"), tmp_path / "quantised"))
    file = folder / "generation_config.json"
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **asked}))
    assert alone(str(folder), STORY, "who?") == alone(toy_folder("llama-yarn"), STORY, "who?")


@pytest.mark.parametrize("kind", ["llama-yarn", "llama-llama3", "llama-linear", "llama-dynamic", "phi3-longrope"])
def test_with_scaled_rope_nothing_is_reused_at_another_position(
    kind: str, toy_folder: Callable[[str], str], alone: Callable[..., str], ws: LatentWorkspace
) -> None:
    """Field cases 29 and 61: the second handle stands at another offset; its messages are read again."""
    chat = ChatLatent(model=toy_folder(kind), workspace=ws, max_tokens=4)
    one, two = chat.read([("user", "the report")]), chat.read([("user", "the team")])
    reply = chat.invoke([("user", "who?")], inherit=[one, two])
    assert reply.text == alone_of(chat, "the report", "the team", "who?")
    assert reply.response_metadata["kv_route"]["level"] in (0, 4)
    assert reply.usage_metadata["input_token_details"]["cache_read"] <= one.num_tokens


def alone_of(chat: ChatLatent, *messages: str) -> str:
    with LatentWorkspace() as empty:
        other = ChatLatent(model=chat.model, workspace=empty, max_tokens=chat.max_tokens)
        return str(other.invoke([("user", message) for message in messages]).text)


def test_between_models_of_other_sizes_only_text_passes(
    toy_folder: Callable[[str], str], tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 71: no adapter is made up for a pair; the reason names what differs."""
    sender = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=4)
    receiver = ChatLatent(model=toy_folder("deepseek_v3"), workspace=ws, max_tokens=4)
    reply = receiver.invoke([("user", "who?")], inherit=sender.read([("user", STORY)]))
    route = reply.response_metadata["kv_route"]
    assert (route["route"], route["level"]) == ("text", 4)
    assert "layers" in route["reason"]
    assert reply.text == alone_of(receiver, STORY, "who?")
