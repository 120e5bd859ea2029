"""Which layers carry a context: found where they are made to, better than by rule, and remembered."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from langgraph_latent import ChatLatent, LatentWorkspace, Selection
from langgraph_latent.errors import ConfigError, UnsupportedLayerError
from langgraph_latent.evaluation import importance
from langgraph_latent.evaluation.importance import PASSAGES, Passage, best_layers, effect_kept, layer_importance

pytestmark = pytest.mark.slow

TEXTS = (
    Passage("the team reads the report that it knows", "what the team knows", "the report"),
    Passage("the answer hands over the team", "and writes", "the team decides"),
)
HELD_OUT = (
    Passage(
        "Nadia Brandt lives in Graz and owns nine beehives. The insurance of Nadia Brandt costs 412 euros a year. "
        "Ravi Menon lives in Lugo and owns a steam engine. The insurance of Ravi Menon costs 97 euros a year. "
        "Keiko Arai lives in Tunis and owns a wooden boat. The insurance of Keiko Arai costs 655 euros a year.",
        "Where does Ravi Menon live and what does Ravi Menon own?",
        "Ravi Menon lives in Lugo and owns a steam engine.",
    ),
    Passage(
        "The meeting is on Tuesday at nine in room 14. Please bring the blue folder and the keys of the archive. Lunch "
        "is at noon in the garden, and the afternoon is free for everyone except the drivers.",
        "What should I bring to the meeting?",
        "Please bring the blue folder and the keys of the archive.",
    ),
    Passage(
        "The kiln must first be heated to 200 degrees for two hours. Then the temperature rises to 950 degrees, and "
        "stays there for six hours. Glazed pots need another firing at 1240 degrees on the next day.",
        "At which temperature are glazed pots fired?",
        "Glazed pots need another firing at 1240 degrees on the next day.",
    ),
)


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of tiny models is not kept for other tests."""
    if "smol_chat" not in request.fixturenames:
        monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "memory"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every measurement that is made, as one entry."""
    made: list[int] = []
    read = importance._read

    def counting(*arguments: Any) -> Any:
        made.append(1)
        return read(*arguments)

    monkeypatch.setattr(importance, "_read", counting)
    return made


def without_values(chat: ChatLatent, *layers: int) -> None:
    """Make a model's layers add nothing by attention."""
    with torch.no_grad():
        for layer in layers:
            chat.resident().model.model.layers[layer].self_attn.v_proj.weight.zero_()


@pytest.fixture
def own_chat(tmp_path: Path) -> Iterator[ChatLatent]:
    """A chat model over a model that no other test uses, of five layers."""
    from langgraph_latent.testing import tiny_model

    folder = tiny_model(tmp_path / "model", "llama", num_hidden_layers=5)
    with LatentWorkspace(memory="1GiB") as ws:
        yield ChatLatent(model=str(folder), workspace=ws)


# -- what is measured ------------------------------------------------------------------------------------------------


def test_there_is_a_score_for_each_layer_and_it_is_the_same_each_time(
    tiny_chat: ChatLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = layer_importance(tiny_chat, TEXTS)
    assert len(scores) == 3
    assert all(score > 0 for score in scores)
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "another"))
    assert layer_importance(tiny_chat, TEXTS) == scores


def test_a_layer_that_adds_nothing_has_no_importance(own_chat: ChatLatent) -> None:
    without_values(own_chat, 2)
    scores = layer_importance(own_chat, TEXTS)
    assert scores[2] == 0 == min(scores)
    assert sorted(scores)[1] > 0


def test_the_one_layer_that_matters_is_found(own_chat: ChatLatent) -> None:
    without_values(own_chat, 0, 1, 2, 4)
    assert best_layers(layer_importance(own_chat, TEXTS), 0.2) == (3,)
    assert effect_kept(own_chat, (3,), TEXTS) == pytest.approx(1)
    assert effect_kept(own_chat, (0, 1, 2, 4), TEXTS) == pytest.approx(0)


def test_all_layers_keep_everything_and_none_nothing(tiny_chat: ChatLatent) -> None:
    assert effect_kept(tiny_chat, range(3), TEXTS) == 1
    assert effect_kept(tiny_chat, (), TEXTS) == 0


def test_hiding_is_what_a_composed_handle_does(tiny_chat: ChatLatent) -> None:
    """The measurement's state sees its context as a receiver of `Selection(layers=...)` does."""
    from langchain_core.messages import HumanMessage

    ws = tiny_chat.workspace
    assert ws is not None
    handle = tiny_chat.compose(tiny_chat.read([HumanMessage(TEXTS[0].context)]), select=Selection(layers=(0, 2)))
    composed = ws.state_of(handle, tiny_chat.resident())
    (read,) = importance._read(tiny_chat, tiny_chat.resident(), TEXTS[:1])
    mine = read._seen_in({0, 2})
    assert [bias.isinf().any().item() for bias in composed.biases] == [False, True, False]
    assert [bias.isinf().any().item() for bias in mine.biases] == [False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(mine.biases, composed.biases, strict=True))


def test_sliding_windows_are_measured_too(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("mistral")), workspace=ws)
    assert all(math.isfinite(score) for score in layer_importance(chat, TEXTS))


def test_nothing_is_left_in_the_workspace(tiny_chat: ChatLatent) -> None:
    layer_importance(tiny_chat, TEXTS)
    assert tiny_chat.workspace is not None
    info = tiny_chat.workspace.size_info()
    assert (info.pool.num_entries, info.num_handles) == (0, 0)


@pytest.mark.timeout(600)
def test_held_out_passages_keep_more_by_it_than_by_rule(smol_chat: ChatLatent) -> None:
    scores = layer_importance(smol_chat)
    last, spaced = range(15, 30), range(0, 30, 2)
    half, quarter = best_layers(scores, 0.5), best_layers(scores, 0.25)
    assert effect_kept(smol_chat, half, HELD_OUT) > 0.93
    assert effect_kept(smol_chat, quarter, HELD_OUT) > 0.75
    assert effect_kept(smol_chat, spaced, HELD_OUT) < 0.85
    assert effect_kept(smol_chat, last, HELD_OUT) < effect_kept(smol_chat, half, HELD_OUT)
    worst = best_layers([-score for score in scores], 0.5)
    assert effect_kept(smol_chat, worst, HELD_OUT) < 0.3


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_it_is_measured_once(tiny_chat: ChatLatent, counted: list[int]) -> None:
    first = layer_importance(tiny_chat, TEXTS)
    assert layer_importance(tiny_chat, TEXTS) == first
    assert layer_importance(tiny_chat, [tuple(text) for text in TEXTS]) == first  # type: ignore[misc]
    assert len(counted) == 1


def test_another_process_finds_it(
    tiny_chat: ChatLatent, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = layer_importance(tiny_chat, TEXTS)
    code = (
        "import json, sys\n"
        "from langgraph_latent import ChatLatent\n"
        "from langgraph_latent.evaluation import importance\n"
        "importance._read = None\n"
        "chat = ChatLatent(model=sys.argv[1])\n"
        "print(json.dumps(importance.layer_importance(chat, json.loads(sys.argv[2]))))"
    )
    arguments = [sys.executable, "-c", code, str(tiny_folder("llama")), json.dumps(TEXTS)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert tuple(json.loads(done.stdout)) == scores


def test_other_texts_models_and_versions_are_measured_again(
    tiny_chat: ChatLatent,
    tiny_folder: Callable[..., Path],
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = layer_importance(tiny_chat, TEXTS)
    assert layer_importance(tiny_chat, TEXTS[:1]) != first
    other = ChatLatent(model=str(tiny_folder("llama", seed=9)), workspace=tiny_chat.workspace)
    assert layer_importance(other, TEXTS) != first
    monkeypatch.setattr(importance, "VERSION", importance.VERSION + 1)
    assert layer_importance(tiny_chat, TEXTS) == first
    assert len(counted) == 4


@pytest.mark.parametrize("known", [[], [1.0], "high", [1.0, math.nan, 1.0], [1.0, None, 2.0], {"0": 1}])
def test_what_is_not_a_measurement_is_not_used(tiny_chat: ChatLatent, known: Any) -> None:
    scores = layer_importance(tiny_chat, TEXTS)
    file = importance.DiskCache(importance.FILE)
    for key in file._all():
        file.put(key, known)
    assert layer_importance(tiny_chat, TEXTS) == scores


# -- choosing, and what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "layers"), [(1, (0, 1, 2, 3)), (0.5, (1, 3)), (0.51, (0, 1, 3)), (0.01, (3,)), (0.75, (0, 1, 3))]
)
def test_the_best_layers_are_a_share_rounded_up(share: float, layers: tuple[int, ...]) -> None:
    assert best_layers((0.5, 0.7, 0.1, 0.9), share) == layers


def test_a_share_is_not_rounded_up_by_its_float() -> None:
    assert len(best_layers([1.0] * 30, 0.1)) == 3
    assert best_layers([1.0] * 30, 0.1) == (0, 1, 2)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, math.nan, True, "half", None])
def test_an_impossible_share_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="share"):
        best_layers((1.0, 2.0), share)


def test_no_scores_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer_importance"):
        best_layers((), 0.5)


@pytest.mark.parametrize("texts", [[], ["a text"], [("a", "b")], [("a", "", "c")], [("a", "b", 3)], "abc", [None]])
def test_what_is_not_a_passage_is_refused(tiny_chat: ChatLatent, texts: Any) -> None:
    with pytest.raises(ConfigError):
        layer_importance(tiny_chat, texts)


def test_layers_that_are_not_there_are_refused(tiny_chat: ChatLatent) -> None:
    with pytest.raises(ConfigError, match="layers"):
        effect_kept(tiny_chat, (0, 3), TEXTS)


def test_a_model_that_can_hide_nothing_is_refused(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, probe=False)
    with pytest.raises(UnsupportedLayerError, match="probe"):
        layer_importance(chat, TEXTS)


def test_the_built_in_passages_hold_their_answers() -> None:
    for context, _, answer in PASSAGES:
        assert len({*answer.lower().split()} & {*context.lower().split()}) > 3
