"""The tracer counts everything, keeps the newest, and writes one whole JSON line per event from any thread."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from langgraph_latent import events
from langgraph_latent.errors import ConfigError
from langgraph_latent.events import CallSite, Decoded, Delivered, Event, Evicted, Prefilled, Produced, Routed
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.tracer import LatentTracer

CALL_SITE = CallSite("router", "thread-1", "run-1")
KINDS = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_frozen_and_one_flat_mapping_that_json_takes(kind: type[Event]) -> None:
    event = kind(call_site=CALL_SITE, handle="kv-1", model="m", source="reader", num_tokens=3, nbytes=4, duration_s=0.5)
    plain = event.to_dict()
    assert plain["event"] == kind.__name__.lower()
    assert (plain["node"], plain["thread_id"], plain["run_id"]) == ("router", "thread-1", "run-1")
    assert (plain["source"], plain["num_tokens"], plain["nbytes"], plain["duration_s"]) == ("reader", 3, 4, 0.5)
    assert plain["success"] is (kind not in (events.Refused, events.FellBack))
    assert not any(isinstance(value, dict) for value in plain.values())
    assert json.loads(json.dumps(plain)).keys() == plain.keys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.num_tokens = 5  # type: ignore[misc]


def test_an_event_about_a_handle_has_its_id_model_and_source() -> None:
    handle = KVHandle.root("m").extend("prompt", "reader", b"\0" * 8, [], 1)
    made = Delivered.of(handle, CALL_SITE, num_tokens=2, route="cache")
    assert type(made) is Delivered
    assert (made.handle, made.model, made.source, made.call_site) == (handle.id, "m", "reader", CALL_SITE)
    assert (made.num_tokens, made.route) == (2, "cache")
    assert Evicted.of(handle).call_site == CallSite()
    with pytest.raises(TypeError):
        Evicted.of(handle, no_such_field=1)


def test_a_trace_is_one_json_line_per_event_in_order(tmp_path: Path) -> None:
    """Field case 67: every hand-over, drop and fall-back is in the log, with both ends of its edge."""
    path = tmp_path / "run.jsonl"
    tracer = LatentTracer(path)
    tracer.emit(
        Produced(call_site=CALL_SITE, handle="kv-1", shape=(1, 2, 5, 8), num_layers=3, dtype="float32", nbytes=10)
    )
    tracer.emit(Evicted(call_site=CALL_SITE, handle="kv-1", reason="budget \N{LEFTWARDS ARROW}\nasked"))
    first, second = lines_of(path)
    assert (first["event"], second["event"]) == ("produced", "evicted")
    assert (first["shape"], first["dtype"], first["num_layers"], first["nbytes"]) == ([1, 2, 5, 8], "float32", 3, 10)
    assert second["reason"] == "budget \N{LEFTWARDS ARROW}\nasked"
    assert isinstance(first["time"], float)
    assert first["time"] <= second["time"]  # type: ignore[operator]


def test_a_second_tracer_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for number in range(2):
        LatentTracer(path).emit(Evicted(handle=f"kv-{number}"))
    assert [line["handle"] for line in lines_of(path)] == ["kv-0", "kv-1"]


def test_the_summary_counts_what_is_no_longer_kept() -> None:
    tracer = LatentTracer(keep=2)
    for number in range(5):
        tracer.emit(Prefilled(num_tokens=10, cache_read=100, duration_s=0.5))
        tracer.emit(Decoded(num_tokens=3, duration_s=0.25))
        tracer.emit(Routed(route="cache" if number else "text"))
        tracer.emit(Delivered(route="cache", cache_read=100))
    assert [type(event) for event in tracer.events] == [Routed, Delivered]
    summary = tracer.summary()
    assert summary.events == {"prefilled": 5, "decoded": 5, "routed": 5, "delivered": 5}
    assert summary.routes == {"cache": 4, "text": 1}
    assert (summary.tokens_prefilled, summary.tokens_decoded, summary.tokens_reused) == (50, 15, 500)
    assert (summary.prefill_s, summary.decode_s) == (2.5, 1.25)


def test_an_empty_trace_sums_to_nothing() -> None:
    tracer = LatentTracer()
    assert tracer.events == ()
    assert tracer.events == ()
    assert tracer.summary() == ({}, {}, 0, 0, 0, 0.0, 0.0)


def test_a_summary_does_not_change_afterwards() -> None:
    tracer = LatentTracer()
    tracer.emit(Evicted())
    before = tracer.summary()
    tracer.emit(Evicted())
    tracer.emit(Routed(route="text"))
    assert before.events == {"evicted": 1}
    assert before.routes == {}


def test_kept_events_are_the_emitted_ones_as_plain_data_too() -> None:
    tracer, event = LatentTracer(), Evicted(handle="kv-1", reason="asked")
    tracer.emit(event)
    assert tracer.events == (event,)
    assert [kept.to_dict() for kept in tracer.events] == [event.to_dict()]


def test_eight_threads_write_whole_lines_and_lose_none(tmp_path: Path) -> None:
    tracer = LatentTracer(tmp_path / "run.jsonl", keep=10_000)

    def work(number: int) -> None:
        for turn in range(50):
            tracer.emit(Prefilled(handle=f"{number}-{turn}", num_tokens=1, source="x" * 2000))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = {f"{number}-{turn}" for number in range(8) for turn in range(50)}
    assert {str(line["handle"]) for line in lines_of(tmp_path / "run.jsonl")} == want
    assert {event.handle for event in tracer.events} == want
    assert tracer.summary().tokens_prefilled == 400


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LatentTracer().emit(Evicted())
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_can_not_be_written_is_refused_before_the_run_and_not_in_it(tmp_path: Path) -> None:
    """A trace must never be what loses a run."""
    with pytest.raises(ConfigError, match=r"run\.jsonl"):
        LatentTracer(tmp_path / "no" / "such" / "folder" / "run.jsonl")
    with pytest.raises(ConfigError):
        LatentTracer(tmp_path)


# -- files -------------------------------------------------------------------------------------------------------------

EVENT = Evicted(handle="kv-1", reason="budget")


@pytest.mark.parametrize("how", ["full disk", "removed folder"])
def test_what_can_not_be_written_is_warned_of_once_and_ends_no_call(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tracer = LatentTracer("/dev/full" if how == "full disk" else folder / "run.jsonl")
    if how == "removed folder":
        (folder / "run.jsonl").unlink()
        folder.rmdir()
    with pytest.warns(UserWarning, match="events are not written to"):
        tracer.emit(EVENT)
    with warnings.catch_warnings(record=True) as later:
        tracer.emit(EVENT)
    assert later == []
    assert tracer.events == (EVENT, EVENT)


def test_the_file_stays_where_it_was_whatever_becomes_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracer = LatentTracer("run.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tracer.emit(EVENT)
    assert len(lines_of(tmp_path / "run.jsonl")) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_its_owner_alone_can_read_the_file(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        LatentTracer(tmp_path / "run.jsonl").emit(EVENT)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "run.jsonl").stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_is_followed_by_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    LatentTracer(path).emit(EVENT)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    LatentTracer(path).emit(EVENT)
    lines = path.read_bytes().splitlines()
    assert [line for line in lines if line.endswith(b"}")] == [lines[0], lines[2]]
    assert json.loads(lines[2])["event"] == "evicted"


def test_several_processes_write_whole_lines_to_one_file(tmp_path: Path) -> None:
    script = (
        "import sys; from langgraph_latent.tracer import LatentTracer; from langgraph_latent.events import Evicted\n"
        "tracer = LatentTracer(sys.argv[1])\n"
        "for _ in range(300): tracer.emit(Evicted(handle='kv-' + 'x' * 500, reason=sys.argv[2]))"
    )
    path = tmp_path / "run.jsonl"
    running = [subprocess.Popen([sys.executable, "-c", script, str(path), str(number)]) for number in range(4)]
    assert [process.wait(120) for process in running] == [0] * 4
    reasons = [line["reason"] for line in lines_of(path)]
    assert sorted(reasons) == sorted(str(number) for number in range(4) for _ in range(300))


@pytest.mark.parametrize("keep", [-1, 1.5, "many", None])
def test_an_impossible_number_of_kept_events_is_refused(keep: object) -> None:
    with pytest.raises(ConfigError, match="keep="):
        LatentTracer(keep=keep)  # type: ignore[arg-type]
