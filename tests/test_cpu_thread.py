"""On a CPU all model calls run in one thread, whoever asks."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from langgraph_latent import ChatLatent
from langgraph_latent.engine import cpu_thread


def test_all_threads_share_one_and_keep_their_number_of_torch_threads() -> None:
    def asked(num_threads: int) -> tuple[str, int]:
        torch.set_num_threads(num_threads)
        try:
            return cpu_thread.run(lambda: (threading.current_thread().name, torch.get_num_threads()))
        finally:
            torch.set_num_threads(1)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(asked, [1, 2, 1, 2]))
    assert len({name for name, _ in answers}) == 1
    assert [number for _, number in answers] == [1, 2, 1, 2]


def test_a_call_from_within_runs_at_once() -> None:
    assert cpu_thread.run(lambda: cpu_thread.run(lambda: 5)) == 5


class Big:
    """Something that must not outlive its call."""


def test_an_error_reaches_the_caller_and_keeps_nothing_alive() -> None:
    def fail(big: Big) -> None:
        raise ValueError("too big")

    def call() -> weakref.ref[Big]:
        big = Big()
        with pytest.raises(ValueError, match="too big"):
            cpu_thread.run(lambda: fail(big))
        return weakref.ref(big)

    alive = call()
    assert cpu_thread.run(lambda: 1) == 1
    gc.collect()
    assert alive() is None


def test_a_models_calls_run_there(tiny_chat: ChatLatent, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_chat.resident().model
    names = set()
    hook = model.register_forward_pre_hook(lambda *_: names.add(threading.current_thread().name))
    try:
        tiny_chat.batch(["one", "two", "three"])
    finally:
        hook.remove()
    assert len(names) == 1
    assert names.pop().startswith(cpu_thread.NAME)
