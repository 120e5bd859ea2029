"""The benchmark runs from end to end on a tiny model, and what it counts (not: what it times) is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.handoff import choose_rows
from benchmarks.harness import at_least, at_most
from benchmarks.rows import peers

ROOT = Path(__file__).parent.parent
ROWS = ["handover", "first-token", "text-handover", "chain", "equal-chain", "decode", "bytes", "export"]


def benchmark(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it as a user does, in a process of its own with one thread."""
    command = [sys.executable, "-m", "benchmarks.handoff", "--threads", "1", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def report(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one quick run wrote: full attention, and a sliding window that every context exceeds."""
    file = tmp_path_factory.mktemp("benchmark") / "report.json"
    run = benchmark("--quick", "--model", tiny_folder(request.param), "--json", file, "--markdown")
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
    said = " ".join(capsys.readouterr().err.split())
    assert "pip install 'avp==" in said
    assert "pip install 'latentmesh==" in said


def test_an_installed_peer_adds_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: ["latentmesh"])
    assert list(choose_rows(["bytes"], with_peers=True)) == ["bytes", "peers"]


def test_goals_know_their_direction() -> None:
    assert at_least(1.1, aim=1.2).is_met(1.1)
    assert not at_least(1.1, aim=1.2).is_aim_met(1.15)
    assert at_most(0.4).is_met(0.4)
    assert not at_most(0.4).is_met(0.41)
