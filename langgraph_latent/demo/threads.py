"""How many torch threads are fastest on this machine as it is now. It knows torch and the clock, nothing else.

A model of the demo's size is bound by memory and by waiting at barriers. On idle cores more threads help a little; on
cores that something else uses, two spinning threads can be twenty times slower than one. So it is measured.
"""

import os
import time

import torch

MOST = 16
MARGIN = 0.9  # more threads must be worth it: they are the first to suffer when the machine gets busy


def fastest_num_threads() -> int:
    """The number to use; takes about a tenth of a second. `OMP_NUM_THREADS`, where it is set, is taken unmeasured."""
    limit = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return limit
    best, best_s = 1, _step_s(1)
    for count in sorted({2, 4, 8, MOST, limit}):
        if count > min(limit, MOST):
            break
        seconds = _step_s(count)
        if seconds < MARGIN * best_s:
            best, best_s = count, seconds
    torch.set_num_threads(limit)
    return best


def _step_s(num_threads: int) -> float:
    """Seconds for what a small model does: prefill's one large product, and decode's many small ones."""
    torch.set_num_threads(num_threads)
    weights, prompt, token = torch.ones(576, 1536), torch.ones(512, 576), torch.ones(1, 576)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        prompt @ weights
        for _ in range(20):
            token @ weights
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]
