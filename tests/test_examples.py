"""The examples run as a reader runs them, on a tiny model with a long context or on one that calls tools; and so do the
blocks of docs/from-chathuggingface.md."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from langgraph_latent import ChatLatent, LatentChannel
from langgraph_latent.errors import ConfigError, PromptError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMMON = ROOT / "examples" / "common.py"
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {COMMON})
PAGE = ROOT / "docs" / "from-chathuggingface.md"


def run(name: str, *options: str, cwd: Path) -> str:
    return run_python(str(ROOT / "examples" / name), *options, cwd=cwd)


def run_python(*arguments: str, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
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
    printed = run("sequential_chain.py", "--model", model, cwd=tmp_path)
    rows = [(node, int(read), int(reused)) for node, read, reused in re.findall(r"(?m)^(\w+) +(\d+) +(\d+)  ", printed)]
    (reader, analyst, writer) = rows
    assert [row[0] for row in rows] == ["reader", "analyst", "writer"]
    assert reader[1] > 1000
    assert reader[2] == 0
    assert analyst[2] == reader[1]
    assert writer[2] > analyst[2]
    assert max(analyst[1], writer[1]) < 100
    assert printed.count("cache: same model") == 2


def test_fan_out_fan_in_reads_the_report_once_and_joins_three_handles(model: str, tmp_path: Path) -> None:
    printed = run("fan_out_fan_in.py", "--model", model, cwd=tmp_path)
    read = {node: (int(new), int(old)) for node, new, old in re.findall(r"(?m)^(\w+) +(\d+) +(\d+)$", printed)}
    assert set(read) == {"reader", "causes", "damage", "people", "editor"}
    assert {read[name][1] for name in ("causes", "damage", "people")} == {read["reader"][0]}
    assert read["editor"][1] > read["reader"][0]
    edges = re.findall(r"(?m)^(\w+) +-> (\w+) +(\w+): ", printed)
    assert edges[-3:] == [("causes", "editor", "cache"), ("damage", "editor", "text"), ("people", "editor", "text")]


def test_checkpointed_loop_finishes_undisturbed(model: str, tmp_path: Path) -> None:
    """Killed and resumed, it is in test_checkpoints.py."""
    printed = run("checkpointed_loop.py", "--model", model, "--rounds", "2", "--max-tokens", "8", cwd=tmp_path)
    assert re.findall(r"(?m)^\[(\w+)\]", printed) == ["draft", "critic", "draft"]
    assert "answer: " in printed
    assert "rebuilt" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["checkpointed_loop.sqlite"]


def reuse(printed: str) -> list[tuple[str, int, int]]:
    """Of each reply that was printed: whose, tokens of its prompt that were reused, and all of them."""
    found = re.findall(r"(?m)^(\w+) .*\[(\d+) of (\d+) prompt tokens reused\]$", printed)
    return [(name, int(reused), int(all_tokens)) for name, reused, all_tokens in found]


def test_agent_calls_its_tools_and_rereads_nothing(tool_model: Path, tmp_path: Path) -> None:
    printed = run("agent.py", "--model", str(tool_model), cwd=tmp_path)
    assert re.findall(r"(?m)^agent +(\w+\(.*\))", printed) == [
        "stock_level(item='pallets')",
        "location(item='pallets')",
    ]
    assert re.findall(r"(?m)^ +-> (.*)$", printed) == ["40", "hall 3"]
    assert "There are 40 pallets in stock." in printed
    assert "hall 3.   [" in printed
    first, *others = reuse(printed)
    assert first[1] == 0
    assert len(others) == 3
    assert all(all_tokens - reused < 30 for _, reused, all_tokens in others)


def test_supervisor_and_workers_share_one_model(
    tool_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGGRAPH_LATENT_TOOL_MODEL", str(tool_model))
    printed = run("supervisor.py", cwd=tmp_path)
    assert re.findall(r"(?m)^(\w+) +(.*)   \[", printed) == [
        ("supervisor", "transfer_to_stock()"),
        ("stock", "There are 40 pallets in stock."),
        ("supervisor", "There are 40 pallets in stock."),
        ("supervisor", "transfer_to_trucks()"),
        ("trucks", "The next truck to Hamburg leaves at 14:30."),
        ("supervisor", "The next truck to Hamburg leaves at 14:30."),
    ]
    assert all(reused > all_tokens * 0.8 for _, reused, all_tokens in reuse(printed)[1:])
    assert printed.rstrip().endswith("models loaded: 1")


def test_swarm_hands_the_conversation_on_and_back(tool_model: Path, tmp_path: Path) -> None:
    printed = run("swarm.py", "--model", str(tool_model), cwd=tmp_path)
    assert re.findall(r"(?m)^(\w+) +(\w+\(.*\))   \[", printed) == [
        ("stock", "transfer_to_trucks()"),
        ("trucks", "next_truck(city='Hamburg')"),
        ("trucks", "transfer_to_stock()"),
        ("stock", "stock_level(item='pallets')"),
    ]
    assert "-> The next truck to Hamburg leaves at 14:30.\n" in printed
    assert "-> There are 40 pallets in stock.\n" in printed
    assert re.findall(r"\((\w+) has the floor\)", printed) == ["trucks", "stock"]
    assert all(reused > all_tokens * 0.7 for _, reused, all_tokens in reuse(printed)[2:])


@pytest.mark.parametrize("name", ["agent.py", "supervisor.py"])
def test_a_model_without_a_tool_template_gets_through(name: str, model: str, tmp_path: Path) -> None:
    """A random model: nothing it says makes sense, and nothing fails."""
    printed = run(name, "--model", model, cwd=tmp_path)
    assert printed.count("user  ") == 2


def page_blocks() -> list[str]:
    """The page's blocks of code that can run here."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    has_stock = importlib.util.find_spec("langchain_huggingface") is not None
    return [block for block in blocks if has_stock or "langchain_huggingface" not in block]


def test_page_from_chathuggingface_runs_and_gives_what_it_says(smollm2: Path, tmp_path: Path) -> None:
    code = "\n".join(page_blocks()).replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm2))
    code, num_checks = re.subn(
        r"(?m)^(\S.*?)  # -> (.*)$", lambda found: f"assert str(({found[1]})) == {found[2]!r}, ({found[1]})", code
    )
    assert num_checks >= 11
    script = tmp_path / "page.py"
    script.write_text(code, encoding="utf-8")
    run_python(str(script), cwd=tmp_path)


class Sum(BaseModel):
    """Two numbers to add."""

    a: int
    b: int


CALL = AIMessage("", tool_calls=[{"name": "Sum", "args": {"a": 2, "b": 3}, "id": "call00001"}])
TOOL_HISTORY = [HumanMessage("What is 2 plus 3?"), CALL, ToolMessage("5", tool_call_id="call00001")]


@pytest.fixture(scope="module")
def stock(smollm2: Path) -> Any:
    """ChatHuggingFace over a local pipeline."""
    if importlib.util.find_spec("langchain_huggingface") is None:
        pytest.skip("langchain-huggingface is not installed")
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    return ChatHuggingFace(
        llm=HuggingFacePipeline.from_model_id(str(smollm2), task="text-generation", pipeline_kwargs=options)
    )


@pytest.mark.filterwarnings("ignore")  # other people's
def test_chathuggingface_is_as_the_page_says(stock: Any) -> None:
    question = "Name a color."
    plain = stock.invoke(question)
    bound = stock.bind_tools([Sum], tool_choice="Sum").invoke(question)
    assert (bound.text, bound.tool_calls) == (plain.text, [])
    assert plain.usage_metadata is None
    with pytest.raises(ValueError, match="Last message must be a HumanMessage"):
        stock.invoke(TOOL_HISTORY)
    with pytest.raises(ValueError, match="Unknown message type"):
        stock.invoke([*TOOL_HISTORY, HumanMessage("So?")])
    with pytest.raises(NotImplementedError):
        stock.with_structured_output(Sum)
    assert stock.with_structured_output(Sum.model_json_schema()).invoke("Add 2 and 3.") is None
    with pytest.raises(OutputParserException):
        stock.with_structured_output(Sum, method="json_schema").invoke("Add 2 and 3.")
    chunks = list(stock.stream(question, stop=["color"]))
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert not any(chunk.usage_metadata for chunk in chunks)
    with pytest.raises(NotImplementedError):
        asyncio.run(stock.ainvoke(question))
    with pytest.raises(AttributeError):
        asyncio.run(anext(stock.astream(question)))
    assert stock.invoke(question, stop=["color"], max_tokens=2, no_such_option=1).text == plain.text
    assert len(stock.invoke(question, pipeline_kwargs={"max_new_tokens": 2}).text) < len(plain.text)
    full = {"max_new_tokens": 2, "return_full_text": True}
    assert question in stock.invoke(question, pipeline_kwargs=full).text


def test_chat_latent_is_as_the_page_says(smol_chat: ChatLatent) -> None:
    """What its blocks do not show."""
    assert smol_chat.invoke(TOOL_HISTORY).text
    assert smol_chat.invoke([*TOOL_HISTORY, HumanMessage("So?")]).text
    assert smol_chat.invoke([HumanMessage("What is 2 plus 3?"), AIMessage("5")]).text
    for method in ("function_calling", "json_schema", "json_mode"):
        sums = smol_chat.with_structured_output(Sum, method=method, include_raw=True)
        assert {*sums.invoke("Add 2 and 3.", max_tokens=64)} == {"raw", "parsed", "parsing_error"}
    with pytest.raises(ConfigError, match="no_such_option"):
        smol_chat.invoke("Name a color.", no_such_option=1)
    image = {"type": "image", "url": "https://example.com/a.png"}
    with pytest.raises(PromptError, match="image"):
        smol_chat.invoke([HumanMessage([image])])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_says_what_it_shows_and_names_no_path_of_this_machine(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.startswith('"""')
    assert f"python examples/{path.name}" in source.split('"""')[1]
    assert not re.search(r"/(home|root|work|tmp|Users)/", source)


def test_every_example_is_run_and_one_shows_how_to_collect() -> None:
    run_here = Path(__file__).read_text(encoding="utf-8")
    assert not [path.name for path in EXAMPLES if f'run("{path.name}"' not in run_here]
    assert f'{LatentChannel.__name__}(policy="collect")' in (ROOT / "examples" / "fan_out_fan_in.py").read_text()
