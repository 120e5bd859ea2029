"""The examples run as a reader runs them, on a tiny model with a long context."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from langgraph_latent import LatentChannel

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *options: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def model(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("llama", max_position_embeddings=16384))


def test_sequential_chain_reads_the_report_once(model: str, tmp_path: Path) -> None:
    said = run("sequential_chain.py", "--model", model, cwd=tmp_path)
    rows = [(node, int(read), int(reused)) for node, read, reused in re.findall(r"(?m)^(\w+) +(\d+) +(\d+)  ", said)]
    (reader, analyst, writer) = rows
    assert [row[0] for row in rows] == ["reader", "analyst", "writer"]
    assert reader[1] > 1000
    assert reader[2] == 0
    assert analyst[2] == reader[1]
    assert writer[2] > analyst[2]
    assert max(analyst[1], writer[1]) < 100
    assert said.count("cache: same model") == 2


def test_fan_out_fan_in_reads_the_report_once_and_joins_three_handles(model: str, tmp_path: Path) -> None:
    said = run("fan_out_fan_in.py", "--model", model, cwd=tmp_path)
    read = {node: (int(new), int(old)) for node, new, old in re.findall(r"(?m)^(\w+) +(\d+) +(\d+)$", said)}
    assert set(read) == {"reader", "causes", "damage", "people", "editor"}
    assert {read[name][1] for name in ("causes", "damage", "people")} == {read["reader"][0]}
    assert read["editor"][1] > read["reader"][0]
    edges = re.findall(r"(?m)^(\w+) +-> (\w+) +(\w+): ", said)
    assert edges[-3:] == [("causes", "editor", "cache"), ("damage", "editor", "text"), ("people", "editor", "text")]


def test_checkpointed_loop_finishes_undisturbed(model: str, tmp_path: Path) -> None:
    """Killed and resumed, it is in test_checkpoints.py."""
    said = run("checkpointed_loop.py", "--model", model, "--rounds", "2", "--max-tokens", "8", cwd=tmp_path)
    assert re.findall(r"(?m)^\[(\w+)\]", said) == ["draft", "critic", "draft"]
    assert "answer: " in said
    assert "rebuilt" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpointed_loop.sqlite"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_says_what_it_shows_and_names_no_path_of_this_machine(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.startswith('"""')
    assert f"python examples/{path.name}" in source.split('"""')[1]
    assert not re.search(r"/(home|root|work|tmp|Users)/", source)


def test_there_are_three_examples_and_one_shows_how_to_collect() -> None:
    assert [path.name for path in EXAMPLES] == ["checkpointed_loop.py", "fan_out_fan_in.py", "sequential_chain.py"]
    assert f'{LatentChannel.__name__}(policy="collect")' in (ROOT / "examples" / "fan_out_fan_in.py").read_text()
