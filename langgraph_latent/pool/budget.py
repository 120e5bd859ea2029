"""How many bytes a pool may use: read from text, or a share of the machine's memory. It knows no caches."""

from __future__ import annotations

import os
import re

import torch

from langgraph_latent.checks import is_whole_number
from langgraph_latent.errors import ConfigError


def parse_bytes(size: int | str) -> int:
    """Bytes from an int or from text such as "512MiB", "4GiB", "2 GB". Raises `ConfigError`."""
    if is_whole_number(size, 1):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(size), re.IGNORECASE)
    if not isinstance(size, str) or not match or not float(match[1]):
        raise ConfigError(f"memory={size!r} is not a size; pass bytes or text such as '512MiB' or '4GiB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** "_kmgt".index(prefix.lower() or "_"))


def default_budget() -> int:
    """A quarter of the accelerator's memory where there is one, else of the machine's."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1] // 4)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
