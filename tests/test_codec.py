"""A cache file comes back bit for bit, or not at all: every damage and forgery is refused before anything is used."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import pickle
import random
import stat
import struct
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import safetensors.torch
import torch

from langgraph_latent.engine import loader
from langgraph_latent.engine.loader import ModelKey
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import CodecError, LatentError
from langgraph_latent.handle import KVHandle
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.kv import codec
from langgraph_latent.kv.opaque import copy_layer, plain_of
from langgraph_latent.kv.state import KVState
from langgraph_latent.testing import tiny_tokenizer
from langgraph_latent.testing.catalogue import catalogue, save_toy

SUFFIX = [40, 41, 42, 43]
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
WHOLE = ["qwen3_next", "lfm2", "mamba2", "falcon_h1", "zaya", "deepseek_v32", "minimax_m3_vl_text", "deepseek_v4"]
"""Toys with opaque cache layers: recurrent, convolution, hybrid, indexed and compressed."""


class Sample(NamedTuple):
    """A model with a cache of it, and the blob of that cache."""

    model: ResidentModel
    handle: KVHandle
    state: KVState
    blob: bytes


@pytest.fixture(scope="module")
def sample(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Sample]]:
    """`sample("mistral", "bfloat16", num_tokens)`: made once per arguments."""
    made: dict[tuple[Any, ...], Sample] = {}
    keys: list[ModelKey] = []

    @functools.cache
    def toy_folder(kind: str) -> Path:
        return save_toy(tmp_path_factory.mktemp(kind), kind)

    def make(kind: str = "llama", dtype: str = "float32", num_tokens: int = 60, seed: int = 0) -> Sample:
        arguments = (kind, dtype, num_tokens, seed)
        if arguments not in made:
            key = ModelKey(str(toy_folder(kind) if kind in WHOLE else tiny_folder(kind, seed=seed)), dtype=dtype)
            model = loader.acquire(key)
            keys.append(key)
            ids = torch.randint(3, 300, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()
            with model.empty_state().append() as tail:
                model.prefill(ids, tail)
                state = tail.seal()
            message = {"role": "user", "content": "what it says"}
            handle = KVHandle.root(model.spec.identity).extend(
                "prompt", "reader", pack_tokens(ids), [message], model.spec.bytes_per_token
            )
            made[arguments] = Sample(model, handle, state, codec.encode(handle, state, model.spec))
        return made[arguments]

    yield make
    for key in keys:
        loader.release(key)


def next_logits(model: ResidentModel, state: KVState) -> torch.Tensor:
    with state.append() as tail:
        return model.prefill(SUFFIX, tail)


# -- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 23, 24, 25, 60])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_a_cache_comes_back_bit_for_bit(kind: str, dtype: str, num_tokens: int, sample: Callable[..., Sample]) -> None:
    """Law 4, on tensors; mistral's window is 24, so its cache is shorter than the sequence."""
    model, handle, state, blob = sample(kind, dtype, num_tokens)
    back = codec.decode(bytearray(blob), model.spec)
    assert back.handle == handle
    assert back.state.equals(state)
    assert back.state.checksum() == state.checksum()
    assert back.state.layers()[0][0].dtype == getattr(torch, dtype)
    assert torch.allclose(next_logits(model, back.state), next_logits(model, state), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [9, 23, 60])
@pytest.mark.parametrize("kind", WHOLE)
def test_opaque_layers_come_back_bit_for_bit(kind: str, num_tokens: int, sample: Callable[..., Sample]) -> None:
    """Law 4 for every kind of layer. What is read fills copies: the model's own layers stay as they were."""
    model, handle, state, blob = sample(kind, "float32", num_tokens)
    assert any(layer is not None for layer in state.opaque_layers)
    empty = model.empty_state()
    back = codec.decode(bytearray(blob), model.spec, model.opaque_layers)
    assert back.handle == handle
    assert back.state.equals(state)
    assert back.state.checksum() == state.checksum()
    for mine, theirs in zip(back.state.opaque_layers, state.opaque_layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine is None or plain_of(mine) == plain_of(theirs)
    assert parts(codec.encode(back.handle, back.state, model.spec)) == parts(blob)
    assert torch.equal(next_logits(model, back.state), next_logits(model, state))
    assert back.state.equals(state)
    assert empty.layers() == model.empty_state().layers() == []
    assert codec.decode(bytearray(blob), model.spec, model.opaque_layers).state.equals(state)


def test_a_cache_with_entries_that_a_short_text_has_not_comes_back(tmp_path: Path) -> None:
    """DeepSeek-V4 compresses 128 tokens into one entry: what the probe reads is long enough to see its shape."""
    toy = catalogue()["deepseek_v4"]
    model = ResidentModel(
        replace(toy, overrides={**toy.overrides, "compress_rates": RATES}).model(), tiny_tokenizer(), "toy", "w"
    )
    ids = [index % 300 for index in range(300)]
    with model.empty_state().append() as tail:
        model.prefill(ids, tail)
        state = tail.seal()
    assert any("compressed" in name and part.numel() for name, part in state.tensors(0).items())
    handle = KVHandle.root(model.spec.identity).extend("prompt", "reader", pack_tokens(ids), [], 1)
    blob = codec.encode(handle, state, model.spec)
    assert codec.decode(bytearray(blob), model.spec, model.opaque_layers).state.equals(state)


def test_appending_to_an_opaque_layer_that_came_back_leaves_the_blob_as_it_was(sample: Callable[..., Sample]) -> None:
    """Its layers write in place, and what was decoded shares the blob's memory."""
    model, _, state, blob = sample("mamba2")
    own = bytearray(blob)
    back = codec.decode(own, model.spec, model.opaque_layers)
    next_logits(model, back.state)
    assert bytes(own) == blob
    assert back.state.equals(state)


def test_a_sliding_cache_travels_without_its_distant_past(sample: Callable[..., Sample]) -> None:
    model, _, state, blob = sample("mistral", "float32", 60)
    tensors = safetensors.torch.load(blob)
    assert {tensor.shape[-2] for tensor in tensors.values()} == {23}
    assert sum(tensor.nbytes for tensor in tensors.values()) == state.nbytes == 23 * model.spec.bytes_per_token


def test_encoding_what_came_back_gives_the_same_file(sample: Callable[..., Sample]) -> None:
    model, handle, state, blob = sample("mistral")
    back = codec.decode(bytearray(blob), model.spec)
    assert parts(codec.encode(back.handle, back.state, model.spec)) == parts(blob)
    assert parts(codec.encode(handle, state, model.spec)) == parts(blob)


def test_a_blob_is_a_safetensors_file_that_others_can_read(sample: Callable[..., Sample]) -> None:
    _, _, state, blob = sample("llama")
    tensors = safetensors.torch.load(blob)
    for index, (keys, values) in enumerate(state.layers()):
        assert torch.equal(tensors[f"layers.{index}.keys"], keys)
        assert torch.equal(tensors[f"layers.{index}.values"], values)


def test_a_cropped_state_is_encoded_without_what_was_cropped(sample: Callable[..., Sample]) -> None:
    model, handle, state, blob = sample("llama")
    short = KVHandle.root(handle.model).extend("prompt", "reader", handle.tokens[: 4 * 20], [])
    cropped = codec.encode(short, state.crop(20), model.spec)
    assert len(cropped) < len(blob) / 2
    assert codec.decode(bytearray(cropped), model.spec).state.equals(state.crop(20))


def test_a_state_one_token_behind_its_handle_travels_too(sample: Callable[..., Sample]) -> None:
    """The last sampled token is pending: it is in the handle and not yet in the cache."""
    model, handle, state, _ = sample("llama")
    ahead = handle.extend("generated", "router", pack_tokens([7]), [{"role": "assistant", "content": "x"}])
    back = codec.decode(bytearray(codec.encode(ahead, state, model.spec)), model.spec)
    assert (back.handle.num_tokens, back.state.num_tokens) == (61, 60)
    assert back.handle == ahead


def test_appending_to_what_came_back_leaves_the_blob_as_it_was(sample: Callable[..., Sample]) -> None:
    model, _, state, blob = sample("llama")
    own = bytearray(blob)
    back = codec.decode(own, model.spec)
    shorter = back.state.crop(20)
    del back
    gc.collect()
    next_logits(model, shorter)
    assert shorter.equals(state.crop(20))


def test_plain_bytes_can_be_decoded(sample: Callable[..., Sample]) -> None:
    """`bytes` are read-only: no warning (warnings are errors here), and nothing may ever be written into them."""
    model, _handle, state, blob = sample("llama")
    before = hashlib.sha256(blob).hexdigest()
    shorter = codec.decode(blob, model.spec).state.crop(20)
    gc.collect()
    next_logits(model, shorter)
    assert hashlib.sha256(blob).hexdigest() == before
    assert shorter.equals(state.crop(20))


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_can_be_read_by_its_owner_only_whatever_was_there(umask: int, tmp_path: Path) -> None:
    """A cache can reveal its prompt."""
    path = tmp_path / "a.kv"
    path.write_bytes(b"old")
    path.chmod(0o666)
    before = os.umask(umask)
    try:
        codec.write_file(path, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.kv"]


def test_a_file_that_can_not_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "inside").write_text("x")
    with pytest.raises(CodecError, match="taken"):
        codec.write_file(taken, b"new")
    assert os.listdir(tmp_path) == ["taken"]
    assert os.listdir(taken) == ["inside"]


def test_a_write_that_breaks_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    codec.write_file(path, b"old")
    with pytest.raises(TypeError):
        codec.write_file(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.kv"]


# -- damage and forgery ----------------------------------------------------------------------------------------------


def parts(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def assemble(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def forge(
    blob: bytes,
    edit: Callable[[dict[str, Any], dict[str, Any], bytearray], object],
    *,
    rehash: bool = False,
) -> bytes:
    """What a forger writes who recomputes the manifest's digest and, with `rehash`, every tensor's."""
    header, data = parts(blob)
    manifest, own = json.loads(header["__metadata__"]["manifest"]), bytearray(data)
    edit(manifest, header, own)
    if rehash:
        for index, row in enumerate(manifest["layers"]):
            for part in ("keys", "values"):
                begin, end = header[f"layers.{index}.{part}"]["data_offsets"]
                row["tensors"][part]["sha256"] = hashlib.sha256(own[begin:end]).hexdigest()
    text = json.dumps(manifest, sort_keys=True)
    header["__metadata__"] = {"manifest": text, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}
    return assemble(header, bytes(own))


def test_a_forger_who_changes_nothing_is_believed(sample: Callable[..., Sample]) -> None:
    """So that the forgeries below are refused for what they change."""
    model, handle, state, blob = sample("mistral")
    same = codec.decode(bytearray(forge(blob, lambda *_: None, rehash=True)), model.spec)
    assert same.handle == handle
    assert same.state.equals(state)


def setting(name: str, value: object) -> Callable[..., object]:
    return lambda manifest, header, data: manifest.__setitem__(name, value)


def row_setting(name: str, value: object) -> Callable[..., object]:
    return lambda manifest, header, data: manifest["layers"][1].__setitem__(name, value)


def part_setting(name: str, value: object) -> Callable[..., object]:
    return lambda manifest, header, data: manifest["layers"][1]["tensors"].__setitem__(name, value)


def shaping(shape: list[Any]) -> Callable[..., object]:
    """Declare another shape, in the table of tensors and in the manifest alike."""

    def edit(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        header["layers.1.keys"]["shape"] = manifest["layers"][1]["tensors"]["keys"]["shape"] = shape

    return edit


def table_setting(name: str, value: object) -> Callable[..., object]:
    return lambda manifest, header, data: header["layers.1.keys"].__setitem__(name, value)


def both_lengths(num_tokens: object) -> Callable[..., object]:
    def edit(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        manifest["num_tokens"] = num_tokens
        for index, row in enumerate(manifest["layers"]):
            for part in ("keys", "values"):
                declared = row["tensors"][part]
                shape = [*declared["shape"][:2], num_tokens, declared["shape"][3]]
                declared["shape"] = header[f"layers.{index}.{part}"]["shape"] = shape

    return edit


def not_finite(value: float) -> Callable[..., object]:
    return lambda manifest, header, data: data.__setitem__(slice(0, 4), struct.pack("<f", value))


def swapped_layers(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    first, second = (header[f"layers.{index}.keys"] for index in (0, 1))
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


def swapped_bytes(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    (a, b), (c, d) = (header[f"layers.{index}.values"]["data_offsets"] for index in (0, 1))
    data[a:b], data[c:d] = data[c:d], data[a:b]


def shifted(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
    begin, end = header["layers.1.keys"]["data_offsets"]
    header["layers.1.keys"]["data_offsets"] = [begin + 4, end + 4]


def handle_bomb(field: str, inside: bytes) -> Callable[..., object]:
    def edit(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        manifest["handle"][field] = b64encode(zlib.compress(inside, 9)).decode()

    return edit


def other_handle(num_tokens: int = 60, model: str | None = None) -> Callable[..., object]:
    def edit(manifest: dict[str, Any], header: dict[str, Any], data: bytearray) -> None:
        root = KVHandle.root(model or manifest["model"])
        manifest["handle"] = root.extend("prompt", "n", pack_tokens(range(num_tokens)), []).to_dict()

    return edit


FORGERIES: dict[str, tuple[Callable[..., object], bool]] = {
    "schema 1": (setting("schema", 1), False),
    "schema of text": (setting("schema", "2"), False),
    "schema of nothing": (setting("schema", None), False),
    "another model": (setting("model", "0" * 32), False),
    "a model of a list": (setting("model", [1]), False),
    "another dtype": (setting("dtype", "float16"), False),
    "no tokens": (setting("num_tokens", 0), False),
    "fewer tokens": (setting("num_tokens", 59), False),
    "a token more": (setting("num_tokens", 61), False),
    "negative tokens": (setting("num_tokens", -60), False),
    "absurd tokens": (setting("num_tokens", 10**18), False),
    "tokens of text": (setting("num_tokens", "60"), False),
    "tokens of a fraction": (setting("num_tokens", 60.5), False),
    "tokens of a float": (both_lengths(60.0), True),
    "tokens that are true": (setting("num_tokens", True), False),
    "more tokens everywhere": (both_lengths(61), True),
    "absurd tokens everywhere": (both_lengths(1 << 40), True),
    "no layers": (setting("layers", []), False),
    "layers of a number": (setting("layers", 3), False),
    "layers of null": (setting("layers", [None, None, None]), False),
    "a layer less": (lambda manifest, header, data: manifest["layers"].pop(), False),
    "a layer more": (lambda manifest, header, data: manifest["layers"].append(manifest["layers"][0]), False),
    "a layer not in the table": (lambda manifest, header, data: header.pop("layers.1.keys"), False),
    "a tensor more": (lambda manifest, header, data: header.update(extra=header["layers.1.keys"]), False),
    "another kind": (row_setting("kind", "linear"), False),
    "another window": (row_setting("window", 7), False),
    "another begin": (row_setting("begin", 5), False),
    "tensors of null": (row_setting("tensors", None), False),
    "tensors of a list": (row_setting("tensors", ["keys", "values"]), False),
    "keys of null": (part_setting("keys", None), False),
    "a part more": (part_setting("extra", {}), False),
    "an absurd shape": (shaping([1, 2, 1 << 60, 8]), False),
    "a shape whose size wraps to the right one": (shaping([1, 2, 60 + (1 << 64), 8]), False),
    "a negative shape": (shaping([1, -2, -60, 8]), False),
    "a transposed shape": (shaping([1, 60, 2, 8]), False),
    "a flat shape": (shaping([960]), False),
    "a deep shape": (shaping([1] * 1000 + [2, 60, 8]), False),
    "a batch of two": (shaping([2, 2, 30, 8]), False),
    "a shape of text": (shaping(["1", "2", "60", "8"]), False),
    "a narrower dtype": (table_setting("dtype", "F16"), False),
    "an equally wide dtype": (table_setting("dtype", "I32"), False),
    "an unknown dtype": (table_setting("dtype", "F4"), False),
    "a dtype of a list": (table_setting("dtype", ["F32"]), False),
    "offsets past the end": (table_setting("data_offsets", [1 << 40, (1 << 40) + 3840]), False),
    "offsets below zero": (table_setting("data_offsets", [-3840, 0]), False),
    "offsets turned round": (table_setting("data_offsets", [3840, 0]), False),
    "three offsets": (table_setting("data_offsets", [0, 1, 2]), False),
    "offsets of text": (table_setting("data_offsets", ["0", "3840"]), False),
    "no offsets": (table_setting("data_offsets", None), False),
    "an absurd span": (table_setting("data_offsets", [0, 1 << 62]), False),
    "offsets of an overlap": (shifted, False),
    "layers swapped in the table": (swapped_layers, False),
    "layers swapped in the data": (swapped_bytes, False),
    "data cut": (lambda manifest, header, data: data.__delitem__(slice(len(data) - 4, None)), False),
    "data longer": (lambda manifest, header, data: data.extend(b"more"), False),
    "not a number": (not_finite(float("nan")), True),
    "infinity": (not_finite(float("inf")), True),
    "a handle of null": (setting("handle", None), False),
    "a handle of a list": (setting("handle", []), False),
    "a handle of fewer tokens": (other_handle(59), False),
    "a handle of another model": (other_handle(60, "0" * 32), False),
    "a handle that is a bomb of tokens": (handle_bomb("tokens", b"\x04" + bytes(80 << 20)), False),
    "a handle that is a bomb of text": (handle_bomb("segments", b"[" + b" " * (80 << 20) + b"]"), False),
    "a handle that is 100,000 lists deep": (handle_bomb("segments", b"[" * 100_000), False),
}


def refused(blob: bytes, model: ResidentModel) -> str:
    """The error's text, after checking its type and the memory it took."""
    own = bytearray(blob)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError) as caught:
            codec.decode(own, model.spec, model.opaque_layers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(blob) + (160 << 20)
    return str(caught.value)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_blob_is_refused_at_once_and_without_a_memory_spike(name: str, sample: Callable[..., Sample]) -> None:
    """Field cases 28 and 29 on files: nothing that merely looks like this model's cache is attended to."""
    model, _, _, blob = sample("llama")
    edit, rehash = FORGERIES[name]
    assert len(refused(forge(blob, edit, rehash=rehash), model)) > 20


# -- forged opaque layers ---------------------------------------------------------------------------------------------


def putting(**fields: Any) -> Callable[[Any], object]:
    return lambda layer: vars(layer).update(fields)


def conv(change: Callable[[torch.Tensor], Any]) -> Callable[[Any], object]:
    return lambda layer: layer.conv_states.update({0: change(layer.conv_states[0])})


def keys(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], object]:
    return lambda layer: putting(keys=change(layer.keys))(layer)


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.cat([torch.full_like(tensor[..., :1], value), tensor[..., 1:]], dim=-1)


WHOLE_FORGERIES: dict[str, Callable[[Any], object]] = {
    "a tensor less": conv(lambda tensor: None),
    "a tensor more": putting(extra=torch.zeros(3)),
    "a tensor more in a dict": lambda layer: layer.conv_states.update({1: torch.zeros(3)}),
    "a tensor of another name": lambda layer: layer.conv_states.update({1: layer.conv_states.pop(0)}),
    "a number for a tensor": conv(lambda tensor: 3),
    "a tensor for a number": putting(cumulative_length=torch.tensor(60)),
    "a narrower dtype": conv(lambda tensor: tensor.half()),
    "a wider dtype": conv(lambda tensor: tensor.double()),
    "an equally wide dtype": conv(lambda tensor: tensor.view(torch.int32)),
    "a dtype of less than 64 bits": lambda layer: putting(_sliding_window_tensor=layer._sliding_window_tensor.int())(
        layer
    ),
    "a fixed dimension less": conv(lambda tensor: tensor[..., :-1].contiguous()),
    "a fixed dimension more": conv(lambda tensor: torch.cat([tensor, tensor], dim=1)),
    "no fixed dimension": conv(lambda tensor: tensor[:, :0].contiguous()),
    "transposed": conv(lambda tensor: tensor.mT.contiguous()),
    "flat": conv(lambda tensor: tensor.flatten()),
    "deeper": conv(lambda tensor: tensor[None].contiguous()),
    "a batch of two": conv(lambda tensor: torch.cat([tensor, tensor])),
    "another head_dim of keys": keys(lambda tensor: tensor[..., :-1].contiguous()),
    "another number of heads": keys(lambda tensor: tensor[:, :1].contiguous()),
    "not a number": conv(filled(float("nan"))),
    "infinity": conv(filled(float("inf"))),
    "keys that are not a number": keys(filled(float("nan"))),
    "a field less": lambda layer: vars(layer).pop("record_past"),
    "a field more": putting(more=1),
    "a field more of null": putting(more=None),
    "a field of another name": lambda layer: putting(recorded=vars(layer).pop("record_past"))(layer),
    "text for a number": putting(cumulative_length="60"),
    "a fraction for a number": putting(cumulative_length=60.0),
    "true for a number": putting(sliding_window=True),
    "null for a number": putting(sliding_window=None),
    "not a number for a number": putting(sliding_window=float("nan")),
    "a list for a number": putting(sliding_window=[20]),
    "a number for true": putting(is_initialized=1),
    "fewer tokens": putting(cumulative_length=59),
    "more tokens": putting(cumulative_length=10**30),
    "negative tokens": putting(cumulative_length=-60),
}
"""What a forger does to a layer before he encodes it, all digests right. The layer is zaya's second, hybrid sliding."""


def altered(state: KVState, index: int, edit: Callable[[Any], object]) -> KVState:
    """A copy of a state with an edit in one opaque layer."""
    opaque_layers = [None if layer is None else copy_layer(layer) for layer in state.opaque_layers]
    edit(opaque_layers[index])
    return KVState(state.buffer, state.kinds, state.num_tokens, tuple(opaque_layers))


def test_a_forger_who_encodes_a_copy_is_believed(sample: Callable[..., Sample]) -> None:
    """So that the forgeries below are refused for what they change."""
    model, handle, state, _ = sample("zaya")
    blob = codec.encode(handle, altered(state, 1, lambda layer: None), model.spec)
    assert codec.decode(bytearray(blob), model.spec, model.opaque_layers).state.equals(state)


@pytest.mark.parametrize("name", WHOLE_FORGERIES)
def test_a_forged_opaque_layer_is_refused_at_once_and_without_a_memory_spike(
    name: str, sample: Callable[..., Sample]
) -> None:
    """Field cases 28 and 29 for layers of other kinds: their fields, names, shapes and dtypes are the model's."""
    model, handle, state, _ = sample("zaya")
    before = [None if layer is None else plain_of(layer) for layer in model.opaque_layers]
    blob = codec.encode(handle, altered(state, 1, WHOLE_FORGERIES[name]), model.spec)
    assert len(refused(blob, model)) > 20
    assert [None if layer is None else plain_of(layer) for layer in model.opaque_layers] == before


WHOLE_FILE_FORGERIES: dict[str, Callable[..., object]] = {
    "a tensor not in the table": lambda manifest, header, data: header.pop("layers.1.conv_states.0"),
    "a tensor not in the manifest": lambda manifest, header, data: manifest["layers"][1]["tensors"].pop("keys"),
    "a tensor more in the manifest": part_setting("extra", {"shape": [1], "sha256": ""}),
    "a tensor of null": part_setting("conv_states.0", None),
    "no fields": row_setting("plain", {}),
    "fields of null": row_setting("plain", None),
    "fields of a list": row_setting("plain", ["sliding_window"]),
    "a tensor among the fields": lambda manifest, header, data: manifest["layers"][1]["plain"].update(keys=1),
    "a field of 3 MB of name": lambda manifest, header, data: manifest["layers"][1]["plain"].update(
        {"x" * (3 << 20): 1}
    ),
    "fields of an attention layer": row_setting("kind", "full"),
    "an absurd growing dimension": shaping([1, 2, 1 << 60, 16]),
    "a growing dimension past any integer": shaping([1, 2, 1 << 70, 16]),
    "a growing dimension whose size wraps to the right one": shaping([1, 2, 19 + (1 << 64), 16]),
    "a negative growing dimension": shaping([1, 2, -19, 16]),
    "a growing dimension of text": shaping([1, 2, "19", 16]),
    "a growing dimension that is true": shaping([1, 2, True, 16]),
    "a growing dimension of a fraction": shaping([1, 2, 19.0, 16]),
}


@pytest.mark.parametrize("name", WHOLE_FILE_FORGERIES)
def test_a_forged_file_of_opaque_layers_is_refused_at_once_and_without_a_memory_spike(
    name: str, sample: Callable[..., Sample]
) -> None:
    model, _, _, blob = sample("zaya")
    assert len(refused(forge(blob, WHOLE_FILE_FORGERIES[name]), model)) > 20


def test_an_empty_tensor_of_an_absurd_shape_is_refused(sample: Callable[..., Sample]) -> None:
    """Zero bytes are the right size for any shape with a zero in it."""
    model, handle, state, _ = sample("zaya")
    rows = list(model.spec.layers)
    rows[1] = replace(rows[1], tensors=tuple(replace(each, shape=(-1,) * len(each.shape)) for each in rows[1].tensors))
    spec = replace(model.spec, layers=tuple(rows))
    own = KVHandle.root(spec.identity).extend("prompt", "reader", handle.tokens, [])
    blob = codec.encode(own, altered(state, 1, keys(lambda tensor: tensor[:, :, :0].contiguous())), spec)
    for shape in ([1, 1 << 40, 0, 1 << 40], [1, 1 << 70, 0, 16]):
        with pytest.raises(CodecError):
            codec.decode(bytearray(forge(blob, shaping(shape))), spec, model.opaque_layers)


def test_a_state_of_fewer_tokens_than_its_manifest_says_is_refused(sample: Callable[..., Sample]) -> None:
    """Its own layers know how many tokens they have, where they count them."""
    model, handle, state, _ = sample("falcon_h1")
    blob = codec.encode(handle, altered(state, 2, keys(lambda tensor: tensor[:, :, :50].contiguous())), model.spec)
    assert "50 tokens, expected 60" in refused(blob, model)


def damaged(blob: bytes, rng: random.Random) -> bytes:
    """One blob with one damage of a random kind."""
    kind = rng.choice(["flip", "flip", "flip", "flip_in_header", "cut", "longer", "hole", "length"])
    if kind == "flip":
        own, at = bytearray(blob), rng.randrange(len(blob))
        own[at] ^= 1 << rng.randrange(8)
        return bytes(own)
    if kind == "flip_in_header":
        own, at = bytearray(blob), rng.randrange(struct.unpack("<Q", blob[:8])[0] + 8)
        own[at] ^= 1 << rng.randrange(8)
        return bytes(own)
    if kind == "cut":
        return blob[: rng.choice([rng.randrange(len(blob)), rng.randrange(16), len(blob) - 1])]
    if kind == "longer":
        return blob + rng.randbytes(rng.randint(1, 100))
    if kind == "hole":
        at = rng.randrange(len(blob) - 64)
        return blob[:at] + blob[at + rng.randint(1, 64) :]
    return struct.pack("<Q", rng.choice([rng.getrandbits(64), len(blob), len(blob) - 7, 0, 1 << 40])) + blob[8:]


@pytest.mark.parametrize("kind", ["llama", "mistral", "zaya", "qwen3_next"])
def test_of_200_damaged_blobs_every_one_is_refused_and_the_untouched_one_still_answers(
    kind: str, sample: Callable[..., Sample]
) -> None:
    model, handle, state, blob = sample(kind)
    want = next_logits(model, state)
    rng = random.Random(7)
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(200):
        bad = damaged(blob, rng)
        header_length = struct.unpack("<Q", blob[:8])[0]
        if bad[8 + header_length :] == blob[8 + header_length :] and same_header(bad, blob):
            continue  # the flip changed only white space that pads the header
        with pytest.raises(CodecError):
            codec.decode(bytearray(bad), model.spec, model.opaque_layers)
    assert process.memory_info().rss - before < 64 << 20
    back = codec.decode(bytearray(blob), model.spec, model.opaque_layers)
    assert back.handle == handle
    assert torch.allclose(next_logits(model, back.state), want, atol=1e-5, rtol=0)


def same_header(bad: bytes, blob: bytes) -> bool:
    try:
        return parts(bad)[0] == parts(blob)[0]
    except (ValueError, struct.error):
        return False


def test_another_models_cache_is_refused_with_what_to_do(sample: Callable[..., Sample]) -> None:
    """Same config, other weights; and the same weights in another dtype."""
    model = sample("llama").model
    for other in (sample("llama", "float32", 60, 1), sample("llama", "bfloat16"), sample("gpt2"), sample("mistral")):
        text = refused(other.blob, model)
        assert other.model.spec.identity in text
        assert model.spec.identity in text
        assert "send text" in text


@pytest.mark.parametrize(
    "blob",
    [b"", b"1234567", bytes(8), bytes(100), struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2) + b"[]"]
    + [struct.pack("<Q", 4) + b"null", struct.pack("<Q", 2) + b"\xff\xff", struct.pack("<Q", 2**64 - 1) + b"{}"]
    + [assemble({"__metadata__": metadata}, b"") for metadata in (None, [], {}, {"manifest": 1, "manifest_sha256": 2})]
    + [struct.pack("<Q", 200_000) + b"[" * 200_000],
    ids=range(14),
)
def test_what_is_no_cache_at_all_is_refused(blob: bytes, sample: Callable[..., Sample]) -> None:
    refused(blob, sample("llama").model)


def test_a_model_file_is_no_cache(sample: Callable[..., Sample], tiny_folder: Callable[..., Path]) -> None:
    weights = (tiny_folder("llama") / "model.safetensors").read_bytes()
    assert "no manifest" in refused(weights, sample("llama").model)


class Trap:
    """Makes a file when it is un-pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_nothing_is_ever_un_pickled(sample: Callable[..., Sample], tmp_path: Path) -> None:
    model, _, _, blob = sample("llama")
    sprung = tmp_path / "sprung"
    pickled = pickle.dumps(Trap(sprung))
    torch.save({"x": Trap(sprung)}, tmp_path / "x.pt")
    _header, _data = parts(blob)
    tricks = [pickled, (tmp_path / "x.pt").read_bytes(), struct.pack("<Q", len(pickled)) + pickled, blob[:8] + pickled]
    tricks.append(forge(blob, handle_bomb("segments", pickled)))
    tricks.append(forge(blob, handle_bomb("tokens", pickled)))
    for trick in tricks:
        with pytest.raises(LatentError):
            codec.decode(bytearray(trick), model.spec)
    assert not sprung.exists()
    pickle.loads(pickled).close()
    assert sprung.exists()
