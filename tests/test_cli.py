"""The command line as a user meets it: real processes, real models, both streams and the exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from langgraph_latent import __version__
from langgraph_latent.demo.agents import AGENTS
from langgraph_latent.demo.stats import AgentStats, DemoStats, EdgeStats, RunStats

TINY = {"num_hidden_layers": 1, "max_position_embeddings": 16_384}  # its tokens are bytes: 9,000 for the report
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            raise ModuleNotFoundError("blocked", name=name)
sys.meta_path.insert(0, Blocker())
from langgraph_latent.cli.app import main
main()
"""


def run(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-m", "langgraph_latent.cli"] if code is None else ["-c", code]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def tiny_run(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of the demo on a tiny model: its output and the trace it wrote."""
    trace = tmp_path_factory.mktemp("demo") / "run.jsonl"
    folder = tiny_folder("llama", **TINY)
    return run("demo", "--model", folder, "--json", "--max-tokens", 6, "--threads", 1, "--trace", trace), trace


@pytest.mark.slow
def test_demo_on_the_real_model_answers_equally_and_reads_half(smollm2: Path) -> None:
    result = run("demo", "--model", smollm2, "--json", "--max-tokens", 16)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    text, latent = found["runs"]

    assert found["same_tokens"]
    assert found["same_answers"]
    assert text["answers"] == latent["answers"]
    assert "door seal" in text["answers"]["analyst"]
    assert "Facilities Maintenance" in text["answers"]["router"]

    analyst, router = latent["agents"][1:]
    assert analyst["tokens_read"] <= 20
    assert router["tokens_read"] <= 24
    assert found["ratios"]["tokens_read"] > 1.9
    assert all(ratio > 3 for ratio in found["ratios"]["handover"].values())  # about 25; the machine may be busy


def test_json_has_both_runs_and_nothing_else_on_stdout(tiny_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, _ = tiny_run
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["threads"] == 1
    text, latent = found["runs"]
    assert [agent["name"] for agent in text["agents"]] == list(AGENTS)
    for run_name, stats in (("text", text), ("latent", latent)):
        assert stats["name"] == run_name
        assert stats["total_s"] > 0
        last = stats["agents"][-1]
        assert last["tokens_read"] + last["tokens_reused"] + last["tokens_written"] == stats["num_tokens"]
        assert sum(agent["tokens_read"] for agent in stats["agents"]) == stats["tokens_read"]
    assert text["tokens_reused"] == 0
    assert [edge["route"] for edge in text["edges"]] == ["text", "text"]
    assert [edge["route"] for edge in latent["edges"]] == ["cache", "cache"]
    # Each hand-over holds its receiver's reading and little else.
    for stats in (text, latent):
        for edge, agent in zip(stats["edges"], stats["agents"][1:], strict=True):
            assert agent["prefill_s"] <= edge["handover_s"] <= agent["prefill_s"] + 1


def test_json_progress_goes_to_stderr_line_by_line(tiny_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    lines = tiny_run[0].stderr.splitlines()
    assert "loading the model ..." in lines
    assert lines.index("text edges") < lines.index("latent edges")
    assert sum(line.startswith("  router   reads") for line in lines) == 2
    assert "\x1b" not in tiny_run[0].stderr, "no terminal, no escape codes"


def test_trace_prints_a_line_per_event(tiny_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, trace = tiny_run
    result = run("trace", trace)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    header, events = lines[0], lines[2:]
    assert header[:4] == ["time", "s", "thread", "event"]
    assert len(events) == len(trace.read_text().splitlines())
    routed = [" ".join(words) for words in events if "routed" in words]
    assert len(routed) == 2
    assert "latent routed reader -> analyst cache: same model" in routed[0]
    assert "latent routed analyst -> router cache: same model" in routed[1]


def test_trace_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    code = "import sys; from langgraph_latent.cli.trace import trace; from pathlib import Path\n"
    code += "trace(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    result = run(tmp_path / "empty.jsonl", code=code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "the trace is empty"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 1 is not a JSON record"),
        ("3", "line 1 is not a JSON record"),
        ('{"time": 1.0}', "line 1 is not an event of a LatentTracer: it has no 'thread_id'"),
    ],
)
def test_trace_of_another_file_is_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(line + "\n")
    assert_one_line_error(run("trace", path), message)


def test_lines_that_were_cut_off_are_left_out_and_named(
    tiny_run: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    lines = tiny_run[1].read_text().splitlines()
    path = tmp_path / "torn.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:50], lines[2], '{"a":' * 100_000]))
    result = run("trace", path)
    assert result.returncode == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.strip().startswith(("0.", "time"))]) >= 2
    assert "line 2 of" in result.stderr
    assert "line 4 of" in result.stderr


def test_output_without_json_has_tables_answers_and_verdict(
    tiny_folder: Callable[..., Path],
) -> None:
    folder = tiny_folder("llama", **TINY)
    result = run("demo", "--model", folder, "--max-tokens", 4)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for expected in (
        "reader -> analyst -> router",
        "tokens read",
        "hand-over reader -> analyst",
        "total time",
        "The answers are equal",
    ):
        assert expected in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_difference_is_shown_and_not_hidden() -> None:
    from langgraph_latent.cli.demo_view import print_result
    from langgraph_latent.cli.terminal import terminal

    edges = tuple(EdgeStats(a, b, "text", 1.0) for a, b in (("reader", "analyst"), ("analyst", "router")))
    agent = AgentStats("analyst", 1, 0, 1, 1.0, 1.0)
    text = RunStats("text", (agent,), edges, {"analyst": "a", "router": "b"}, (1, 2), 1.0)
    latent = RunStats("latent", (agent,), edges, {"analyst": "a", "router": "c"}, (1, 3), 1.0)
    console = terminal()
    with console.capture() as capture:
        print_result(console, DemoStats("m", "cpu", "bfloat16", 1.0, text, latent))
    assert "The answers differ. In bfloat16" in capture.get()


def test_unknown_folder_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    assert_one_line_error(run("demo", "--model", tmp_path / "nowhere", "--json"), "nowhere'; check the path")


def test_context_too_short_is_one_line_and_exit_code_1(tiny_folder: Callable[..., Path]) -> None:
    result = run("demo", "--model", tiny_folder("llama"), "--json")
    assert_one_line_error(result, "takes at most 2048")


def test_trace_that_cannot_be_written_is_known_before_the_model_loads(tmp_path: Path) -> None:
    result = run("demo", "--trace", tmp_path / "no" / "such" / "run.jsonl")
    assert_one_line_error(result, "the trace can't be written")
    assert result.stdout == ""


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_missing_extra_is_named(module: str) -> None:
    result = run("demo", code=BLOCKER.format(module=module))
    assert_one_line_error(result, f"the command line needs the package '{module}': pip install 'langgraph-latent[cli]'")


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == __version__
    shown = run("--help")
    assert shown.returncode == 0
    assert "demo" in shown.stdout
    assert "trace" in shown.stdout
    demo = run("demo", "--help").stdout
    assert all(option in demo for option in ("--model", "--json", "--max-tokens", "--trace", "--threads"))


@pytest.mark.parametrize("arguments", [["no-such-command"], ["demo", "--no-such-option"], ["demo", "--threads", "0"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert "Usage: langgraph-latent" in result.stderr


def assert_one_line_error(result: subprocess.CompletedProcess[str], message: str) -> None:
    """The last line of stderr is the error; what comes before is progress, never a traceback."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    *progress, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert message in last
    assert not any("error" in line.lower() for line in progress)
