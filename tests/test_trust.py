"""What came from outside answers for its own handle alone, at level 1 at best, unless this installation signed it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, Level, Repair, Route
from langgraph_latent.disk_cache import cache_dir
from langgraph_latent.errors import RouteError
from langgraph_latent.events import Ingested
from langgraph_latent.kv import codec
from langgraph_latent.kv.state import KVState
from langgraph_latent.workspace.signing import KEY_FILE, is_signed, signature_of

SYSTEM = ("system", "the team that reads the report")
REPORT, QUESTION = ("human", "hands over"), ("human", "what it knows?")
ALL = frozenset(Level)


@pytest.fixture(autouse=True)
def own_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this test's own for the key."""
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "installation"))


@pytest.fixture
def exported(tiny_folder: Callable[..., Path]) -> bytes:
    """A sound cache of a system prompt and a report."""
    with LatentWorkspace() as sender:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=sender)
        return chat.export_kv_cache(chat.read([SYSTEM, REPORT])) or b""


@pytest.fixture
def forged(exported: bytes, tiny_folder: Callable[..., Path]) -> bytes:
    """The same with other tensors, and digests that fit them."""
    with LatentWorkspace() as sender:
        spec = ChatLatent(model=str(tiny_folder("llama")), workspace=sender).spec
    handle, state = codec.decode(exported, spec)
    layers = [(keys * 3 + 1, values * -2) for keys, values in state.layers()]
    return codec.encode(handle, KVState.from_layers(state.kinds, layers, state.num_tokens), spec)


def truth(model: str, *messages: tuple[str, str]) -> str:
    """The answer in a workspace that has seen nothing else."""
    with LatentWorkspace() as clean:
        return ChatLatent(model=model, workspace=clean, max_tokens=12).invoke(list(messages)).text


def receiver(tiny_folder: Callable[..., Path], ws: LatentWorkspace, policy: EdgePolicy) -> ChatLatent:
    ws.router.default = policy
    return ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=12)


@pytest.fixture
def ws() -> LatentWorkspace:
    return LatentWorkspace(router=EdgeRouter())


def route_of(reply: object) -> tuple[str, int, str]:
    route = reply.response_metadata["kv_route"]  # type: ignore[attr-defined]
    return route["route"], route["level"], route["code"]


def assert_plain_prompts_are_right(chat: ChatLatent) -> None:
    for messages in ([SYSTEM, QUESTION], [SYSTEM, REPORT, QUESTION], [SYSTEM, REPORT]):
        assert chat.invoke(list(messages)).text == truth(chat.model, *messages)


def test_what_this_installation_signed_is_continued_at_level_0(tiny_chat: ChatLatent, exported: bytes) -> None:
    handle = tiny_chat.ingest_kv_cache(exported)
    reply = tiny_chat.invoke([QUESTION], inherit=handle)
    assert route_of(reply) == ("cache", 0, "same_model")
    assert reply.usage_metadata["input_token_details"]["cache_read"] >= handle.num_tokens
    assert reply.text == truth(tiny_chat.model, SYSTEM, REPORT, QUESTION)
    (event,) = [each for each in tiny_chat._lease.workspace.tracer.events if isinstance(each, Ingested)]
    assert event.is_proven


def test_a_forged_cache_is_re_read_by_default_and_never_serves_a_plain_prompt(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy())
    handle = chat.ingest_kv_cache(forged)
    assert_plain_prompts_are_right(chat)
    ws.pool.clear()
    handle = chat.ingest_kv_cache(forged)
    assert ws.explain(handle, chat).decision.code == "unproven"
    reply = chat.invoke([QUESTION], inherit=handle)
    assert route_of(reply) == ("text", 4, "unproven")
    assert reply.text == truth(chat.model, SYSTEM, REPORT, QUESTION)
    assert_plain_prompts_are_right(chat)


def test_where_level_1_is_allowed_it_serves_its_own_handle_and_what_goes_on_from_it(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(allow=ALL))
    handle = chat.ingest_kv_cache(forged)
    assert ws.explain(handle, chat).decision.code == "unproven"
    first = chat.invoke([QUESTION], inherit=handle)
    assert route_of(first) == ("cache", 1, "unproven")
    assert first.usage_metadata["input_token_details"]["cache_read"] >= handle.num_tokens
    second = chat.invoke([QUESTION], inherit=first)
    composed = chat.invoke([QUESTION], inherit=chat.compose([handle, chat.read("another report")]))
    for reply in (second, composed):
        route, level, code = route_of(reply)
        assert (route, level, code) == ("cache", 1, "unproven")
    assert_plain_prompts_are_right(chat)
    ws.check_integrity()


def test_it_is_computed_again_where_only_level_0_is_allowed(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(allow={Level.EXACT}, on_failure="raise"))
    reply = chat.invoke([QUESTION], inherit=chat.ingest_kv_cache(forged))
    assert route_of(reply)[:2] == ("cache", 0)
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 0
    assert reply.text == truth(chat.model, SYSTEM, REPORT, QUESTION)


def test_a_composition_that_is_repaired_in_full_promises_level_1_with_unproven_parts(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(allow=ALL, repair=Repair(1.0)))
    handle = chat.ingest_kv_cache(forged)
    assert route_of(chat.invoke([QUESTION], inherit=[handle, chat.read("another")]))[1] == 1


def test_nothing_unproven_is_signed_when_it_is_exported_again(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes, exported: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(allow=ALL))
    again = chat.export_kv_cache(chat.ingest_kv_cache(forged)) or b""
    _, state = codec.decode(again, chat.spec)
    _, honest = codec.decode(exported, chat.spec)
    for ours, theirs in zip(state.layers(), honest.layers(), strict=True):
        assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, theirs, strict=True))


def test_a_proven_cache_is_preferred_to_one_that_is_not(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(allow=ALL))
    own = chat.read([SYSTEM, REPORT])
    handle = chat.ingest_kv_cache(forged)
    assert handle == own
    reply = chat.invoke([QUESTION], inherit=handle)
    assert route_of(reply) == ("cache", 0, "same_model")
    assert reply.text == truth(chat.model, SYSTEM, REPORT, QUESTION)


@pytest.mark.parametrize("how", ["another key", "a changed signature", "a key that others can read"])
def test_what_is_signed_otherwise_is_not_proven(
    how: str, tiny_chat: ChatLatent, exported: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, signature = codec.signed_part(exported, tiny_chat.spec)
    assert is_signed(manifest, signature)
    blob = exported
    if how == "another key":
        monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "another"))
        assert signature_of(b"") != ""
    elif how == "a key that others can read":
        (cache_dir() / KEY_FILE).chmod(0o644)
    else:
        other = ("1" if signature[0] == "0" else "0") + signature[1:]
        blob = exported.replace(signature.encode(), other.encode())
        assert blob != exported
    assert not is_signed(*codec.signed_part(blob, tiny_chat.spec))
    handle = tiny_chat.ingest_kv_cache(blob)
    reply = tiny_chat.invoke([QUESTION], inherit=handle)
    assert route_of(reply) == ("text", 4, "unproven")
    assert reply.text == truth(tiny_chat.model, SYSTEM, REPORT, QUESTION)


def test_an_edge_that_forces_the_cache_of_an_unproven_handle_computes_it_again_or_takes_it_at_level_1(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    chat = receiver(tiny_folder, ws, EdgePolicy(route=Route.CACHE))
    reply = chat.invoke([QUESTION], inherit=chat.ingest_kv_cache(forged))
    assert route_of(reply)[:2] == ("cache", 0)
    assert reply.text == truth(chat.model, SYSTEM, REPORT, QUESTION)


def test_a_handle_of_another_tenant_stays_refused(exported: bytes, tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace(tenant="acme") as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws)
        with pytest.raises(Exception, match="another tenant"):
            chat.ingest_kv_cache(exported)


def test_eight_processes_that_begin_at_once_make_one_key_that_only_its_owner_can_read() -> None:
    script = "from langgraph_latent.workspace.signing import signature_of; print(signature_of(b'manifest'))"
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(8)]
    said = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(said) == 1
    assert said == {signature_of(b"manifest")}
    assert [path.name for path in cache_dir().iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((cache_dir() / KEY_FILE).stat().st_mode) == 0o600


def test_without_a_place_for_a_key_it_warns_and_exports_unsigned(
    tiny_chat: ChatLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    handle = tiny_chat.read("report")
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="exported without a signature"):
        blob = tiny_chat.export_kv_cache(handle) or b""
    assert codec.signed_part(blob, tiny_chat.spec).signature == ""


def test_a_cut_off_key_is_no_key(tiny_chat: ChatLatent) -> None:
    assert signature_of(b"x")
    (cache_dir() / KEY_FILE).write_bytes(b"")
    assert not is_signed(b"x", "")


def test_a_handle_keeps_its_level_after_the_unproven_tensors_are_evicted(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, forged: bytes
) -> None:
    """Computed again, what goes on from it is proven."""
    chat = receiver(tiny_folder, ws, EdgePolicy(allow=ALL))
    reply = chat.invoke([QUESTION], inherit=chat.ingest_kv_cache(forged))
    handle: KVHandle = ws.handle(reply)
    ws.pool.clear()
    again = chat.invoke([QUESTION], inherit=handle)
    assert route_of(again)[:2] == ("cache", 0)
    with pytest.raises(RouteError):
        receiver(tiny_folder, ws, EdgePolicy(allow=())).invoke([QUESTION], inherit=handle)
