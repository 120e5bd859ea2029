"""The conformance suite: what the library promises of a model's caches, each promise against stock transformers.

    conform(model) -> Outcome: per property a `Cell`: exact, refused with the reason, or wrong

Wrong means: it was promised and is not so. The truth is one stock forward over all tokens without a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.probe import difference
from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.kv import codec
from langgraph_latent.kv.move import Piece, moved_after
from langgraph_latent.kv.state import KVState
from langgraph_latent.testing.catalogue import Toy
from langgraph_latent.testing.tiny import tiny_tokenizer

PROPERTIES = ("append", "crop", "move", "export and ingest", "fan-out", "batch")
TOLERANCE = 1e-4
NUM_READ, NUM_CROPPED, NUM_WRITTEN = 70, 41, 6
"""Tokens of the inherited prompt (longer than the windows of toy models), of its cropped prefix, and after it."""


class Cell(NamedTuple):
    """How one promise fared. `detail` is the reason of a refusal, or what is wrong."""

    verdict: Literal["exact", "refused", "wrong"]
    detail: str = ""


class Outcome(NamedTuple):
    """How the promises of one model fared, by property; its layers and positions for people."""

    name: str
    architecture: str
    layers: str
    positions: str
    cells: dict[str, Cell]

    @property
    def wrong(self) -> dict[str, str]:
        """Promises that do not hold, with what is wrong."""
        return {name: cell.detail for name, cell in self.cells.items() if cell.verdict == "wrong"}


def conform(model: ResidentModel, name: str = "", tolerance: float = TOLERANCE) -> Outcome:
    """Test every promise of a float32 model. Errors count relative to the largest logit."""
    suite = _Suite(model, tolerance)
    kinds = Counter(f"{kind.name} {kind.window}".removesuffix(" 0") for kind in model.kinds)
    return Outcome(
        name or model.spec.name,
        model.spec.architecture,
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        model.spec.capabilities.positions,
        {prop: suite.cell(prop, check) for prop, check in suite.checks().items()},
    )


def conform_toy(toy: Toy) -> Outcome:
    """The outcome of a toy; one that is refused when it is loaded is refused in every cell."""
    model = toy.model()
    try:
        return conform(ResidentModel(model, tiny_tokenizer(), toy.name, f"toy {toy.name}"), toy.name)
    except UnsupportedLayerError as error:
        reason = str(error).removeprefix(f"{toy.name!r} ")
        return Outcome(toy.name, type(model).__name__, "", "", dict.fromkeys(PROPERTIES, Cell("refused", reason)))


class _Suite:
    def __init__(self, model: ResidentModel, tolerance: float) -> None:
        self._model = model
        self._tolerance = tolerance
        self._vocab_size = model.spec.vocab_size
        self._num_read = min(NUM_READ, (model.spec.max_positions or NUM_READ + NUM_WRITTEN) - NUM_WRITTEN)

    def checks(self) -> dict[str, Callable[[], float]]:
        """Per property a function that gives its error, relative to the largest logit."""
        return {
            "append": self._append,
            "crop": self._crop,
            "move": self._move,
            "export and ingest": self._export,
            "fan-out": self._fan_out,
            "batch": self._batch,
        }

    def cell(self, prop: str, check: Callable[[], float]) -> Cell:
        if reason := self._model.spec.capabilities.refusal(prop):
            return Cell("refused", reason)
        try:
            error = check()
        except Exception as caught:  # noqa: BLE001 - a promise that raises is as wrong as one that is inexact
            return Cell("wrong", f"{type(caught).__name__}: {caught}")
        return Cell("exact") if error <= self._tolerance else Cell("wrong", f"relative difference {error:.1e}")

    def _ids(self, num_tokens: int, seed: int) -> list[int]:
        numbers = torch.randint(3, self._vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
        return [int(number) for number in numbers]

    def _truth(self, ids: Sequence[int], num_last: int) -> torch.Tensor:
        """Stock logits after each of the last tokens, (num_last, vocab)."""
        return self._model.stock(ids, num_last)

    def _read(self, ids: Sequence[int]) -> KVState:
        with self._model.empty_state().append(len(ids)) as tail:
            self._model.prefill(ids, tail)
            return tail.seal()

    def _after(self, state: KVState, ids: Sequence[int]) -> torch.Tensor:
        """Logits after the first half of the ids, fed at once, and after each of the others, one by one."""
        half = len(ids) // 2
        with state.append() as tail:
            logits = [self._model.prefill(ids[:half], tail)]
            logits += [self._model.prefill([token], tail) for token in ids[half:]]
        return torch.stack(logits)

    def _error(self, state: KVState, read: Sequence[int], written: Sequence[int]) -> float:
        num_last = len(written) - len(written) // 2 + 1
        return difference(self._truth([*read, *written], num_last), self._after(state, written))

    def _append(self) -> float:
        read, written = self._ids(self._num_read, 0), self._ids(NUM_WRITTEN, 1)
        return self._error(self._read(read), read, written)

    def _crop(self) -> float:
        read, written = self._ids(self._num_read, 0), self._ids(NUM_WRITTEN, 1)
        cropped = self._read(read).crop(NUM_CROPPED)
        return self._error(cropped, read[:NUM_CROPPED], written)

    def _export(self) -> float:
        read, written = self._ids(self._num_read, 0), self._ids(NUM_WRITTEN, 1)
        spec = self._model.spec
        handle = KVHandle.root(spec.identity, "").extend("prompt", "", pack_tokens(read), [], 0)
        blob = codec.encode(handle, self._read(read), spec)
        return self._error(codec.decode(blob, spec, self._model.opaque_layers).state, read, written)

    def _fan_out(self) -> float:
        """Several continuations of one state at a time leave it as it was, and are as each alone."""
        read = self._ids(self._num_read, 0)
        state = self._read(read)
        before = state.checksum()
        branches = [self._ids(NUM_WRITTEN, seed) for seed in (1, 2, 3)]
        with ThreadPoolExecutor(len(branches)) as threads:
            errors = list(threads.map(lambda written: self._error(state, read, written), branches))
        if state.checksum() != before:
            raise AssertionError("the inherited state was written to")
        return max(errors)

    def _batch(self) -> float:
        """Sequences of different lengths, cached and not, in one model call."""
        lengths = ((self._num_read, 1), (9, 4), (0, 7), (NUM_CROPPED, 1))
        texts = [
            (self._ids(num_read, 5 + index), self._ids(num_new, 9 + index))
            for index, (num_read, num_new) in enumerate(lengths)
        ]
        batch = [(new, (self._read(read) if read else self._model.empty_state()).append()) for read, new in texts]
        logits = self._model.run_packed(batch)
        return max(
            difference(self._truth([*read, *new], 1)[0], got) for (read, new), got in zip(texts, logits, strict=True)
        )

    def _move(self) -> float:
        """A block read alone and moved, against the same block read in place while what is before it is hidden."""
        model = self._model
        first, block, last = self._ids(13, 0), self._ids(29, 1), self._ids(NUM_WRITTEN, 2)
        seen = torch.tensor([[0] * len(first) + [1] * len(block)])
        positions = torch.arange(len(first), len(first) + len(block))[None]
        with self._read(first).append() as tail:
            model.run(
                block, tail, attention_mask=seen, **({"position_ids": positions} if model.takes_positions else {})
            )
            in_place = tail.seal()
        moved = moved_after(self._read(first), [Piece.of(self._read(block))], model.rotations)
        return difference(self._after(in_place, last), self._after(moved, last))
