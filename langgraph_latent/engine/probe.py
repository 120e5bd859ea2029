"""What can be done with a model's caches, found out by running it on a few tokens. No list of model names.

Each capability is a claim about logits: computed the cheap way they must be those of a plain run. What fails its claim
is refused, with the reason. A probe keeps nothing itself: its answers are `Findings`, which whoever asked may store.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from langgraph_latent.engine.findings import Findings, opaque_refusals
from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.move import Piece, moved_after
from langgraph_latent.kv.rope import (
    LayerRotation,
    RotationSpec,
    find_rotation,
    frequencies,
    rotation_of,
    rotations_of,
)
from langgraph_latent.kv.state import KVState, KVTail

TOLERANCE, NARROW_TOLERANCE = 2e-5, 2e-1
"""Largest relative difference of logits; the second for dtypes of two bytes and less."""
KEY_TOLERANCE, NARROW_KEY_TOLERANCE = 1e-4, 1e-1
"""The same of keys that are moved."""
NARROW = 6
"""Tokens of a window that is made narrow to be filled."""
DELTA, FAR = 5, 97
"""Positions by which tokens are moved: a few, after others; many, alone, which tells slow frequencies apart."""
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
"""Says nothing about a model."""
UNUSED = "does not use the cache that it is given. Use a text edge for this model."
WRONG = "gives other logits when its tokens are fed in parts"

LayerTensors = dict[str, torch.Tensor]
"""A layer's tensors by name."""


class Probed(Protocol):
    """What the probe needs of a model.

    Attributes:
        takes_mask: whether its forward is given an attention mask; the probe sets it.
        takes_positions: whether its forward takes position ids.
        gives_positions: whether its forward is always given them; the probe sets it.
        has_packed_attention: whether its attention may be given several sequences side by side.
        max_positions: the longest sequence it takes, 0 where it names none.
    """

    model: Any
    kinds: tuple[LayerKind, ...]
    takes_mask: bool
    takes_positions: bool
    gives_positions: bool
    has_packed_attention: bool
    max_positions: int

    def empty_state(self) -> KVState: ...

    def stock(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after the last of `ids`, (1, vocab), from plain transformers without a cache."""

    def run(self, ids: Sequence[int], tail: KVTail, **arguments: Any) -> torch.Tensor:
        """Logits after the last of `ids`, (vocab,)."""

    def run_packed(self, batch: Sequence[tuple[Sequence[int], KVTail]]) -> torch.Tensor:
        """Logits after the last token of each sequence, (sequences, vocab), from one model call."""


def _failed(caught: Exception) -> str:
    return (
        f"does not run over transformers' cache layers for it: {type(caught).__name__}: {caught}. Use a text edge for "
        "this model."
    )


class Probe:
    """One probe of one model; `findings` runs it.

    Args:
        ids: token ids to run, at least 12, all different.
    """

    def __init__(self, model: Probed, ids: Sequence[int], name: str) -> None:
        self._model = model
        self._ids = list(ids)
        self._other = self._ids[: -NARROW - 1 : -1]  # longer than the first part, in sight of a narrow window
        self._other_logits = torch.empty(0)
        self._name = f"{name!r} ({type(model.model).__name__})"
        is_narrow = model.model.dtype.itemsize <= 2
        self._tolerance = NARROW_TOLERANCE if is_narrow else TOLERANCE
        self._key_tolerance = NARROW_KEY_TOLERANCE if is_narrow else KEY_TOLERANCE

    def findings(self) -> Findings:
        """Raises `UnsupportedLayerError` for a model that can't continue a cache."""
        is_stepwise = self._find_way_to_append()
        rotations, is_absolute = self._find_rotations()
        refusals = dict(opaque_refusals(self._model.kinds))
        claims = {
            "crop": self._refuse_crop,
            "batch": self._refuse_batch,
            "move": lambda: self._refuse_move(rotations, is_absolute),
            "think": self._refuse_think,
        }
        for capability, refuse in claims.items():
            if capability not in refusals and (reason := self._tried(refuse)):
                refusals[capability] = reason
        return Findings(
            self._model.takes_mask,
            self._model.gives_positions,
            is_stepwise,
            tuple(refusals.items()),
            self._positions(rotations, is_absolute),
            tuple(rotations),
        )

    @cached_property
    def at_once(self) -> tuple[torch.Tensor, KVState]:
        """Logits after all tokens, fed at once, and their state."""
        return self._fed(self._ids)

    def written(self) -> KVState:
        """The state of all tokens. Raises `UnsupportedLayerError` for a model that can't write one, probed or not."""
        try:
            state = self.at_once[1]
        except OUT_OF_MEMORY:
            raise
        except Exception as caught:
            raise UnsupportedLayerError(f"{self._name} {_failed(caught)}") from caught
        if not _is_written(state):
            raise UnsupportedLayerError(f"{self._name} {UNUSED}")
        return state

    # -- append -----------------------------------------------------------------------------------------------------

    def _find_way_to_append(self) -> bool:
        """Settle how the model is called; whether it takes one token at a time only over a cache."""
        model, failures = self._model, list[str]()
        (expected,) = model.stock(self._ids)
        for is_stepwise, takes_mask, gives_positions in itertools.product((False, True), (True, False), (False, True)):
            if gives_positions > model.takes_positions:
                continue
            model.takes_mask, model.gives_positions = takes_mask, gives_positions
            self.__dict__.pop("at_once", None)
            try:
                failure = self._refuse_append(expected, is_stepwise) or self._refuse_wide_windows(is_stepwise)
            except OUT_OF_MEMORY:
                raise
            except Exception as caught:  # noqa: BLE001 - whatever a model class does with a cache that it does not know
                failure = _failed(caught)
            if not failure:
                return is_stepwise
            failures.append(failure)
        reason = next((failure for failure in failures if failure.startswith(WRONG)), failures[0])
        raise UnsupportedLayerError(f"{self._name} {reason}")

    def _refuse_wide_windows(self, is_stepwise: bool) -> str:
        """Ask the same of windows that the tokens don't fill, made narrow for as long: some are wrong past them."""
        wide = {kind.window for kind in self._model.kinds if kind.window >= len(self._ids)}
        if not wide:
            return ""
        at_width = self.__dict__.pop("at_once")
        with narrowed(self._model, wide):
            failure = self._refuse_append(self._model.stock(self._ids)[0], is_stepwise)
        self.__dict__["at_once"] = at_width
        return f"{failure}; that is so past its sliding window" if failure else ""

    def _refuse_append(self, expected: torch.Tensor, is_stepwise: bool) -> str:
        num_tokens, num_single = len(self._ids), 8 if any(self._model.empty_state().opaque_layers) else 2
        logits, state = self.at_once
        if not _is_written(state):
            return UNUSED
        sizes = [5, *[1] * (num_tokens - 5)] if is_stepwise else [5, num_tokens - 5 - num_single, *[1] * num_single]
        error = max(difference(expected, logits), difference(expected, self._in_parts(sizes)))
        if error <= self._tolerance:
            return ""
        return (
            f"{WRONG} (relative difference {error:.1e}): it is not causal, its cache can't be appended to, or it keeps "
            "state elsewhere"
        )

    def _in_parts(self, sizes: Sequence[int]) -> torch.Tensor:
        """Logits after the tokens, fed in parts of these sizes; after the first, the model reads longer text."""
        with self._model.empty_state().append(len(self._ids)) as tail:
            begin = 0
            for size in sizes:
                logits = self._model.run(self._ids[begin : begin + size], tail)
                begin += size
                if begin == size:
                    self._other_logits, _ = self._fed(self._other)
            return logits

    def _fed(self, ids: Sequence[int]) -> tuple[torch.Tensor, KVState]:
        """Logits and state after tokens that are fed at once."""
        with self._model.empty_state().append(len(ids)) as tail:
            return self._model.run(ids, tail), tail.seal()

    # -- crop, batch, think -----------------------------------------------------------------------------------------

    def _tried(self, refuse: Callable[[], str]) -> str:
        """The reason for a refusal, "" for none; a claim that raises is refused with its error."""
        try:
            return refuse()
        except OUT_OF_MEMORY:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model class does with a call that it does not expect
            return f"its forward raises {type(error).__name__}: {str(error)[:200]}"

    def _refuse_crop(self) -> str:
        expected, state = self.at_once
        middle = len(self._ids) // 2
        with state.crop(middle).append(len(self._ids)) as tail:
            return self._refuse(expected, self._model.run(self._ids[middle:], tail), "after a cropped cache")

    def _refuse_batch(self) -> str:
        """Several sequences in one call, of different lengths and at different positions, must be as each alone."""
        if any(kind.name not in ("full", "sliding") for kind in self._model.kinds):
            return "not all of its layers are full or sliding-window attention; its requests run one after another"
        if not self._model.has_packed_attention or not self._model.takes_mask:
            return "its attention is not transformers' sdpa; its requests run one after another"
        (logits, state), ids = self.at_once, self._ids
        begun = (
            (state.crop(len(ids) - 1), ids[-1:]),
            (self._model.empty_state(), self._other),
            (state.crop(len(ids) // 2), ids[len(ids) // 2 :]),
        )
        alone = (logits, self._other_logits, logits)
        with contextlib.ExitStack() as stack:
            batch = [(new, stack.enter_context(before.append(len(ids)))) for before, new in begun]
            together = self._model.run_packed(batch)
        return self._refuse(torch.stack(alone), together, "when several requests share a call")

    def _refuse_think(self) -> str:
        """An embedding in place of the last token, over a cache: some models count positions from it alone."""
        (expected, state), num_before = self.at_once, len(self._ids) - 1
        embeddings = self._model.model.get_input_embeddings()
        last = torch.tensor([self._ids[-1:]], device=embeddings.weight.device)
        before = state.crop(num_before) if state.can_crop(num_before) else self._fed(self._ids[:-1])[1]
        with before.append(len(self._ids)) as tail, torch.no_grad():
            logits = self._model.run(self._ids[-1:], tail, input_ids=None, inputs_embeds=embeddings(last))
        return self._refuse(expected, logits, "from its own input embeddings")

    # -- positions and move -----------------------------------------------------------------------------------------

    def _find_rotations(self) -> tuple[list[LayerRotation], bool]:
        """How each layer's keys and values carry positions, and whether that is in a way that no rotation explains.

        Values carry them where a layer keeps the rotated channels apart (MLA).
        """
        rotations: list[LayerRotation] = [(None, None)] * len(self._model.kinds)
        try:
            before, after, delta = self._at_two_positions()
        except OUT_OF_MEMORY:
            raise
        except Exception:  # noqa: BLE001 - it does not run at other positions; then nothing is claimed
            return rotations, True
        is_absolute = False
        for index, later in after.items():
            found = [self._rotation(before[index][part], later[part], delta) for part in ("keys", "values")]
            rotations[index] = (found[0][0], found[1][0])
            is_absolute |= not all(is_explained for _, is_explained in found)
        return rotations, is_absolute

    def _rotation(self, old: torch.Tensor, new: torch.Tensor, delta: int) -> tuple[RotationSpec | None, bool]:
        """What turns one into the other, None for nothing, and whether it does."""
        stayed = difference(new, old)
        spec = find_rotation(old, new, delta, self._frequencies, self._key_tolerance)
        if spec is None:
            return None, stayed <= self._key_tolerance
        turned = difference(new, rotation_of(spec, self._frequencies).shift(old, delta))
        return (None if stayed <= turned else spec), True

    @cached_property
    def _frequencies(self) -> dict[str, torch.Tensor]:
        return frequencies(self._model.model)

    def _attention_layers(self) -> list[int]:
        """The layers that keep keys and values, opaque ones included."""
        state = self.at_once[1]
        return [index for index in range(len(state.kinds)) if "keys" in state.tensors(index)]

    def _at_two_positions(self) -> tuple[dict[int, LayerTensors], dict[int, LayerTensors], int]:
        """The attention layers' tensors of the same tokens at two positions, and how far apart these are.

        A token alone attends to itself only: whatever its position, every layer is given the very same input, so that
        rounding can't add up from layer to layer, as it does in narrow dtypes until nothing of the keys is the same.
        """
        layers = self._attention_layers()
        if not self._model.takes_positions:
            state = self.at_once[1]
            return {index: state.tensors(index) for index in layers}, self._after_hidden(layers), DELTA
        found, delta = [], min(FAR, (self._model.max_positions or 2 * FAR) // 2)
        for at in (0, delta):
            with self._model.empty_state().append() as tail:
                positions = torch.tensor([[at]], device=self._model.model.device)
                self._model.run(self._ids[:1], tail, position_ids=positions)
                state = tail.seal()
            found.append({index: state.tensors(index) for index in layers})
        return found[0], found[1], delta

    def _after_hidden(self, layers: Sequence[int]) -> dict[int, LayerTensors]:
        """The layers' tensors of all tokens after `DELTA` others, which are hidden by the mask.

        Raises `ValueError` where the mask is what gives positions: then it is not known what they would be with those
        tokens in sight.
        """
        ids = self._ids
        before, num_tokens = ids[-DELTA:], DELTA + len(ids)
        with self._model.empty_state().append(num_tokens) as tail:
            self._model.run(before, tail)
            self._model.run(ids, tail, attention_mask=self._hiding(DELTA, len(ids)))
            hidden = tail.seal()
        with self._model.empty_state().append(num_tokens) as tail:
            self._model.run([*before, *ids], tail)
            in_sight = tail.seal()
        if layers and difference(in_sight.layer(layers[0])[0], hidden.layer(layers[0])[0]) > self._key_tolerance:
            raise ValueError("positions come from the mask")
        return {index: {name: part[:, :, DELTA:] for name, part in hidden.tensors(index).items()} for index in layers}

    def _hiding(self, num_hidden: int, num_seen: int) -> torch.Tensor:
        """An attention mask, (1, hidden + seen)."""
        return torch.tensor([[0] * num_hidden + [1] * num_seen], device=self._model.model.device)

    def _refuse_move(self, rotations: Sequence[LayerRotation], is_absolute: bool) -> str:
        """A block computed alone and moved must be as one computed in place that does not see what is before it."""
        if refusals := opaque_refusals(self._model.kinds):
            return refusals[0][1].replace("taken back", "moved")
        if is_absolute:
            return "positions are in its keys in a way that no rotation explains (learned or absolute positions)"
        if not self._model.takes_mask:
            return "it takes no attention mask, so a move can't be proven"
        first, block, last = self._ids[-DELTA:], self._ids[:-3], self._ids[-3:]
        return self._refuse(*self._in_place_and_moved(first, block, last, rotations), "after a block that was moved")

    def _in_place_and_moved(
        self, first: list[int], block: list[int], last: list[int], rotations: Sequence[LayerRotation]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model, total = self._model, len(first) + len(block) + len(last)
        hidden = self._hiding(len(first), len(block))
        at = torch.arange(len(first), len(first) + len(block), device=model.model.device)[None]
        with model.empty_state().append(total) as tail:
            model.run(first, tail)
            start = tail.seal()
            model.run(block, tail, attention_mask=hidden, **({"position_ids": at} if model.takes_positions else {}))
            in_place = model.run(last, tail)
        alone = self.at_once[1].crop(len(block))
        moving = rotations_of(rotations, self._frequencies)
        with moved_after(start, [Piece.of(alone)], moving).append(total) as tail:
            return in_place, model.run(last, tail)

    def _positions(self, rotations: Sequence[LayerRotation], is_absolute: bool) -> str:
        """For people: "rope, half-split, 16 of 64 channels (yarn)"; several where layers differ."""
        if not (layers := self._attention_layers()):
            return "none: no attention layers"
        if is_absolute:
            return "learned or absolute"
        counts = Counter(self._position(index, *rotations[index]) for index in layers)
        scaling = (getattr(self._model.model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_type")
        scaled = f" ({scaling})" if scaling and scaling != "default" else ""
        if len(counts) == 1:
            return f"{next(iter(counts)).text}{scaled}"
        return "; ".join(f"{count} x {position.text}" for position, count in counts.items()) + scaled

    def _position(self, index: int, keys: RotationSpec | None, values: RotationSpec | None) -> _Position:
        if (spec := keys or values) is None:
            return _Position("ALiBi" if _has_alibi(self._model.model) else "none")
        channels = self.at_once[1].tensors(index)["keys" if keys else "values"].shape[-1]
        width = 2 * len(self._frequencies[spec.frequencies])
        return _Position(f"rope, {spec.layout}, {width} of {channels} channels", spec.frequencies)

    def _refuse(self, expected: torch.Tensor, actual: torch.Tensor, where: str) -> str:
        error = difference(expected, actual)
        return "" if error <= self._tolerance else f"its logits differ {where} (relative difference {error:.1e})"


class _Position(NamedTuple):
    """Where a layer's positions come from; layers of different frequencies count apart."""

    text: str
    frequencies: str = ""


@contextlib.contextmanager
def narrowed(model: Probed, wide: Collection[int]) -> Iterator[None]:
    """A model whose windows of these many tokens are `NARROW` ones, in its config, its modules and its cache layers."""
    config, kinds = model.model.config, model.kinds
    opaque_layers = [layer for layer in model.empty_state().opaque_layers if layer]
    owners = [config, config.get_text_config(), *model.model.modules(), *opaque_layers]
    changed = [
        (owner, name, value)
        for owner in {id(owner): owner for owner in owners}.values()
        for name, value in vars(owner).items()
        if isinstance(value, int) and value in wide and ("window" in name or "chunk" in name)
    ]
    try:
        for owner, name, _ in changed:
            setattr(owner, name, NARROW)
        model.kinds = tuple(kind._replace(window=NARROW) if kind.window in wide else kind for kind in kinds)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
        model.kinds = kinds


def difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; infinite where either holds what is not a number."""
    expected, actual = expected.float(), actual.float()
    error = float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-6))
    return math.inf if math.isnan(error) else error


def _is_written(state: KVState) -> bool:
    """Whether every layer was written, for one sequence."""
    return all(
        not kind.has_tokens or (store.keys is not None and store.keys.shape[0] == 1)
        for kind, store in zip(state.kinds, state.buffer.layers, strict=True)
    )


def _has_alibi(model: Any) -> bool:
    return any("alibi" in name for module in model.modules() for name in (*vars(module), *vars(type(module)))) or any(
        "alibi" in str(field) for field in model.config.to_dict().items()
    )
