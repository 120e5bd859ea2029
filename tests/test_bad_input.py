"""Bad input gets a typed error that says what and what to do, and nothing is lost: earlier handles work as before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langgraph_latent import ChatLatent, KVHandle, LatentNode, LatentWorkspace
from langgraph_latent.errors import (
    CacheBudgetError,
    ClosedError,
    ConfigError,
    ContextLengthError,
    HandleError,
    ModelLoadError,
    ModelMismatchError,
    PromptError,
    TemplateError,
    TenantError,
    UnknownHandleError,
)

ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def nothing_lost(tiny_chat: ChatLatent, ws: LatentWorkspace) -> Iterator[None]:
    """A handle made before the bad input answers the same after it, from the cache."""
    handle = tiny_chat.read("what came before")
    before = tiny_chat.invoke("go on", inherit=handle).text
    yield
    after = tiny_chat.invoke("go on", inherit=handle)
    assert after.text == before
    assert after.usage_metadata["input_token_details"]["cache_read"] >= handle.num_tokens
    ws.check_integrity()


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "~/no/such/folder", "no/such/folder"])
def test_a_folder_that_is_not_there_is_named(ws: LatentWorkspace, name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no folder .*; check the path"):
        ChatLatent(model=name, workspace=ws).load()


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "no-such-model", ""])
def test_an_unknown_model_is_named_with_what_to_do(ws: LatentWorkspace, name: str) -> None:
    with pytest.raises(ModelLoadError, match="neither a local folder nor a model on the hub") as caught:
        ChatLatent(model=name, workspace=ws).load()
    assert "hf download" in str(caught.value)


def test_a_folder_that_holds_no_model_is_refused(ws: LatentWorkspace, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        ChatLatent(model=str(tmp_path), workspace=ws).invoke("hello")


@pytest.mark.parametrize("messages", [[], "", "  \n", [HumanMessage("")], [SystemMessage(" "), HumanMessage("")]])
def test_an_empty_prompt_is_refused(tiny_chat: ChatLatent, nothing_lost: None, messages: object) -> None:
    for call in (tiny_chat.invoke, tiny_chat.read):
        with pytest.raises(PromptError, match="empty"):
            call(messages)  # type: ignore[operator]


def test_a_prompt_longer_than_the_model_takes_is_refused_before_anything_is_computed(
    tiny_chat: ChatLatent, ws: LatentWorkspace, nothing_lost: None
) -> None:
    computed = ws.tracer.summary().tokens_prefilled
    with pytest.raises(ContextLengthError, match=r"\d+ tokens.*at most 2048"):
        tiny_chat.read("x" * 5000)
    assert ws.tracer.summary().tokens_prefilled == computed


def test_an_answer_stops_where_the_model_can_go_no_further(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    for kind, limit in (("llama", "max_position_embeddings"), ("gpt2", "n_positions")):
        chat = ChatLatent(model=str(tiny_folder(kind, **{limit: 64})), workspace=ws, max_tokens=500)
        reply = chat.invoke("a short question")
        assert reply.response_metadata["finish_reason"] == "length"
        assert reply.usage_metadata["total_tokens"] == 64
        with pytest.raises(ContextLengthError):
            chat.invoke("and now?", inherit=ws.handle(reply))


def test_a_template_that_refuses_the_order_of_messages_is_named(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 8."""
    chat = ChatLatent(model=str(tiny_folder("llama", template=ALTERNATING)), workspace=ws, max_tokens=4)
    with pytest.raises(TemplateError, match=r"roles: assistant, user.*must alternate"):
        chat.invoke([AIMessage("one"), HumanMessage("two")])
    handle = chat.handle(chat.invoke([HumanMessage("one")]))
    assert (
        chat.invoke([HumanMessage("two")], inherit=handle).text
        == chat.invoke([HumanMessage("one"), AIMessage(handle.messages[-1]["content"]), HumanMessage("two")]).text
    )


def test_a_model_without_a_template_is_named(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    """Field case 12: nothing is fetched to replace it."""
    with pytest.raises(TemplateError, match="chat template"):
        ChatLatent(model=str(tiny_folder("llama", template="")), workspace=ws).invoke("hello")


def test_a_budget_smaller_than_one_cache_is_refused_and_kept_caches_stay(tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace(memory="400kB") as small:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=small, max_tokens=4)
        handle = chat.read("a short text")
        used = small.size_info().pool.used_bytes
        for call in (chat.invoke, chat.read):
            with pytest.raises(CacheBudgetError, match=r"raise it with LatentWorkspace\(memory="):
                call("a long text " * 150)
        assert small.size_info().pool.used_bytes == used
        assert chat.invoke("go on", inherit=handle).usage_metadata["input_token_details"]["cache_read"] > 0
        small.check_integrity()


def test_an_answer_that_outgrows_the_budget_is_given_and_not_kept(tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace(memory="100kB") as small, LatentWorkspace() as large:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=small, max_tokens=300)
        reply = chat.invoke("go on and on")
        expected = ChatLatent(model=str(tiny_folder("llama")), workspace=large, max_tokens=300).invoke("go on and on")
        assert reply.text == expected.text
        assert small.size_info().pool.used_bytes <= 100_000
        assert small.handle(reply).num_tokens == reply.usage_metadata["total_tokens"]


def test_a_handle_of_another_model_is_not_exported(
    tiny_chat: ChatLatent, tiny_folder: Callable[..., Path], ws: LatentWorkspace, nothing_lost: None
) -> None:
    stranger = ChatLatent(model=str(tiny_folder("llama", seed=1)), workspace=ws, max_tokens=4)
    with pytest.raises(ModelMismatchError, match="belongs to model"):
        stranger.export_kv_cache(tiny_chat.read("the report"))


def test_a_handle_of_another_tenant_is_refused_everywhere(tiny_folder: Callable[..., Path]) -> None:
    """Field case 60: equal prompts share nothing across tenants, and a foreign handle is refused."""
    folder = str(tiny_folder("llama"))
    with LatentWorkspace(tenant="a") as ours, LatentWorkspace(tenant="b") as theirs:
        mine = ChatLatent(model=folder, workspace=ours, max_tokens=4)
        other = ChatLatent(model=folder, workspace=theirs, max_tokens=4)
        handle = mine.read("the secret report")
        blob = mine.export_kv_cache(handle)
        assert other.invoke("the secret report").usage_metadata["input_token_details"]["cache_read"] == 0
        for use in (
            lambda: other.invoke("go on", inherit=handle),
            lambda: other.read("go on", inherit=handle),
            lambda: other.export_kv_cache(handle),
            lambda: other.ingest_kv_cache(blob),
        ):
            with pytest.raises(TenantError, match="another tenant"):
                use()
        forged = KVHandle.from_dict({**handle.to_dict()})
        object.__setattr__(forged, "tenant", "b")
        forged.__dict__.pop("_is_sound", None)
        with pytest.raises(HandleError, match="altered"):
            other.invoke("go on", inherit=forged)
        assert theirs.tracer.summary().events["refused"] == 5


@pytest.mark.parametrize("wrong", ["kv-123", 7, {"id": "x"}, ["kv-123"], object()])
def test_what_is_no_handle_is_refused(tiny_chat: ChatLatent, nothing_lost: None, wrong: object) -> None:
    with pytest.raises(HandleError, match="KVHandle"):
        tiny_chat.invoke("go on", inherit=wrong)


def test_an_unknown_id_says_to_pass_messages_or_the_handle(ws: LatentWorkspace, nothing_lost: None) -> None:
    for unknown in ("kv-123", AIMessage("hello"), AIMessage("x", response_metadata={"kv_handle": "kv-1"}), None):
        with pytest.raises(UnknownHandleError, match="Pass the messages instead, or carry the KVHandle"):
            ws.handle(unknown)


def test_an_unknown_option_is_an_error_that_lists_the_known_ones(tiny_chat: ChatLatent, nothing_lost: None) -> None:
    with pytest.raises(ConfigError, match=r"'temprature'; did you mean 'temperature'\? known options: model, "):
        ChatLatent(model="x", temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"'top_q'; did you mean 'top_p'\? known options: .*top_k"):
        tiny_chat.invoke("hello", top_q=1)
    with pytest.raises(ConfigError, match="known modes: read, think, decode"):
        LatentNode(tiny_chat, prompt="x", mode="reed")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("max_tokens", 0), ("stop", [""])],
)
def test_an_impossible_value_is_refused_when_made_and_when_called(
    tiny_chat: ChatLatent, nothing_lost: None, option: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"{option}=.* is impossible"):
        ChatLatent(model="x", **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option}=.* is impossible"):
        tiny_chat.invoke("hello", **{option: value})


@pytest.mark.parametrize("size", ["", "4 apples", "-1GiB", 0, -5, True, 1.5, "0"])
def test_a_memory_budget_that_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        LatentWorkspace(memory=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5kB", 1500), (77, 77), ("9", 9)]
)
def test_a_memory_budget_is_bytes_or_text(text: int | str, size: int) -> None:
    with LatentWorkspace(memory=text) as ws:
        assert ws.size_info().pool.budget_bytes == size


def test_what_was_closed_says_so(tiny_folder: Callable[..., Path]) -> None:
    ws = LatentWorkspace()
    chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=4)
    other = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=4)
    handle = chat.read("the report")
    chat.close()
    with pytest.raises(ClosedError, match="make a new one"):
        chat.invoke("hello")
    assert other.invoke("go on", inherit=handle).text
    ws.close()
    ws.close()
    for use in (lambda: other.invoke("hello"), lambda: other.read("hello")):
        with pytest.raises(ClosedError, match="make a new LatentWorkspace"):
            use()


def test_images_are_refused(tiny_chat: ChatLatent, nothing_lost: None) -> None:
    with pytest.raises(PromptError, match="'image_url'; ChatLatent reads text only"):
        tiny_chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


def test_a_local_folder_needs_no_network_and_no_token(tiny_folder: Callable[..., Path]) -> None:
    """Field cases 10, 11: with every socket blocked, and with no setting that says offline, a local folder works."""
    program = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise RuntimeError('the network was touched')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from langgraph_latent import ChatLatent\n"
        "print(ChatLatent(model=sys.argv[1], max_tokens=3).invoke('hello').usage_metadata['output_tokens'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    command = [sys.executable, "-c", program, str(tiny_folder("llama"))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "3", result.stderr
