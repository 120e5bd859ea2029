"""Figures by hand, hand-overs against plain transformers, task files, parity of latent steps, the command."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, Repair
from langgraph_latent.cli.measure import _measure
from langgraph_latent.errors import (
    ConfigError,
    ContextLengthError,
    HandleError,
    ModelMismatchError,
    TemplateError,
    UnsupportedLayerError,
)
from langgraph_latent.evaluation.measure import (
    BY_CACHE,
    BY_TEXT,
    SYSTEM,
    Setup,
    measure_model,
    measure_parity,
    measure_tasks,
)
from langgraph_latent.evaluation.metrics import Fidelity, Score, TextMatch, bootstrap, entropy, kl, rouge_l
from langgraph_latent.evaluation.receiver import decode, measure, score
from langgraph_latent.evaluation.tasks import Task, read_tasks
from langgraph_latent.handle.tokens import unpack_tokens
from langgraph_latent.router.parity import Parity, parity_refusal, remember_parity

CONTEXT = "At 04:10 the cold store in hall 3 lost power. Anna called the team."
QUESTION = "Who called the team?"
ANSWER = "Anna did"
TASKS = [
    Task(CONTEXT, QUESTION, ANSWER, "tasks.jsonl, line 1"),
    Task("The red box holds screws.", "What is in it?", "screws", "tasks.jsonl, line 2"),
]
ALTERNATING = (
    "{% set turns = messages %}{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}{% endif %}"
    "{% for message in turns %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


# -- figures ---------------------------------------------------------------------------------------------------------


def test_entropy_is_that_of_the_textbook() -> None:
    found = entropy(logs([0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]))
    assert found.tolist() == pytest.approx([math.log(4), 1.5 * math.log(2), 0.0])


def test_kl_is_that_of_the_textbook_in_its_direction() -> None:
    p, q = logs([0.5, 0.5]), logs([0.25, 0.75])
    assert float(kl(p, q)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(kl(q, p)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert float(kl(p, p)) == 0.0
    assert float(kl(logs([1.0, 0.0]), p)) == pytest.approx(math.log(2))
    assert float(kl(p, logs([1.0, 0.0]))) == math.inf


def test_fidelity_means_over_positions_and_its_entropy_is_of_the_first() -> None:
    text = logs([0.5, 0.25, 0.25], [0.7, 0.2, 0.1])
    latent = logs([1 / 3, 1 / 3, 1 / 3], [0.1, 0.7, 0.2])
    first, second = math.log(3) - 1.5 * math.log(2), 0.7 * math.log(7) + 0.2 * math.log(2 / 7) + 0.1 * math.log(0.5)
    found = Fidelity.of(text, latent)
    assert found.num_positions == 2
    assert found.kl == pytest.approx((first + second) / 2)
    assert found.agreement == 0.5
    assert found.semantic_entropy == pytest.approx(math.log(3) - 1.5 * math.log(2))
    assert found.first_kl == pytest.approx(first)
    assert Fidelity.of(latent, text).semantic_entropy == pytest.approx(-found.semantic_entropy)


def test_score_is_the_answers_own_and_matches_only_where_each_token_leads() -> None:
    log_probs = logs([0.5, 0.3, 0.2], [0.1, 0.2, 0.7])
    found = Score.of(log_probs, [0, 2])
    assert found.total == pytest.approx(math.log(0.5) + math.log(0.7))
    assert found.likelihood == pytest.approx(found.total / 2)
    assert (found.num_tokens, found.exact_match) == (2, True)
    assert not Score.of(log_probs, [0, 1]).exact_match


@pytest.mark.parametrize(
    ("decoded", "answer", "value"),
    [
        ("police kill the gunman", "police killed the gunman", 3 / 4),  # both from Lin 2004, section 3.1
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        ("It is Anna.", "anna", 2 * 1 / (3 + 1)),
        ("a b a c", "b c a a", 2 * 2 / 8),
        ("x", "y", 0.0),
        ("", "anna", 0.0),
        ("...", "!", 1.0),
    ],
)
def test_rouge_l_by_hand(decoded: str, answer: str, value: float) -> None:
    assert rouge_l(decoded, answer) == pytest.approx(value)
    assert rouge_l(answer, decoded) == pytest.approx(value)


def test_texts_match_but_for_case_punctuation_articles_and_spaces() -> None:
    assert TextMatch.of("  The cold-store,\nAnna!", "a coldstore anna").exact_match
    assert not TextMatch.of("Theanna", "Anna").exact_match


def test_bootstrap_of_two_values_is_the_interval_of_their_four_samples() -> None:
    assert bootstrap([0.0, 1.0]) == (2, 0.5, 0.0, 1.0)  # means 0, 1/2, 1/2, 1: a quarter at either end
    assert bootstrap([3.0, 3.0, 3.0]) == (3, 3.0, 3.0, 3.0)
    assert bootstrap([2.0]) == (1, 2.0, 2.0, 2.0)


def test_bootstrap_of_many_values_is_near_the_normal_interval_and_always_the_same() -> None:
    values = [float(index % 2) for index in range(400)]
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert found != bootstrap(values, seed=1)
    half = 1.96 * 0.5 / math.sqrt(400)
    assert found.low == pytest.approx(0.5 - half, abs=0.01)
    assert found.high == pytest.approx(0.5 + half, abs=0.01)


def test_no_values_have_no_mean() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        bootstrap([])


# -- one hand-over ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gpt2"])
@pytest.mark.parametrize("answer", [ANSWER, None])
def test_a_continued_cache_predicts_what_the_text_predicts(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, kind: str, answer: str | None
) -> None:
    chat = ChatLatent(model=str(tiny_folder(kind)), workspace=ws)
    found = measure(chat, chat.read([HumanMessage(CONTEXT)]), QUESTION, answer)
    assert 0 <= found.fidelity.kl < 1e-4
    assert found.fidelity.agreement == 1
    assert abs(found.fidelity.semantic_entropy) < 1e-4
    assert found.fidelity.num_positions == (len(chat.get_token_ids(ANSWER)) if answer else 1)
    assert (found.score is None) == (answer is None)


def test_a_sampled_handle_is_measured_with_its_pending_token(tiny_chat: ChatLatent) -> None:
    handle = tiny_chat.handle(tiny_chat.invoke(CONTEXT))
    assert handle.num_pending == 1
    assert measure(tiny_chat, handle, [HumanMessage(QUESTION)], ANSWER).fidelity.kl < 1e-4


def test_score_is_what_plain_transformers_gives(tiny_chat: ChatLatent) -> None:
    resident, handle = tiny_chat.resident(), tiny_chat.read([HumanMessage(CONTEXT)])
    asked = [{"role": "user", "content": QUESTION}]
    prompt = unpack_tokens(resident.prompts.extend(handle, asked, reply=True).tokens)
    ids = tiny_chat.get_token_ids(ANSWER)
    stock = resident.stock([*prompt, *ids], len(ids) + 1)[:-1].log_softmax(-1)
    each = [float(row[token]) for row, token in zip(stock, ids, strict=True)]
    found = score(tiny_chat, handle, asked, ANSWER)
    assert found.total == pytest.approx(sum(each), abs=1e-3)
    assert found.likelihood == pytest.approx(sum(each) / len(ids), abs=1e-4)
    assert found == measure(tiny_chat, handle, QUESTION, ANSWER).score


def test_what_argmax_decodes_is_an_exact_match_and_what_follows_from_invoke(tiny_chat: ChatLatent) -> None:
    num_found = 0
    for question in ("Who?", "What?", "When?", "Where is it?", "Why?"):
        handle = tiny_chat.read([HumanMessage(CONTEXT)])
        decoded = decode(tiny_chat, handle, question, 3)
        assert decoded == tiny_chat.invoke(question, inherit=handle, max_tokens=3).content
        if decoded and len(tiny_chat.get_token_ids(decoded)) == 3 and "\N{REPLACEMENT CHARACTER}" not in decoded:
            num_found += 1
            assert score(tiny_chat, handle, question, decoded).exact_match
    assert num_found


def test_decoding_ends_with_the_models_length(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", max_position_embeddings=160)), workspace=ws)
    handle = chat.read([HumanMessage(CONTEXT)])
    assert decode(chat, handle, QUESTION, 300) == chat.invoke(QUESTION, inherit=handle, max_tokens=300).content


def test_a_wrong_cache_is_seen(tiny_chat: ChatLatent, ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = tiny_chat.read([HumanMessage(CONTEXT)])
    wrong = ws.state_of(tiny_chat.read([HumanMessage(CONTEXT[::-1])]), tiny_chat.resident())
    wrong = wrong.crop(min(wrong.num_tokens, handle.num_tokens))
    monkeypatch.setattr(ws, "state_of", lambda *_: wrong)
    monkeypatch.setattr(type(wrong), "crop", lambda self, _: self)
    found = measure(tiny_chat, handle, QUESTION, ANSWER)
    assert found.fidelity.kl > 0.01
    assert found.fidelity.first_kl > 0.01


def test_a_moved_cache_is_compared_with_its_own_tokens_in_order(tiny_chat: ChatLatent) -> None:
    sent = tiny_chat.read([SystemMessage("You read."), HumanMessage(CONTEXT)])
    moved = tiny_chat.compose(sent, system="You decide what is to be done now.")
    found = measure(tiny_chat, moved, QUESTION, ANSWER)
    assert found.fidelity.kl > 1e-3
    repaired = tiny_chat.compose(sent, system="You decide what is to be done now.", repair=Repair(1.0))
    assert measure(tiny_chat, repaired, QUESTION, ANSWER).fidelity.kl < 1e-4
    messages = [SystemMessage("You decide what is to be done now."), HumanMessage(CONTEXT)]
    text = score(tiny_chat, tiny_chat.read(messages), QUESTION, ANSWER)
    assert score(tiny_chat, repaired, QUESTION, ANSWER).likelihood == pytest.approx(text.likelihood, abs=1e-4)


def test_latent_steps_are_compared_with_the_text_without_them(tiny_chat: ChatLatent) -> None:
    read, thought = tiny_chat.read([HumanMessage(CONTEXT)]), tiny_chat.think([HumanMessage(CONTEXT)], steps=4)
    found = measure(tiny_chat, thought, QUESTION, ANSWER)
    assert found.fidelity.kl > 1e-4
    log_text = measure(tiny_chat, read, QUESTION, ANSWER).score
    assert found.score is not None
    assert log_text is not None
    assert found.score.likelihood != pytest.approx(log_text.likelihood, abs=1e-4)


def test_nothing_is_changed_by_measuring(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    handle = tiny_chat.read([HumanMessage(CONTEXT)])
    before = ws.state_of(handle, tiny_chat.resident()).checksum()
    first = measure(tiny_chat, handle, QUESTION, ANSWER)
    assert measure(tiny_chat, handle, QUESTION, ANSWER) == first
    assert ws.state_of(handle, tiny_chat.resident()).checksum() == before
    ws.evict(handle)
    assert measure(tiny_chat, handle, QUESTION, ANSWER).fidelity.kl < 1e-4


def test_an_empty_answer_is_refused(tiny_chat: ChatLatent) -> None:
    with pytest.raises(ConfigError, match="the answer is empty"):
        measure(tiny_chat, tiny_chat.read([HumanMessage(CONTEXT)]), QUESTION, "")


def test_a_template_that_merges_the_question_is_cropped_to_or_refused(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", template=ALTERNATING)), workspace=ws)
    sent = chat.read([HumanMessage(CONTEXT)])
    assert measure(chat, sent, QUESTION, ANSWER).fidelity.kl < 1e-4
    with pytest.raises(TemplateError, match="hand over text"):
        measure(chat, chat.compose(sent, system="You decide."), QUESTION, ANSWER)
    asked = [AIMessage("Read."), HumanMessage(QUESTION)]
    assert measure(chat, chat.compose(sent, system="You decide."), asked, ANSWER).fidelity.kl > 0


def test_a_handle_of_another_model_and_what_is_not_a_handle_are_refused(
    tiny_folder: Callable[..., Path], tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    other = ChatLatent(model=str(tiny_folder("llama", seed=1)), workspace=ws)
    with pytest.raises(ModelMismatchError, match="another model"):
        measure(tiny_chat, other.read([HumanMessage(CONTEXT)]), QUESTION, ANSWER)
    with pytest.raises(HandleError):
        measure(tiny_chat, CONTEXT, QUESTION)  # type: ignore[arg-type]


def test_a_model_that_can_not_move_is_refused(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("gpt2")), workspace=ws)
    assert not chat.spec.capabilities.can("move")
    moved = chat.compose(chat.read([HumanMessage(CONTEXT)]), system="You decide.")
    with pytest.raises(UnsupportedLayerError, match="hand over text"):
        measure(chat, moved, QUESTION)


# -- task files ------------------------------------------------------------------------------------------------------


def test_a_task_file_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"context": "c", "question": "q", "answer": "a", "id": number} for number in range(2)]
    file.write_text(f"{json.dumps(rows[0])}\n\n{json.dumps(rows[1])}\n")
    assert read_tasks(file) == [Task("c", "q", "a", f"{file}, line 1"), Task("c", "q", "a", f"{file}, line 3")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object, but list"),
        ("\xff", "line 2 is not a JSON object"),
        ("[" * 100_000, "line 2 is not a JSON object"),
        ('{"context": "c", "question": "q"}', "line 2 has no 'answer'"),
        ('{"context": "c", "question": " ", "answer": "a"}', "line 2: 'question' is ' '"),
        ('{"context": 3, "question": "q", "answer": "a"}', "line 2: 'context' is 3"),
        ('{"context": "\\ud800", "question": "q", "answer": "a"}', "line 2: 'context' is"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"context": "c", "question": "q", "answer": "a"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_tasks(file)
    assert f"{file}, {message}" in str(caught.value)


def test_an_empty_file_and_none_at_all_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl, line 1: there is no task"):
        read_tasks(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match=r"can't be read.*nowhere\.jsonl"):
        read_tasks(tmp_path / "nowhere.jsonl")


# -- many tasks ------------------------------------------------------------------------------------------------------


def test_every_way_has_every_figure_over_all_tasks(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    done: list[None] = []
    setup = Setup(repair=Repair(0.3, "deviation"), steps=2, max_tokens=4)
    ways = measure_tasks(tiny_chat, TASKS, setup, lambda: done.append(None))
    assert tuple(ways) == (*BY_TEXT, *BY_CACHE)
    names = {*Score._fields, *Fidelity._fields, "decoded_match", "rouge_l"}
    for each in ways.values():
        assert not each.refusal
        assert set(each.figures) == names
        for estimate in each.figures.values():
            assert estimate.num == len(TASKS)
            assert estimate.low <= estimate.mean <= estimate.high
    assert ways["text"].figures["kl"].mean == 0
    assert ways["append"].figures["kl"].high < 1e-4
    assert ways["append"].figures["likelihood"].mean == pytest.approx(ways["text"].figures["likelihood"].mean, abs=1e-4)
    for way in ("none", "compose", "compose+repair", "think"):
        assert ways[way].figures["kl"].mean > 1e-4, way
    assert len(done) == setup.num_runs(TASKS) - len(TASKS), "the rest is parity"
    assert ws.size_info().pool.num_entries == 0, "what was measured is let go"


def test_a_way_that_a_model_can_not_go_is_reported_and_the_others_are_measured(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=str(tiny_folder("gpt2")), workspace=ws)
    ways = measure_tasks(chat, TASKS)
    assert tuple(ways) == ("none", "text", "append", "compose", "compose+repair")
    assert "can't go on in this cache" in ways["compose"].refusal
    assert not ways["compose"].figures
    assert ways["append"].figures["kl"].num == 2


def test_a_task_that_is_too_long_is_named(tiny_chat: ChatLatent) -> None:
    long = Task("word " * 2000, "q?", "a", "tasks.jsonl, line 7")
    with pytest.raises(ContextLengthError, match=r"tasks\.jsonl, line 7: the prompt has"):
        measure_tasks(tiny_chat, [TASKS[0], long])
    with pytest.raises(ContextLengthError, match=r"tasks\.jsonl, line 7: the prompt has"):
        measure_parity(tiny_chat, [long], 2)


@pytest.mark.parametrize("options", [{"system": " "}, {"steps": -1}, {"steps": True}, {"max_tokens": 1.5}])
def test_an_impossible_setup_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Setup(**options)  # type: ignore[arg-type]


def test_no_tasks_are_refused(tiny_chat: ChatLatent) -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        measure_tasks(tiny_chat, [])
    with pytest.raises(ConfigError, match="at least one task"):
        measure_parity(tiny_chat, [])
    with pytest.raises(ConfigError, match="steps=0 is impossible"):
        measure_parity(tiny_chat, TASKS, 0)


# -- latent steps ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of a model before is not known here."""
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "memory"))


def code_of(chat: ChatLatent, handle: KVHandle) -> str:
    reply = chat.invoke(QUESTION, inherit=handle, max_tokens=2)
    return str(reply.response_metadata["kv_route"]["code"])


@pytest.mark.usefixtures("own_memory")
def test_latent_steps_pass_where_a_measurement_says_that_they_lose_nothing(tiny_folder: Callable[..., Path]) -> None:
    router = EdgeRouter(default=EdgePolicy(latent_steps=True))
    with LatentWorkspace(memory="2GiB", router=router) as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws)
        handle, identity = chat.think([HumanMessage(CONTEXT)], steps=3), chat.spec.identity
        assert code_of(chat, handle) == "no_latent_steps"
        assert "measure_parity" in parity_refusal(identity, 3)
        for gain, code in (
            (-0.1, "no_latent_steps"),
            (0.0, "same_model"),
            (0.1, "same_model"),
            (-0.1, "no_latent_steps"),
        ):
            remember_parity(identity, Parity(5, 3, gain, gain - 1, gain + 1))
            assert code_of(chat, handle) == code, gain
        assert "lose against reading: -0.100" in parity_refusal(identity, 3)
        found = measure_parity(chat, TASKS, 3)
        assert code_of(chat, handle) == ("same_model" if found.gain >= 0 else "no_latent_steps")
        assert code_of(chat, chat.read([HumanMessage(CONTEXT)])) == "same_model"


@pytest.mark.usefixtures("own_memory")
def test_latent_steps_do_not_pass_where_the_policy_does_not_take_them(tiny_chat: ChatLatent) -> None:
    remember_parity(tiny_chat.spec.identity, Parity(5, 3, 1.0, 0.5, 1.5))
    assert code_of(tiny_chat, tiny_chat.think([HumanMessage(CONTEXT)], steps=3)) == "no_latent_steps"


@pytest.mark.usefixtures("own_memory")
def test_parity_is_the_mean_of_what_each_task_gains_and_is_remembered(tiny_chat: ChatLatent) -> None:
    gains = []
    for task in TASKS:
        context = [SystemMessage("You read."), HumanMessage(task.context)]
        thought = score(tiny_chat, tiny_chat.think(context, steps=3), task.question, task.answer)
        gains.append(
            thought.likelihood - score(tiny_chat, tiny_chat.read(context), task.question, task.answer).likelihood
        )
    found = measure_parity(tiny_chat, TASKS, 3, system="You read.")
    assert found.gain == pytest.approx(sum(gains) / 2, abs=1e-5)
    assert (found.low, found.high) == pytest.approx((min(gains), max(gains)), abs=1e-5)
    assert (found.num_tasks, found.steps) == (2, 3)
    assert parity_refusal(tiny_chat.spec.identity, found.steps) == found.refusal


@pytest.mark.usefixtures("own_memory")
def test_parity_agrees_with_the_ways(tiny_folder: Callable[..., Path]) -> None:
    ways, parity = measure_model(str(tiny_folder("llama")), TASKS, Setup(steps=2))
    assert parity is not None
    gain = ways["think"].figures["likelihood"].mean - ways["append"].figures["likelihood"].mean
    assert parity.gain == pytest.approx(gain, abs=1e-5)


def test_no_steps_are_a_read_and_thinking_twice_is_the_same(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    messages = [HumanMessage(CONTEXT)]
    assert tiny_chat.think(messages, steps=0) == tiny_chat.read(messages)
    states, ids = [], []
    for _ in range(2):
        handle = tiny_chat.think(messages, steps=3)
        states.append(ws.state_of(handle, tiny_chat.resident()))
        ids.append(handle.id)
        ws.evict(handle)
        states.append(ws.state_of(handle, tiny_chat.resident()))  # rebuilt
        ws.evict(handle)
    assert len(set(ids)) == 1
    for state in states[1:]:
        for mine, first in zip(state.layers(), states[0].layers(), strict=True):
            for tensor, other in zip(mine, first, strict=True):
                torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)


# -- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object, memory: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LANGGRAPH_LATENT_CACHE": str(memory)}
    command = [sys.executable, "-m", "langgraph_latent.cli", "measure", *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    rows = [{"context": task.context, "question": task.question, "answer": task.answer} for task in TASKS]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.slow
def test_the_command_prints_json_and_remembers_parity(
    tiny_folder: Callable[..., Path], task_file: Path, tmp_path: Path
) -> None:
    folder, options = tiny_folder("llama"), ("--think", 2, "--strategy", "deviation", "--decode", 2)
    done = run(folder, task_file, *options, "--repair", 0.5, "--limit", 1, "--json", memory=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["system"] == SYSTEM
    assert "rouge_l" in found["ways"]["none"]
    assert tuple(found["ways"]) == (*BY_TEXT, *BY_CACHE)
    assert found["ways"]["append"]["kl"]["num"] == 1
    assert found["ways"]["append"]["kl"]["mean"] < 1e-4
    (kept,) = json.loads((tmp_path / "parity.json").read_text()).values()
    assert kept == {name: value for name, value in found["parity"].items() if name != "refusal"}
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_the_command_prints_a_table(tiny_folder: Callable[..., Path], task_file: Path, tmp_path: Path) -> None:
    done = run(tiny_folder("gpt2"), task_file, "--system", "You decide.", memory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()[1:2] in (["2"], ["-"])}
    assert list(rows) == ["none", "text", "append", "compose", "compose+repair"]
    assert all(word in done.stdout for word in ("match", "likelihood", "KL", "agreement", "entropy"))
    assert rows["text"][-4:] == ["0.000", "100", "%", "+0.000"]
    assert any(line.startswith("compose: ") and "can't go on" in line for line in lines)
    assert not (tmp_path / "parity.json").exists()


def test_unusable_input_is_one_line_and_exit_code_2(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no json\n")
    done = run(tiny_folder("llama"), broken, memory=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {broken}, line 1 is not a JSON object")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "/nowhere"}, "check the path"),
        ({"ratio": 2.0}, "ratio=2.0 is impossible"),
        ({"strategy": "best"}, "known: boundary, deviation"),
        ({"options": {"system": ""}}, "system is empty"),
    ],
)
def test_an_unusable_option_is_one_line_and_exit_code_2(
    task_file: Path, changed: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"model": "/nowhere", "file": task_file, "ratio": 0.5, "strategy": "boundary", "options": {}}
    assert _measure(**{**usual, "limit": None, "as_json": True, **changed}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
