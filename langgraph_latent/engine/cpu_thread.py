"""The one thread of the process that runs models on the CPU.

OpenMP gives every thread that runs a parallel operation a team of its own, and as soon as there are more team members
than cores they sleep between operations: a model that is called from two threads in turn runs a third slower, from then
on, in both. A graph runs its nodes in many threads, so they all hand their calls to this one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")
NAME = "langgraph-latent-compute"


def run(work: Callable[[], T]) -> T:
    """The result of `work` in the compute thread, with the caller's number of torch threads.

    Ends with the work, also where the caller is interrupted. Called by the work itself, it runs at once.
    """
    if threading.current_thread().name.startswith(NAME):
        return work()
    num_threads = torch.get_num_threads()

    def as_the_caller() -> T:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        return work()

    future = _thread.submit(as_the_caller)
    try:
        return future.result()
    finally:
        wait([future])
        del future  # it holds the error, which holds this frame


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=NAME)


def _start_again() -> None:
    """In a forked process, which has none of its parent's threads."""
    global _thread
    _thread = _new_thread()


_thread = _new_thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
