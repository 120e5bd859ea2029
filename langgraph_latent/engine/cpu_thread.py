"""The one thread of the process that runs models on the CPU.

OpenMP gives every thread that runs a parallel operation a team of its own, and as soon as there are more team members
than cores they sleep between operations: a model that is called from two threads in turn runs a third slower, from then
on, in both. A graph runs its nodes in many threads, so they all hand their calls to this one.

Nothing can interrupt this thread: Ctrl-C comes to the main thread. A caller that is interrupted, whose time is over or
whom nobody waits for leaves at once, and the work goes on to its end without it. So the work never touches what its
caller may give away when it leaves, but for tails, which are given back when the last call on them has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from langgraph_latent.engine.limits import NO_LIMITS, Limits

T = TypeVar("T")
NAME = "langgraph-latent-compute"


def run(work: Callable[[], T], limits: Limits = NO_LIMITS) -> T:
    """The result of `work` in the compute thread, with the caller's number of torch threads.

    Called by the work itself, it runs at once. Raises what the work raises, and what `limits.check` raises while it is
    under way.
    """
    if is_here():
        return work()
    future = submit(work)
    try:
        while not future.done():
            limits.check()
            wait([future], limits.pause_s)
        return future.result()
    finally:
        future.cancel()
        del future  # it holds the error, which holds this frame


def submit(work: Callable[[], T]) -> Future[T]:
    """Have `work` done in the compute thread, with the caller's number of torch threads."""
    num_threads = torch.get_num_threads()

    def as_the_caller() -> T:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        return work()

    return _thread.submit(as_the_caller)


def is_here() -> bool:
    """Whether the caller is the compute thread."""
    return threading.current_thread().name.startswith(NAME)


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=NAME)


def _start_again() -> None:
    """In a forked process, which has none of its parent's threads."""
    global _thread
    _thread = _new_thread()


_thread = _new_thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)
