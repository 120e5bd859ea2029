"""What an option's value must be, and what an unknown option may have meant: asked in one place.

A bool is not a number here, though Python says it is.
"""

from __future__ import annotations

import contextlib
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from langgraph_latent.errors import ConfigError

OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "model_id": "model",
    "model_name": "model",
    "llm": "model",
    "do_sample": "temperature",
    "device_map": "device",
    "torch_dtype": "dtype",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "chat_template_kwargs": "template_options",
}
"""What other libraries call our options."""


def is_whole_number(value: Any, at_least: int | None = None) -> TypeGuard[int]:
    """Whether a value is an int, not a bool, and not below `at_least`."""
    return isinstance(value, int) and not isinstance(value, bool) and (at_least is None or value >= at_least)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an int or float and not a bool. It may be NaN, which lies within no bounds."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_number(value: Any) -> Any:
    """A number of another type (NumPy's, a text, a float that is whole) as the int or float that it is.

    Anything else, a bool too, as it is.
    """
    for kind in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return as_number(kind(value))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return int(number) if number.is_integer() else number


def check_whole_number(name: str, value: Any, at_least: int = 0, *, unit: str = "") -> None:
    """Raise `ConfigError`, which names the option, for anything but a whole number from `at_least` on."""
    if not is_whole_number(value, at_least):
        of_what = f" of {unit}" if unit else ""
        raise ConfigError(f"{name}={value!r} is impossible; it must be a whole number{of_what}, {at_least} or above")


def check_no_bools(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `ConfigError` for an option that is a number and was given as a bool, which Pydantic takes for one."""
    for name in names:
        if isinstance(values.get(name), bool):
            raise ConfigError(f"{name}={values[name]!r} is impossible; it must be a number")


def check_names(refusal: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise `ConfigError`, which begins with `refusal`, for a name that is not known."""
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"{refusal} {unknown[0]!r}; {known_names(unknown[0], known)}")


def known_names(name: str, known: Sequence[str]) -> str:
    """What to write in place of an option that does not exist: the likely one, and all known ones."""
    likely = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), "")
    return (f"did you mean {likely!r}? " if likely else "") + f"known options: {', '.join(known)}"
