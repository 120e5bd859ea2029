"""The conformance suite over every model type: no promise is broken, and `docs/models.md` says what the run says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from langgraph_latent.engine import probe
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.testing import tiny_tokenizer
from langgraph_latent.testing.catalogue import LEFT_OUT, catalogue
from langgraph_latent.testing.conformance import PROPERTIES, Outcome, conform, conform_toy
from langgraph_latent.testing.pages import as_markdown

TOYS = catalogue()
PAGE = Path(__file__).parents[1] / "docs" / "models.md"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", sorted(TOYS))
def test_every_promise_holds_or_is_refused_with_a_reason(name: str, outcomes: dict[str, Outcome]) -> None:
    outcomes[name] = outcome = conform_toy(TOYS[name])
    assert not outcome.wrong
    assert set(outcome.cells) == set(PROPERTIES)
    for cell in outcome.cells.values():
        assert cell.detail if cell.verdict == "refused" else cell.verdict == "exact"


def test_the_page_is_that_of_this_run(outcomes: dict[str, Outcome]) -> None:
    if len(outcomes) < len(TOYS):
        pytest.skip("not all model types were run")
    versions = f"transformers {transformers.__version__} ships (torch {torch.__version__.partition('+')[0]},"
    if versions not in PAGE.read_text().replace("\n", " "):
        pytest.skip(f"{PAGE} was made with other versions")
    page = as_markdown([outcomes[name] for name in sorted(outcomes)], LEFT_OUT)
    assert page == PAGE.read_text(), "make it again: python -m langgraph_latent.testing --markdown docs/models.md"


def test_sixty_model_types_and_more_can_be_handed_over() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [\w.-]+ \|.*\| works \|", line)]
    assert len(lines) >= 60
    assert "unknown" not in PAGE.read_text()


@pytest.mark.parametrize("broken", ["crop", "move", "batch"])
def test_a_promise_that_does_not_hold_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that promises everything is not taken for one that looks."""
    monkeypatch.setattr(probe.Probe, "_tried", lambda self, refuse: "")
    names = {"crop": "mamba2", "move": "gpt2", "batch": "gemma2"}
    if broken == "crop":
        monkeypatch.setattr(probe, "opaque_refusals", lambda kinds: [])
    outcome = conform_toy(TOYS[names[broken]])
    assert broken in outcome.wrong


def test_a_model_that_is_not_in_the_catalogue_gets_its_outcome_by_the_probe() -> None:
    class Unheard(type(TOYS["llama"].model())):  # type: ignore[misc]
        """A model class that nobody has seen."""

    model = Unheard(TOYS["llama"].config()).eval()
    outcome = conform(ResidentModel(model, tiny_tokenizer(), "unheard", "its weights"))
    assert outcome.architecture == "Unheard"
    assert {cell.verdict for cell in outcome.cells.values()} == {"exact"}
