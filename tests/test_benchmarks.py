"""The benchmark runs from end to end on a tiny model, and what it counts (not: what it times) is right."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import swap
from benchmarks.handoff import choose_rows
from benchmarks.harness import at_least, at_most
from benchmarks.rows import peers
from benchmarks.swap_rows import GRAMMAR, HUGGING_FACE, NEEDS, SWAPPED, Need

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ROWS = [
    "handover", "first-token", "text-handover", "chain", "equal-chain", "decode", "detokenize", "bytes", "export",
    "merge",
]  # fmt: skip


def benchmark(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run one as a user does, in a process of its own with one thread."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--threads", "1", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def report(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one quick run wrote: full attention, and a sliding window that every context exceeds."""
    file = tmp_path_factory.mktemp("benchmark") / "report.json"
    run = benchmark("handoff", "--quick", "--model", tiny_folder(request.param), "--json", file, "--markdown")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "| goal |" in run.stdout
    return dict(json.loads(file.read_text()), markdown=run.stdout)


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (each for each in report["rows"] if each["name"] == name)
    return found


def figure(report: dict[str, Any], row_name: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in row(report, row_name)["figures"] if each["name"] == name)
    return found


def test_every_row_has_samples_medians_and_goals(report: dict[str, Any]) -> None:
    assert [each["name"] for each in report["rows"]] == ROWS
    for each in report["rows"]:
        assert "error" not in each
        assert each["samples"]
        assert all(values and all(value >= 0 for value in values) for values in each["samples"].values())
        assert each["figures"]
        for shown in each["figures"]:
            assert shown["min"] <= shown["median"] <= shown["max"]
            assert (shown["goal"] is None) == (shown["met"] is None)
        assert each["name"] == "export" or any(shown["goal"] for shown in each["figures"])


def test_machine_is_described_without_paths(report: dict[str, Any]) -> None:
    facts = report["machine"]
    assert facts["threads"] == 1
    assert {"cpu", "cores", "torch", "transformers", "date", "load_at_start"} <= set(facts)
    assert not any("/" in str(value) for key, value in facts.items() if key != "cpu")
    assert str(ROOT) not in report["markdown"]


def test_sides_that_must_agree_do(report: dict[str, Any]) -> None:
    checks = {each["name"]: each["checks"] for each in report["rows"]}
    assert all(all(each.values()) for each in checks.values())
    for name in ("first-token", "chain", "equal-chain", "decode"):
        assert checks[name], f"{name} compares no tokens"
    assert "decoding writes in place, without a second storage" in checks["decode"]
    assert checks["detokenize"], "the text is compared with nothing"


def test_a_chain_shares_one_storage(report: dict[str, Any]) -> None:
    assert figure(report, "bytes", "copies of the prefix")["median"] == 0
    assert figure(report, "bytes", "bytes, against one cache of the final length")["median"] == 1
    spare = figure(report, "bytes", "bytes with spare capacity")
    assert spare["median"] <= 1.25
    assert spare["met"] is True


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(typer.BadParameter, match=r"no row 'hand-over'; known rows: handover, first-token"):
        choose_rows(["hand-over"], with_peers=False)


def test_missing_peers_are_named_with_the_command_that_adds_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "missing", lambda: ["avp", "latentmesh"])
    assert list(choose_rows(["bytes"], with_peers=True)) == ["bytes"]
    printed = " ".join(capsys.readouterr().err.split())
    assert "pip install 'avp==" in printed
    assert "pip install 'latentmesh==" in printed


def test_an_installed_peer_adds_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: ["latentmesh"])
    assert list(choose_rows(["bytes"], with_peers=True)) == ["bytes", "peers"]


def test_goals_know_their_direction() -> None:
    assert at_least(1.1, aim=1.2).is_met(1.1)
    assert not at_least(1.1, aim=1.2).is_aim_met(1.15)
    assert at_most(0.4).is_met(0.4)
    assert not at_most(0.4).is_met(0.41)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def swapped(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one quick run of the swap benchmark wrote; rows whose packages are not installed are missing."""
    file = tmp_path_factory.mktemp("swap") / "report.json"
    model = tiny_folder(request.param, max_position_embeddings=8192)
    run = benchmark("swap", "--quick", "--model", model, "--json", file, "--markdown")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Measured by `python -m benchmarks.swap`" in run.stdout
    return dict(json.loads(file.read_text()), markdown=run.stdout)


def test_every_row_that_can_run_has_figures_and_checks(swapped: dict[str, Any]) -> None:
    expected = [*SWAPPED] * HUGGING_FACE.is_installed() + ["tools"] * GRAMMAR.is_installed()
    assert [each["name"] for each in swapped["rows"]] == [*expected, "branches", "first-token"]
    for each in swapped["rows"]:
        assert "error" not in each
        assert each["figures"]
        assert each["checks"]
        assert all(each["checks"].values())


@pytest.mark.skipif(not HUGGING_FACE.is_installed(), reason="needs langchain-huggingface")
def test_the_same_graph_reads_less_and_writes_the_same(swapped: dict[str, Any]) -> None:
    calls = {"single": 4, "chain": 6, "supervisor": 5, "fan-out": 5, "loop": 6, "chain-in-front": 6}
    assert list(calls) == list(SWAPPED)
    for name, num_calls in calls.items():
        assert row(swapped, name)["notes"] == {"calls": num_calls, "equal_answers": num_calls}
        assert row(swapped, name)["remarks"] == {"answers": "equal"}
        assert figure(swapped, name, "tokens prefilled")["median"] < (0.6 if name == "chain-in-front" else 0.35)
    assert "| answers | equal |" in swapped["markdown"]


@pytest.mark.skipif(not GRAMMAR.is_installed(), reason="needs llguidance")
def test_the_tool_loop_says_why_it_has_no_other_side(swapped: dict[str, Any]) -> None:
    assert figure(swapped, "tools", "tokens prefilled")["median"] < 0.4
    printed = row(swapped, "tools")["remarks"]["ChatHuggingFace"]
    assert printed.startswith("can't: bind_tools()" if HUGGING_FACE.is_installed() else "not installed")


def test_branches_are_measured_as_graph_and_batch(swapped: dict[str, Any]) -> None:
    names = [each["name"] for each in row(swapped, "branches")["figures"]]
    assert len(names) == 8
    assert {"1,024 tokens, 4 branches, fan-out", "256 tokens, 8 branches, batch"} <= set(names)


def test_rows_without_their_package_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Need, "is_installed", lambda need: False)
    assert list(swap.choose_rows(None)) == ["branches", "first-token"]
    printed = " ".join(capsys.readouterr().err.split())
    assert "langchain-huggingface, which single, chain" in printed
    assert all(f"pip install '{need.requirement}'" in printed for need in NEEDS)


def test_a_package_is_looked_for_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not HUGGING_FACE.is_installed()


def test_an_unknown_swap_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(typer.BadParameter, match=r"no row 'swarm'; known rows: single, chain, supervisor"):
        swap.choose_rows(["swarm"])
