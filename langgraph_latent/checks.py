"""What an option's value must be, asked in one place. A bool is not a number here, though Python says it is."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from langgraph_latent.errors import ConfigError


def is_whole_number(value: Any) -> TypeGuard[int]:
    """Whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite int or float and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole_number(name: str, value: Any, at_least: int = 0, *, unit: str = "") -> int:
    """The value. Raises `ConfigError`, which names the option, for anything but a whole number from `at_least` on."""
    if not is_whole_number(value) or value < at_least:
        of_what = f" of {unit}" if unit else ""
        raise ConfigError(f"{name}={value!r} is impossible; it must be a whole number{of_what}, {at_least} or above")
    return value
