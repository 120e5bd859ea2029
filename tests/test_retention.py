"""The retention benchmark: its facts stand in their documents alone, its exact rows are exact, its page is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from test_benchmarks import benchmark

from benchmarks.retention import __main__ as command
from benchmarks.retention import plot
from benchmarks.retention.facts import NUM_DOCUMENTS, Case, case, cases, rotated
from benchmarks.retention.rows import titles
from benchmarks.retention.samples import Sample, Tally, difference, divergence, estimate, ratio

pytestmark = pytest.mark.slow

EXACT_ROWS = ("full", "full-2", "full-3", "full-5", "append", "compose-100%", "merge-3-100%")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retention")


@pytest.fixture(scope="module")
def report(folder: Path, tiny_folder: Callable[..., Path]) -> dict[str, Any]:
    """What a run over three documents wrote, its rows by name."""
    options = ("--docs", "3", "--summaries", "2", "--json", folder / "all.json", "--page", folder / "page.md")
    run = benchmark("retention", "--models", tiny_folder("llama"), *options)
    assert run.returncode == 0, run.stdout + run.stderr
    (model,) = json.loads((folder / "all.json").read_text())["models"]
    return dict(model, rows={row["name"]: row for row in model["rows"]}, shown=run.stdout)


def kept(report: dict[str, Any], name: str) -> float:
    return float(report["rows"][name]["figures"]["kept"]["value"])


def test_every_row_is_there_with_samples_and_costs(report: dict[str, Any]) -> None:
    assert list(report["rows"]) == list(titles((0.3, 0.2, 0.1)))
    for row in report["rows"].values():
        assert row["samples"]
        assert row["costs"]
        assert set(row["figures"]) == {"exact", "log_prob", "kl", "kept", "entropy", "seconds", "num_bytes"}
        for figure in row["figures"].values():
            assert figure["low"] <= figure["high"]


def test_full_text_is_the_reference_and_no_context_the_floor(report: dict[str, Any]) -> None:
    for name in ("full", "full-2", "full-3", "full-5"):
        assert report["rows"][name]["figures"]["kl"]["value"] == 0
        assert kept(report, name) == 1
    assert kept(report, "none") == 0


@pytest.mark.parametrize("name", EXACT_ROWS)
def test_what_promises_to_be_exact_is(report: dict[str, Any], name: str) -> None:
    samples = report["rows"][name]["samples"]
    assert all(sample["kl"] < 1e-4 for sample in samples)
    assert all(abs(sample["entropy"]) < 1e-3 for sample in samples)


def test_what_is_moved_lies_between(report: dict[str, Any]) -> None:
    assert 0 < kept(report, "compose") < 1
    assert kept(report, "compose") < kept(report, "compose-30%") < 1
    assert 0 < kept(report, "merge-3") < kept(report, "merge-3-30%") < 1


def test_bytes_are_of_what_is_taken_over(report: dict[str, Any]) -> None:
    size = {name: row["figures"]["num_bytes"]["value"] for name, row in report["rows"].items()}
    assert size["none"] == 0
    assert size["append"] == size["compose"]
    assert size["layers-25%"] == pytest.approx(size["layers-75%"] / 3)  # of three layers one, and all
    assert size["full"] < size["tail-64"] < size["append"]
    assert size["merge-2"] < size["merge-3"] == size["merge-3-15%"] < size["merge-5"]


def test_page_has_goals_rows_and_picture(report: dict[str, Any], folder: Path) -> None:
    page = (folder / "page.md").read_text()
    assert len(report["goals"]) == 7
    for goal in report["goals"]:
        assert f"| {goal['title']} | {goal['measured']} | {goal['goal']} | {goal['verdict']} |" in page
    assert all(f"| {row['title']} |" in page for row in report["rows"].values())
    assert "Measured by `python -m benchmarks.retention --threads 1 --models llama" in page
    assert str(folder) not in page
    assert (folder / "page.png").read_bytes().startswith(b"\x89PNG")
    assert "append keeps" in report["shown"]


def test_without_matplotlib_the_page_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "is_installed", lambda: False)
    with pytest.raises(typer.BadParameter, match=r"needs matplotlib.*langgraph-latent\[bench\]"):
        command._check(None, tmp_path / "page.md")
    command._check(tmp_path / "all.json", None)


def test_a_folder_that_is_not_there_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="there is no folder"):
        command._check(tmp_path / "none" / "all.json", None)


# -- facts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> list[Case]:
    return list(cases(200))


def test_facts_are_the_same_every_time(drawn: list[Case]) -> None:
    assert list(cases(200)) == drawn
    assert list(cases(8)) == drawn[:2]
    assert case(0, seed=1) != drawn[0]
    assert len({document.text for each in drawn for document in each.documents}) == 200


def test_answers_stand_in_their_own_document_alone(drawn: list[Case]) -> None:
    for each in drawn:
        for document in each.documents:
            assert {question.kind for question in document.questions} == {"name", "number", "date", "negation", "place"}
            for question in document.questions:
                if question.kind == "name" and "keeps" in question.text:
                    continue  # a keeper is also named with the place where that person stays
                holders = [other for other in each.documents if question.answer in other.text]
                assert holders == [document]


def test_questions_do_not_hold_their_answers(drawn: list[Case]) -> None:
    for each in drawn:
        asked = [question for document in each.documents for question in document.questions]
        for question in [*asked, *(hop.question for hop in each.hops)]:
            assert question.answer not in f"{question.text} {question.lead}"


def test_a_negation_names_the_odd_place_out(drawn: list[Case]) -> None:
    for document in drawn[0].documents:
        (question,) = (each for each in document.questions if each.kind == "negation")
        assert f"not in {question.answer}." in document.text or f" in {question.answer}, only in" in document.text


def test_two_hop_answers_need_both_documents(drawn: list[Case]) -> None:
    for each in drawn:
        assert len(each.hops) == NUM_DOCUMENTS
        for hop in each.hops:
            first, second = each.documents[hop.first], each.documents[hop.second]
            thing = hop.question.text.removeprefix("Where does the person stay who keeps the key of the ")[:-1]
            (keeper,) = (question.answer for question in first.questions if "keeps" in question.text)
            assert [document for document in each.documents if thing in document.text] == [first]
            assert [document for document in each.documents if hop.question.answer in document.text] == [second]
            assert f"{keeper} stays in {hop.question.answer}." in second.text


def test_hops_within_the_first_documents(drawn: list[Case]) -> None:
    assert [len(drawn[0].hops_within(count)) for count in (1, 2, 3, 5)] == [0, 1, 2, 5]


def test_questions_take_turns(drawn: list[Case]) -> None:
    questions = drawn[0].documents[0].questions
    asked = [question for turn in range(len(questions)) for question in rotated(questions, 2, turn)]
    assert sorted(asked) == sorted([*questions] * 2)


# -- figures --------------------------------------------------------------------------------------------------------


def sample(unit: str, exact: float, kl: float = 0.0) -> Sample:
    return Sample(unit, "name", f"question of {unit}", exact, -1.0, kl, 2.0, 0.0)


def test_a_ratio_of_sums_has_an_interval_around_it() -> None:
    value, low, high = ratio((f"unit {index}", float(index % 2), 1.0) for index in range(100))
    assert value == 0.5
    assert 0.35 < low < 0.45 < 0.55 < high < 0.65


def test_questions_of_one_unit_are_drawn_together() -> None:
    apart = ratio((f"unit {index}", float(index % 2), 1.0) for index in range(40))
    together = ratio((f"unit {index // 20}", float(index // 20), 1.0) for index in range(40))
    assert together.high - together.low > apart.high - apart.low


def test_what_is_kept_is_of_the_gap_to_no_context() -> None:
    assert estimate(Tally([sample("a", 1, 0.5), sample("b", 1, 0.1)]), "kept").value == pytest.approx(0.85)


def test_a_difference_is_of_the_questions_of_both() -> None:
    one, other = Tally([sample("a", 1), sample("b", 1), sample("c", 0)]), Tally([sample("a", 1), sample("b", 0)])
    assert difference(one, other, lambda each: each.exact).value == 0.5


def test_divergence_is_that_of_torch() -> None:
    p, q = (torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)).log_softmax(-1) for seed in (0, 1))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum") / 4
    assert divergence(p, q) == pytest.approx(expected.item(), rel=1e-5)
    assert divergence(p, p) == 0
