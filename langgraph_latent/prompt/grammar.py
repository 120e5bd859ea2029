"""Constrained decoding: only tokens that keep an answer within a JSON schema, by llguidance (the extra `grammar`).

It knows schemas, tool call formats and logits; not which answer needs them.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor

from langgraph_latent.errors import ConfigError, MissingExtraError
from langgraph_latent.prompt.tool_calls import ToolCallFormat

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. With free white space a weak model writes blanks until it has no tokens left."""

LARGEST_INTEGER = 9 * 10**18
"""Bound of integers whose schema names none, within 64 bits: a checkpoint keeps no larger ones."""
AS_THEY_ARE = ("allOf", "const", "default", "enum", "examples")
"""Parts of a schema that are not closed: they hold values, or schemas that must stay open."""


@lru_cache
def has_grammars() -> bool:
    """Whether the extra `grammar` is installed."""
    return importlib.util.find_spec("llguidance") is not None


def check_grammars() -> None:
    """Raise `MissingExtraError` where the extra `grammar` is not installed."""
    if not has_grammars():
        raise MissingExtraError(
            "structured output and a forced tool choice need constrained decoding: "
            "pip install 'langgraph-latent[grammar]'"
        )


def json_rule(schema: Mapping[str, Any]) -> str:
    """A grammar rule for JSON of a schema. Objects take no properties but those declared, and integers no more digits
    than a checkpoint keeps, unless the schema says so."""
    return f"%json {json.dumps({**_closed(schema), 'x-guidance': STYLE})}"


OTHER_PROPERTIES = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if"))
"""Where an object's properties may be declared beside `properties`."""


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: value if name in AS_THEY_ARE else _closed(value) for name, value in schema.items()}
    kind = schema.get("type")
    declared = schema.get("properties")
    is_all_declared_here = not OTHER_PROPERTIES & set(schema) and set(schema.get("required", ())) <= set(declared or ())
    if isinstance(declared, Mapping) and kind == "object" and is_all_declared_here:
        closed.setdefault("additionalProperties", False)
    if kind == "integer" or (isinstance(kind, list) and "integer" in kind and "number" not in kind):
        closed.setdefault("minimum", -LARGEST_INTEGER)
        closed.setdefault("maximum", LARGEST_INTEGER)
    return closed


class Constraint(NamedTuple):
    """What an answer must be: one call of one of `tools`, or JSON of `schema`; with both, either."""

    tools: Sequence[Mapping[str, Any]] = ()
    schema: Mapping[str, Any] | None = None


class GrammarCompiler:
    """Makes logits processors for one model.

    The tokenizer's preparation takes about a second and is done on first use.

    Args:
        call_format: how calls are written.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_tokens: Iterable[int], call_format: ToolCallFormat
    ) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self._format = call_format
        self._lock = threading.Lock()
        self._prepared: Any = None

    def compile(self, constraint: Constraint, after: str = "") -> GrammarProcessor:
        """What keeps one answer within a constraint, once the text `after` has come.

        Raises `ConfigError` for a schema that can't be enforced, and `MissingExtraError`.
        """
        check_grammars()
        import llguidance

        with self._lock:
            if self._prepared is None:
                self._prepared = self._prepare()
        token = self._added_token(after)
        rules = self._rules(constraint, after="" if token is not None else after)
        grammar = llguidance.LLMatcher.grammar_from_lark(rules)
        matcher = llguidance.LLMatcher(self._prepared, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().partition("<state>")[0].strip()
            raise ConfigError(f"this schema can't be enforced while decoding; simplify it: {reason}")
        return GrammarProcessor(matcher, self._prepared.vocab_size, token)

    def _prepare(self) -> Any:
        import llguidance.hf

        tokenizer: Any = self._tokenizer
        try:
            return llguidance.hf.from_tokenizer(tokenizer, eos_token=self._end_tokens)
        except ValueError as error:
            raise ConfigError(f"constrained decoding is not possible with this model's tokenizer: {error}") from error

    def _rules(self, constraint: Constraint, after: str) -> str:
        """A constraint in llguidance's grammar language; any text up to and with `after` comes before it."""
        tools, schema = constraint
        is_wanted = {"call": bool(tools), "answer": schema is not None}
        wanted = " | ".join(rule for rule in is_wanted if is_wanted[rule])
        rules = [f"start: reasoning ({wanted})" if after else f"start: {wanted}"]
        if after:
            rules.append(f"reasoning[suffix={json.dumps(after)}]: /(.|\\n)*/")
        if schema is not None:
            rules.append(f"answer: {json_rule(schema)}")
        if not tools:
            return "\n".join(rules)
        call_format = self._format
        space = '"\\n"' if call_format.end else ""  # between a mark and the call
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        rules.append(f"call: {self._mark(call_format.begin)} {space} ({names}) {space} {self._mark(call_format.end)}")
        for index, function in enumerate(tool["function"] for tool in tools):
            # in the same pieces as %json: of two that begin alike, the lexer would go for the longer one alone
            name = json.dumps(function["name"], ensure_ascii=False)
            pieces = ("{", '"name"', ": ", name, ", ", f'"{call_format.arguments_key}"', ": ")
            rules.append(f'call_{index}: {" ".join(map(json.dumps, pieces))} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: {json_rule(function.get('parameters') or {'type': 'object'})}")
        return "\n".join(rules)

    def _mark(self, mark: str) -> str:
        """A mark in the grammar's words: the one token that it is, or its letters."""
        if not mark:
            return ""
        token = self._added_token(mark)
        return json.dumps(mark, ensure_ascii=False) if token is None else f"<[{token}]>"

    def _added_token(self, text: str) -> int | None:
        token = self._tokenizer.get_vocab().get(text)
        return token if token in self._tokenizer.added_tokens_decoder else None


class GrammarProcessor(LogitsProcessor):
    """Forbids every token that leaves a grammar; for one answer."""

    def __init__(self, matcher: Any, vocab_size: int, after: int | None) -> None:
        self._matcher = matcher
        self._mask = numpy.zeros((vocab_size + 31) // 32, dtype=numpy.int32)
        self._after = after
        self._num_seen: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """`input_ids` (1, seq) with everything so far; scores (1, vocab), -inf where forbidden."""
        new = [] if self._num_seen is None else input_ids[0, self._num_seen :].tolist()
        self._num_seen = input_ids.shape[1]
        if self._after is not None:
            if self._after not in new:
                return scores
            new = new[new.index(self._after) + 1 :]
            self._after = None
        if new:
            self._matcher.consume_tokens(new)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise ConfigError(f"this schema is too large to be enforced; simplify it: {self._matcher.get_error()}")
        bits = numpy.unpackbits(self._mask.view(numpy.uint8), bitorder="little")[: scores.shape[-1]]
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits).bool()
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))
