"""Peak memory of a block of code, by the kernel's own high-water mark. It knows nothing of models."""

from __future__ import annotations

import ctypes
from types import TracebackType


class PeakMemory:
    """`with PeakMemory() as peak: ...`; then `peak.extra_bytes` is how far resident memory rose above its start.

    None where the system does not tell (it needs Linux's /proc). Freed memory that the allocator keeps is given back
    first, as far as the C library can, so that it does not hide what the block takes.
    """

    extra_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        _trim()
        self._can_tell = _reset_peak()
        self._before = _status("VmRSS") if self._can_tell else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._can_tell:
            self.extra_bytes = max(0, _status("VmHWM") - self._before)


def _trim() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(name)
