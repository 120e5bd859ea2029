"""A handle in whatever form it is given: itself, or the mapping that a serialiser made of it; and as Pydantic's field.

It knows the packed form by name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langgraph_latent.errors import HandleError


class HandleForms:
    """What lets a handle be a field of a Pydantic model: dumped as `to_dict()`, which validation takes back."""

    from_dict: Any
    """The inverse of `to_dict`; a handle's own."""

    @classmethod
    def given(cls, value: Any) -> Any:
        """A handle as it is, one for the mapping that `to_dict` returns, and anything else as it is.

        Raises `HandleError` for a mapping that is no handle.
        """
        return cls.from_dict(value) if isinstance(value, Mapping) else value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """In the form of `pydantic_core.core_schema`, whose schemas are plain mappings."""
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": cls._validated},
            "serialization": {"type": "function-plain", "function": lambda handle: handle.to_dict()},
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        texts = {name: {"type": "string"} for name in ("id", "model", "tenant", "tokens", "segments")}
        fields = {**texts, "nbytes": {"type": "integer"}}
        return {"type": "object", "title": cls.__name__, "properties": fields, "required": sorted(fields)}

    @classmethod
    def _validated(cls, value: Any) -> Any:
        try:
            handle = cls.given(value)
        except HandleError as error:
            raise ValueError(str(error)) from error
        if not isinstance(handle, cls):
            raise ValueError(f"expected a {cls.__name__} or the mapping that its to_dict() returns")
        return handle
