"""The matrix of several models, in its three forms and on the command line, where it needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest

from langgraph_latent.cli import probe as cli
from langgraph_latent.cli.terminal import terminal
from langgraph_latent.engine import loader
from langgraph_latent.engine.loader import num_resident
from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.spec.compat import Level, compare
from langgraph_latent.spec.matrix import MEANINGS, Matrix, reason, to_dict, to_html, to_terminal
from langgraph_latent.spec.spec import Capabilities, LayerSpec, ModelSpec

SPEC = ModelSpec(
    name="/models/base",
    architecture="LlamaForCausalLM",
    hidden_size=32,
    vocab_size=320,
    layers=(LayerSpec("full", 0, 2, 8, 8),) * 3,
    rope="",
    config="c",
    weights="w",
    tokenizer="t",
    template="c",
    adapters=(),
    dtype="float32",
    quantization="",
    attention="",
    max_positions=2048,
    bytes_per_token=384,
)
COPY = dataclasses.replace(SPEC, name="/elsewhere/base")
TUNED = dataclasses.replace(SPEC, name="/models/tuned", weights="x")
FOREIGN = dataclasses.replace(SPEC, name='/models/<b>"foreign"', hidden_size=64, architecture='A" onclick="<i>')
SPECS = (SPEC, COPY, TUNED, FOREIGN)
NO_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Blocker())
from langgraph_latent.cli.app import main
main()
"""


def shown(matrix: Matrix, width: int = 100) -> str:
    console = terminal(width=width)
    with console.capture() as capture:
        console.print(to_terminal(matrix))
    return capture.get()


# -- the values ------------------------------------------------------------------------------------------------------


def test_every_cell_is_what_compare_says() -> None:
    matrix = Matrix.of(SPECS)
    for sender, row in zip(SPECS, matrix.cells, strict=True):
        assert row == tuple(compare(sender, receiver) for receiver in SPECS)
    assert [(pair.sender, pair.receiver) for pair in matrix.pairs()] == [
        (a, b) for a in range(4) for b in range(4) if a != b
    ]


def test_a_required_level_is_reached_by_every_pair_or_not_at_all() -> None:
    assert Matrix.of((SPEC, COPY)).reaches(Level.EXACT)
    assert not Matrix.of((SPEC, COPY, TUNED)).reaches(Level.MOVED)
    assert Matrix.of((SPEC, COPY, TUNED)).reaches(Level.SIBLING)
    assert not Matrix.of(SPECS).reaches(Level.ADAPTED)
    assert Matrix.of(SPECS).reaches(Level.TEXT)


def test_a_model_is_itself_and_no_more_is_said_of_two_whose_weights_are_unknown() -> None:
    unknown = dataclasses.replace(SPEC, weights="")
    other = dataclasses.replace(unknown, name="/models/other")
    matrix = Matrix.of((unknown, other, unknown))
    assert [[cell.level for cell in row] for row in matrix.cells] == [
        [Level.EXACT, Level.SIBLING, Level.EXACT],
        [Level.SIBLING, Level.EXACT, Level.SIBLING],
        [Level.EXACT, Level.SIBLING, Level.EXACT],
    ]
    assert not matrix.reaches(Level.EXACT)


def test_weights_that_are_unknown_are_told_as_unknown() -> None:
    unknown = dataclasses.replace(SPEC, weights="")
    matrix = Matrix.of((unknown, dataclasses.replace(unknown, name="/models/other"), TUNED))
    text, page = shown(matrix, 300), Page(to_html(matrix)).text
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "base", "exact", "sibling?", "sibling?"] in rows
    for told in (text, page):
        assert "nothing that is known differs, but not all is known" in told
        assert "could be exact" in told
        assert "certificate" not in told
    assert [pair["could_be_exact"] for pair in to_dict(matrix)["pairs"]] == [True] * 6


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (("/a/x", "/a/y"), ("x", "y")),
        (("/a/x", "/b/x"), ("a/x", "b/x")),
        (("/a/x/config.json", "/a/x"), ("x/config.json", "x")),
        (("/a/x", "/a/x"), ("x", "x")),
        (("x", "/a/x"), ("x", "a/x")),
        (("owner/m", "other/m", "m.json"), ("owner/m", "other/m", "m.json")),
    ],
)
def test_names_are_as_short_as_they_stay_distinct(names: tuple[str, ...], short: tuple[str, ...]) -> None:
    assert Matrix.of([dataclasses.replace(SPEC, name=name) for name in names]).names == short


def test_a_reason_is_one_line_of_fields_and_remedies() -> None:
    assert reason(compare(SPEC, COPY)) == "same model"
    assert reason(compare(SPEC, TUNED)).startswith("weights: fine-tune of the same base")
    everything = dataclasses.replace(FOREIGN, weights="x", rope='{"rope_theta": 1}', config="d")
    assert reason(compare(SPEC, everything)).startswith("architecture, hidden_size, rope and 2 more: other geometry")


# -- JSON ------------------------------------------------------------------------------------------------------------


def test_json_is_plain_data_with_these_names() -> None:
    """A contract: scripts read it."""
    found = to_dict(Matrix.of(SPECS))
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["version", "require", "ok", "models", "levels", "pairs"]
    assert (found["require"], found["ok"]) == ("text", True)
    assert found["levels"] == [
        ["exact", "exact", "sibling", "text"],
        ["exact", "exact", "sibling", "text"],
        ["sibling", "sibling", "exact", "text"],
        ["text", "text", "text", "exact"],
    ]
    assert len(found["pairs"]) == 12
    tuned = next(pair for pair in found["pairs"] if (pair["sender"], pair["receiver"]) == (0, 2))
    assert list(tuned) == ["sender", "receiver", "level", "level_name", "could_be_exact", "differences", "notes"]
    assert (tuned["level"], tuned["level_name"]) == (2, "sibling")
    assert tuned["differences"] == [{"field": "weights", "sender": "w", "receiver": "x", "known": True}]
    assert "certificate" in tuned["notes"][0]
    assert {"name", "short_name", "weights", "sketch", "num_layers", "refusals"} <= set(found["models"][0])


def test_json_has_an_identity_where_it_is_the_loaded_model_s() -> None:
    """Files do not tell how a model will be run, which is a part of it."""
    loaded = dataclasses.replace(SPEC, attention="sdpa")
    models = to_dict(Matrix.of((SPEC, loaded)))["models"]
    assert "identity" not in models[0]
    assert models[1]["identity"] == loaded.identity


# -- a terminal ------------------------------------------------------------------------------------------------------


def test_a_terminal_shows_levels_as_words_and_a_line_per_pair_that_is_not_exact() -> None:
    text = shown(Matrix.of(SPECS))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines]
    assert ["1", "models/base", "exact", "exact", "sibling", "text"] in rows
    assert sum(words[1:2] == ["-"] and words[2:3] != ["2:"] for words in rows) == 5  # 1 and 2 are exact
    assert any(words[:4] == ["1", "-", "3", "sibling"] for words in rows)


def test_ten_models_fit_a_narrow_terminal() -> None:
    specs = [dataclasses.replace(SPEC, name=f"/models/a-model-with-a-long-name-{i}", weights=f"{i}") for i in range(10)]
    for width in (80, 100):
        lines = shown(Matrix.of(specs), width).splitlines()
        assert max(map(len, lines)) <= width
        rows = [line.split() for line in lines]
        levels = [words[2:] for words in rows if len(words) == 12 and all(word.isdigit() for word in words[2:])]
        assert levels == [["0" if i == j else "2" for j in range(10)] for i in range(10)]
        assert any(line.startswith("2 sibling: ") for line in lines)
        assert sum(words[1:2] == ["-"] and words[3:4] == ["sibling"] for words in rows) == 45


def test_reasons_are_whole_at_any_width_and_the_markers_are_explained() -> None:
    matrix = Matrix.of(SPECS)
    for width in (60, 100, 160):
        words = " ".join(shown(matrix, width).split())
        assert "1 - 2: both ways; 1 > 2: from 1 to 2" in words
        assert "level 2 needs a certificate measured for this pair" in words
        assert "…" not in words


def test_two_ways_that_differ_are_two_lines() -> None:
    limited = dataclasses.replace(COPY, capabilities=Capabilities((("move", "learned positions"),)))
    text = shown(Matrix.of((SPEC, limited)))
    assert any(line.split()[:4] == ["1", ">", "2", "exact"] for line in text.splitlines())
    assert "learned positions" in text
    assert "2 > 1" not in text


# -- a page ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what a page contains, and checks that it is well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_every_cell_has_its_level_and_reasons() -> None:
    matrix = Matrix.of(SPECS)
    page = Page(to_html(matrix))
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    flat = [cell for row in matrix.cells for cell in row]
    assert len(cells) == len(flat) == 16
    for attributes, cell in zip(cells, flat, strict=True):
        assert f"level-{int(cell.level)}" in str(attributes["class"]).split()
        assert all(sentence in str(attributes["title"]) for sentence in (*cell.reasons, *cell.notes))
    assert sum(tag == "summary" for tag, _ in page.tags) == sum(bool(cell.differences) for cell in flat)
    for _, attributes in page.tags:
        assert not {"src", "href", "onclick", "onload"} & set(attributes)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    style = to_html(matrix).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert "langgraph-latent probe MODEL" in page.text


def test_the_page_escapes_names() -> None:
    text = to_html(Matrix.of((SPEC, FOREIGN)))
    assert "<b>" not in text
    assert "<i>" not in text
    assert all("onclick" not in attributes for _, attributes in Page(text).tags)
    assert '<b>"foreign"' in Page(text).text


# -- the command line ------------------------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", NO_TORCH, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tiny_folder("llama")
    copy = tmp_path_factory.mktemp("copies") / "copy"
    shutil.copytree(base, copy)
    return {
        "base": base,
        "copy": copy,
        "tuned": tiny_folder("llama", seed=1),
        "foreign": tiny_folder("gpt2"),
        "config": base / "config.json",
    }


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        ("base copy", [], 0),
        ("base copy tuned", [], 0),
        ("base copy", ["--require", "exact"], 0),
        ("base copy tuned", ["--require", "exact"], 1),
        ("base copy tuned", ["--require", "sibling"], 0),
        ("base copy tuned", ["--require", "2"], 0),
        ("base copy tuned", ["--require", "moved"], 1),
        ("base foreign", ["--require", "SIBLING"], 1),
        ("base foreign", ["--require", "text"], 0),
        ("base config", ["--require", "exact"], 1),
        ("config config", ["--require", "0"], 0),
        ("base", [], 2),
        ("base copy", ["--require", "perfect"], 2),
        ("base copy", ["--require", "5"], 2),
        ("base copy", ["--no-such-option"], 2),
        ("base nowhere", [], 2),
        ("base copy", ["--html", "/no/such/folder/m.html"], 2),
    ],
)
def test_the_exit_code_is_for_ci_and_torch_is_not_needed(
    names: str, options: list[str], code: int, folders: dict[str, Path]
) -> None:
    result = run("matrix", *(folders.get(name, f"/{name}") for name in names.split()), *options)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert bool(result.stderr) == (code != 0)
    assert bool(result.stdout) == (code != 2)


def test_pairs_that_lack_the_level_are_told_on_stderr(folders: dict[str, Path]) -> None:
    models = [folders[name] for name in ("base", "copy", "config")]
    result = run("matrix", *models, "--require", "exact", "--json")
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("not exact: ") for line in lines)
    assert all(" is sibling?, weights" in line and line.endswith("may differ: not all is known") for line in lines)
    assert sum("config.json is sibling?, " in line for line in lines) == 2
    found = json.loads(result.stdout)
    assert (found["require"], found["ok"]) == ("exact", False)
    result = run("matrix", folders["base"], folders["tuned"], "--require", "moved")
    assert result.stderr.splitlines()[0].endswith(" is sibling, weights differ")


def test_an_unknown_model_is_one_line_on_stderr(folders: dict[str, Path]) -> None:
    result = run("matrix", folders["base"], "owner/no-such-model")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "error: 'owner/no-such-model' is neither a folder, a config file nor a model in the hub's cache"
    )


def test_json_and_page_in_one_run(folders: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "matrix.html"
    result = run("matrix", folders["base"], folders["copy"], folders["config"], "--json", "--html", page)
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["levels"][0] == ["exact", "exact", "sibling"]
    assert "Compatibility of 3 models" in Page(page.read_text()).text


def test_ten_config_files_take_less_than_three_seconds(folders: dict[str, Path], tmp_path: Path) -> None:
    """A time and not a ratio, as it is what a user waits for; about 2 s, interpreter and transformers included.

    Processor time, which is nearly all of it, so that a busy machine does not count.
    """
    files = [tmp_path / f"model-{index}.json" for index in range(10)]
    for index, file in enumerate(files):
        config = json.loads(folders["config"].read_text())
        file.write_text(json.dumps({**config, "rms_norm_eps": 1e-6 * (index + 1)}))
    times = []
    for _ in range(3):
        before = getrusage(RUSAGE_CHILDREN)
        result = run("matrix", *files)
        after = getrusage(RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0, result.stderr
    assert min(times) < 3


def test_the_documentation_names_every_level_with_its_meaning() -> None:
    text = (Path(__file__).parents[1] / "docs" / "matrix.md").read_text()
    for level, meaning in MEANINGS.items():
        assert f"| {int(level)} | {level.name.lower()} | {meaning} |" in text


# -- probe -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`probe(model, as_json=...)` in this process, where torch is imported already: exit code, stdout, stderr."""
    monkeypatch.setattr(cli, "silence_loading", lambda: None)

    def probe(model: object, *, as_json: bool = False) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli._probe(str(model), as_json)
        return code, *capsys.readouterr()

    return probe


def test_probe_prints_what_the_spec_says(folders: dict[str, Path], probe: Callable[..., tuple[int, str, str]]) -> None:
    num_before = num_resident()
    code, text, _ = probe(folders["base"], as_json=True)
    found = json.loads(text)
    assert code == 0
    assert set(found["capabilities"]) == {"append", "crop", "move", "think", "batch"}
    assert found["capabilities"]["append"] == {"can": True, "reason": ""}
    assert found["layers"][0]["kind"] == "full"
    assert len(found["identity"]) == 32
    code, text, _ = probe(folders["base"])
    assert code == 0
    assert "3 x full, 2 heads of 8 and 8 channels" in text
    assert found["identity"] in text
    assert num_resident() == num_before


def test_probe_of_a_refused_model_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, probe: Callable[..., tuple[int, str, str]]
) -> None:
    def acquire(key: object) -> None:
        raise UnsupportedLayerError("no cache\nof a known kind")

    monkeypatch.setattr(loader, "acquire", acquire)
    code, text, error = probe("any")
    assert (code, error) == (1, "error: no cache of a known kind\n")
    assert "Traceback" not in text


def test_probe_of_a_model_whose_caches_can_not_be_continued_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, probe: Callable[..., tuple[int, str, str]]
) -> None:
    spec = dataclasses.replace(SPEC, capabilities=Capabilities((("append", "it is not causal"),)))
    monkeypatch.setattr(cli, "_load_spec", lambda model: spec)
    code, text, error = probe("any", as_json=True)
    assert (code, error) == (1, "")
    assert json.loads(text)["capabilities"]["append"] == {"can": False, "reason": "it is not causal"}


def test_probe_of_no_model_is_one_line_and_exit_code_2(probe: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = probe("/nowhere")
    assert code == 2
    (line,) = error.splitlines()
    assert line.startswith("error: there is no folder '/nowhere'")


def test_probe_of_a_config_says_what_it_needs_without_torch(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["config"], tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        result = run("probe", model)
        assert result.returncode == 2
        (line,) = [line for line in result.stderr.splitlines() if line]
        assert line.endswith("probe needs the weights; for configs use `langgraph-latent matrix`")


def test_probe_says_why_a_capability_is_missing() -> None:
    spec = dataclasses.replace(SPEC, capabilities=Capabilities((("move", "learned positions"),), "learned", True))
    console = terminal()
    with console.capture() as capture:
        console.print(cli._table(spec))
    rows = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "move no: learned positions" in rows
    assert "append yes" in rows
    assert "positions learned" in rows
    assert cli._to_dict(spec)["capabilities"]["move"] == {"can": False, "reason": "learned positions"}
