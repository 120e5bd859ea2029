"""Blocking work for an event loop: in threads of its own, so that long answers never fill the loop's executor.

It knows functions and iterators; not what they compute.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

MAX_THREADS = 64
"""Calls at a time; further ones wait for a thread. Threads are made when needed and then kept."""

T = TypeVar("T")
_END = object()
_threads: ThreadPoolExecutor


def _start_again() -> None:
    """Now, and in a forked process, which has none of its parent's threads."""
    global _threads
    _threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="langgraph-latent")


_start_again()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_again)


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """The result of `work`, run in a thread; the event is set when the caller is cancelled."""
    job = _Job(work)
    try:
        return await asyncio.shield(job.result)
    finally:
        await job.end()


async def iterate_in_thread(make: Callable[[threading.Event], Iterator[T]]) -> AsyncIterator[T]:
    """The items of an iterator that a thread runs to its end, or until the event is set: the caller has gone."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Any] = asyncio.Queue()

    def run(cancelled: threading.Event) -> None:
        try:
            for item in make(cancelled):
                loop.call_soon_threadsafe(items.put_nowait, item)
        finally:
            loop.call_soon_threadsafe(items.put_nowait, _END)

    job = _Job(run)
    try:
        while (item := await items.get()) is not _END:
            yield item
        await job.result
    finally:
        await job.end()


class _Job:
    """Work in a thread, seen from an event loop."""

    def __init__(self, work: Callable[[threading.Event], Any]) -> None:
        self._cancelled = threading.Event()
        self._future = _threads.submit(contextvars.copy_context().run, work, self._cancelled)
        self.result = asyncio.wrap_future(self._future)

    async def end(self) -> None:
        """Wait until the thread is done with its current token, so that the model is free when the caller goes on."""
        self._cancelled.set()
        if not self.result.done() and not self._future.cancel():
            await asyncio.wait([self.result])
        if self.result.done() and not self.result.cancelled():
            self.result.exception()  # or asyncio would log an error that nobody looked at
