"""A model is loaded once, known by its weights and not by its folder, freed with its last user, never un-pickled."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.engine import loader, scheduler
from langgraph_latent.engine.loader import ModelKey, acquire, num_resident, release
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, ContextLengthError, LatentError, ModelLoadError
from langgraph_latent.events import Loaded
from langgraph_latent.spec import digest
from langgraph_latent.spec.compat import Level, compare
from langgraph_latent.spec.digest import weights_digest


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Digests are remembered in a folder of this test's own."""
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "memory"))
    return tmp_path / "memory"


@pytest.fixture
def lease() -> Iterator[Callable[..., ResidentModel]]:
    """`lease(folder, dtype=...)`: a resident model, given back at the end."""
    keys: list[ModelKey] = []

    def take(folder: Path, **options: Any) -> ResidentModel:
        key = ModelKey(str(folder), **options)
        model = acquire(key)
        keys.append(key)
        return model

    yield take
    for key in keys:
        release(key)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def in_threads(number: int, work: Callable[[], object]) -> list[object]:
    """Results of `work`, begun at once in so many threads; an error is a result too."""
    gate, results = threading.Barrier(number), []

    def run() -> None:
        gate.wait()
        try:
            results.append(work())
        except LatentError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# -- once, and not for ever ------------------------------------------------------------------------------------------


def test_eight_threads_that_need_a_model_at_once_get_one(tiny_folder: Callable[..., Path]) -> None:
    """Field case 14, and transformers' loading is not thread-safe."""
    key, before = ModelKey(str(tiny_folder("llama", seed=40))), num_resident()
    models = in_threads(8, lambda: acquire(key))
    assert len(models) == 8
    assert len({id(model) for model in models}) == 1
    assert isinstance(models[0], ResidentModel)
    assert num_resident() == before + 1
    for _ in range(7):
        release(key)
    assert num_resident() == before + 1
    release(key)
    assert num_resident() == before


def test_eight_chat_models_used_at_once_load_once(tiny_folder: Callable[..., Path]) -> None:
    folder = str(tiny_folder("llama", seed=40))
    with LatentWorkspace(memory="64MiB") as ws, LatentWorkspace(memory="64MiB") as other:
        chats = [ChatLatent(model=folder, workspace=ws if n % 2 else other, max_tokens=4) for n in range(8)]
        todo = list(chats)
        answers = in_threads(8, lambda: todo.pop().invoke("the team").text)
        assert len(set(answers)) == 1
        for workspace in (ws, other):
            assert sum(isinstance(event, Loaded) for event in workspace.tracer.events) == 1
        assert len({id(chat.resident()) for chat in chats}) == 1
        assert num_resident() >= 1


def test_weights_are_freed_with_the_last_user(tiny_folder: Callable[..., Path]) -> None:
    """Field case 14: closing gives memory back; a handle or a workspace that is still there holds no weights."""
    folder, before = str(tiny_folder("llama", seed=41)), num_resident()
    ws, other = LatentWorkspace(memory="64MiB"), LatentWorkspace(memory="64MiB")
    first, second, third = (ChatLatent(model=folder, workspace=one).load() for one in (ws, ws, other))
    alive = weakref.ref(first.resident().model)
    handle = first.read("the team")
    first.close()
    second.close()
    gc.collect()
    assert alive() is not None
    assert id(third.resident().model) == id(alive())
    third.close()
    gc.collect()
    assert alive() is None
    assert num_resident() == before
    assert handle.num_tokens > 0
    ws.close()
    other.close()


def test_closing_a_workspace_frees_its_models_once(tiny_folder: Callable[..., Path]) -> None:
    folder, before = str(tiny_folder("llama", seed=41)), num_resident()
    ws = LatentWorkspace(memory="64MiB")
    chats = [ChatLatent(model=folder, workspace=ws).load() for _ in range(3)]
    alive = weakref.ref(chats[0].resident().model)
    ws.close()
    gc.collect()
    assert alive() is None
    assert num_resident() == before
    for chat in chats:
        chat.close()
    ws.close()
    assert num_resident() == before


def test_a_model_is_loaded_again_after_it_was_freed(tiny_folder: Callable[..., Path]) -> None:
    key = ModelKey(str(tiny_folder("llama", seed=41)))
    first = acquire(key).spec
    release(key)
    again = acquire(key).spec
    release(key)
    assert again == first


@pytest.mark.parametrize("spelling", ["relative", "slash", "dots"])
def test_a_folder_is_one_model_however_it_is_spelled(
    spelling: str, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama", seed=41)
    monkeypatch.chdir(folder.parent)
    names = {"relative": folder.name, "slash": f"{folder}/", "dots": f"{folder}/../{folder.name}"}
    with LatentWorkspace(memory="64MiB") as ws:
        one = ChatLatent(model=str(folder), workspace=ws).load()
        two = ChatLatent(model=names[spelling], workspace=ws).load()
        assert id(two.resident().model) == id(one.resident().model)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "torch.float32"},
        {"dtype": torch.float32},
        {"dtype": "float"},
        {"device": "cpu"},
        {"device": torch.device("cpu")},
        {"revision": "main"},
        {"dtype": "float32", "device": "cpu"},
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="where auto is the CPU")
def test_weights_are_one_however_the_options_are_spelled(
    options: dict[str, Any], tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    folder = str(tiny_folder("llama", seed=41))
    one, two = ChatLatent(model=folder, workspace=ws), ChatLatent(model=folder, workspace=ws, **options)
    assert two.resident() is one.resident()


def test_another_dtype_is_another_model(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    folder = str(tiny_folder("llama", seed=41))
    one, two = ChatLatent(model=folder, workspace=ws), ChatLatent(model=folder, workspace=ws, dtype="bfloat16")
    assert two.spec.dtype == "bfloat16"
    assert two.resident() is not one.resident()
    assert torch.get_default_dtype() is torch.float32


def test_a_workspace_that_is_garbage_collected_gives_its_models_back(tiny_folder: Callable[..., Path]) -> None:
    folder, before = str(tiny_folder("llama", seed=41)), num_resident()
    for _ in range(3):
        ChatLatent(model=folder, workspace=LatentWorkspace(memory="64MiB")).invoke("x", max_tokens=1)
    gc.collect()
    assert num_resident() == before


def test_models_that_are_given_back_while_the_books_are_locked_are_given_back_later(
    tiny_folder: Callable[..., Path],
) -> None:
    """A workspace can be garbage-collected within any line of this very thread."""
    key, before = ModelKey(str(tiny_folder("llama", seed=41))), num_resident()
    acquire(key)
    with loader._residents.lock:
        release(key)
    assert num_resident() == before


def test_requests_go_on_while_another_model_is_loaded(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    digests, chat = loader.digests, ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=3).load()
    other = ChatLatent(model=str(tiny_folder("llama", seed=42)), workspace=ws, max_tokens=3)
    same = ChatLatent(model=chat.model, workspace=ws, max_tokens=3)

    def held(folder: Path) -> Any:
        begun.set()
        assert go.wait(60)
        return digests(folder)

    monkeypatch.setattr(loader, "digests", held)
    thread = threading.Thread(target=other.load)
    thread.start()
    try:
        assert begun.wait(60)
        assert chat.invoke("the team", timeout=60).text == same.invoke("the team", timeout=60).text
        chat.close()
    finally:
        go.set()
        thread.join(60)
    assert other.invoke("the team").text


def test_a_model_call_can_not_load_another_model(tiny_folder: Callable[..., Path], tiny_chat: ChatLatent) -> None:
    other = ChatLatent(model=str(tiny_folder("llama", seed=43)), workspace=tiny_chat.workspace)
    hook = tiny_chat.resident().model.model.layers[0].register_forward_pre_hook(lambda *_: other.load() and None)
    try:
        with pytest.raises(ConfigError, match="from within a model call"):
            tiny_chat.invoke("the team")
    finally:
        hook.remove()


def test_a_failed_load_leaves_nothing_and_can_be_tried_again(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder, before = tmp_path / "late", num_resident()
    results = in_threads(4, lambda: acquire(ModelKey(str(folder))))
    assert [type(result) for result in results] == [ModelLoadError] * 4
    assert num_resident() == before
    copied(tiny_folder("llama"), folder)
    assert isinstance(acquire(ModelKey(str(folder))), ResidentModel)
    release(ModelKey(str(folder)))
    assert num_resident() == before


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no/such-model", "no-such-folder", "/no/such/folder", "", "a b c", "../x"])
def test_an_unknown_name_is_refused_with_what_to_do(name: str) -> None:
    """Field cases 10 and 11: without the network, and without a request for a token."""
    with pytest.raises(ModelLoadError) as caught:
        acquire(ModelKey(name))
    assert repr(name) in str(caught.value)
    assert "folder" in str(caught.value)


def test_a_local_folder_needs_no_network_at_all(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, lease: Callable[..., ResidentModel]
) -> None:
    """Field cases 10, 11 and 12: sockets are blocked, and the folder has no chat_template.jinja."""

    def blocked(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert lease(tiny_folder("gpt2", seed=42)).spec.architecture == "GPT2LMHeadModel"


class Trap:
    """Makes a file when it is un-pickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_are_refused_and_not_opened(
    file: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(tiny_folder("llama"), tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(str(tmp_path / "sprung"))}, folder / file)
    if "-" in file:
        index = {"metadata": {}, "weight_map": {"model.norm.weight": file}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="safetensors"):
        acquire(ModelKey(str(folder)))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("damage", ["no config", "no tokenizer", "cut weights", "empty weights", "config is no JSON"])
def test_a_damaged_folder_is_a_typed_error_that_names_it(
    damage: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(tiny_folder("llama"), tmp_path / "damaged")
    weights = folder / "model.safetensors"
    match damage:
        case "no config":
            (folder / "config.json").unlink()
        case "no tokenizer":
            for path in folder.glob("tokenizer*"):
                path.unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "empty weights":
            weights.write_bytes(b"")
        case "config is no JSON":
            (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="damaged"):
        acquire(ModelKey(str(folder)))


def test_weights_that_miss_a_tensor_are_refused_and_not_made_up(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers fills what is missing with random numbers: two loads would then be two models."""
    folder = copied(tiny_folder("llama"), tmp_path / "missing")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="k_proj"):
        acquire(ModelKey(str(folder)))


# -- identity --------------------------------------------------------------------------------------------------------


def test_the_same_weights_elsewhere_are_the_same_model(
    tiny_folder: Callable[..., Path], tmp_path: Path, lease: Callable[..., ResidentModel]
) -> None:
    folder = tiny_folder("llama")
    one, two = lease(folder), lease(copied(folder, tmp_path / "elsewhere"))
    assert one is not two
    assert one.spec.identity == two.spec.identity
    assert one.spec.name != two.spec.name
    assert compare(one.spec, two.spec).level is Level.EXACT


def test_the_same_weights_in_other_shards_are_the_same_model(
    tiny_folder: Callable[..., Path], tmp_path: Path, lease: Callable[..., ResidentModel]
) -> None:
    folder = tiny_folder("llama")
    sharded = copied(folder, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert weights_digest(sharded) == weights_digest(folder)
    assert lease(sharded).spec.identity == lease(folder).spec.identity


def test_other_weights_in_an_equal_config_are_another_model(
    tiny_folder: Callable[..., Path], tmp_path: Path, lease: Callable[..., ResidentModel]
) -> None:
    """A fine-tune, even of a single number, must not take another's cache."""
    folder = tiny_folder("llama")
    tuned = copied(folder, tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    one, two = lease(folder).spec, lease(tuned).spec
    assert one.identity != two.identity
    assert [difference.field for difference in compare(one, two).differences] == ["weights"]
    assert compare(one, two).level is Level.SIBLING


def test_two_tensors_that_changed_places_are_another_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    turned = copied(folder, tmp_path / "turned")
    tensors = load_file(turned / "model.safetensors")
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_file(tensors, turned / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(turned) != weights_digest(folder)


def test_the_same_bytes_in_another_shape_or_dtype_are_another_model(tmp_path: Path) -> None:
    numbers = torch.arange(8, dtype=torch.float32)
    digests = set()
    for name, tensor in {"flat": numbers, "square": numbers.view(2, 4), "whole": numbers.view(torch.int32)}.items():
        (tmp_path / name).mkdir()
        save_file({"w": tensor.clone()}, tmp_path / name / "model.safetensors")
        digests.add(weights_digest(tmp_path / name))
    assert len(digests) == 3


def test_what_else_changes_a_cache_changes_the_identity(
    tiny_folder: Callable[..., Path], tmp_path: Path, lease: Callable[..., ResidentModel]
) -> None:
    folder = tiny_folder("llama")
    base = lease(folder).spec
    templated = copied(folder, tmp_path / "templated")
    (templated / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    stretched = copied(folder, tmp_path / "stretched")
    config = json.loads((stretched / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 500.0}
    (stretched / "config.json").write_text(json.dumps(config))
    others = {
        "template": lease(templated).spec,
        "rope": lease(stretched).spec,
        "dtype": lease(folder, dtype="bfloat16").spec,
    }
    for field, spec in others.items():
        assert spec.identity != base.identity
        assert field in [difference.field for difference in compare(base, spec).differences]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gpt2"])
def test_a_spec_says_what_the_cache_really_is(
    kind: str, tiny_folder: Callable[..., Path], lease: Callable[..., ResidentModel]
) -> None:
    model = lease(tiny_folder(kind))
    spec = model.spec
    with model.empty_state().append() as tail:
        model.prefill([5, 6, 7], tail)
        state = tail.seal()
    assert len(spec.layers) == len(state.layers()) == 3
    for layer, kind_of, (keys, values) in zip(spec.layers, model.kinds, state.layers(), strict=True):
        assert keys.shape == (1, layer.kv_heads, 3, layer.key_dim)
        assert values.shape == (1, layer.kv_heads, 3, layer.value_dim)
        assert (layer.kind, layer.window) == (kind_of.name, kind_of.window)
    assert spec.bytes_per_token * 3 == state.nbytes
    assert spec.dtype == "float32"
    assert spec.max_positions == 2048
    assert spec.hidden_size == 32
    assert len(spec.identity) == 32


# -- digests are remembered ------------------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is really read for a digest."""
    files: list[Path] = []
    real = digest._tensor_digests

    def counting(file: Path) -> list[tuple[str, str]]:
        files.append(file)
        return real(file)

    monkeypatch.setattr(digest, "_tensor_digests", counting)
    return files


def test_a_digest_is_computed_once_per_set_of_files(
    tiny_folder: Callable[..., Path], tmp_path: Path, hashed: list[Path]
) -> None:
    folder = copied(tiny_folder("llama"), tmp_path / "own")
    key = ModelKey(str(folder))
    first = acquire(key).spec.weights
    release(key)
    assert len(hashed) == 1
    again = acquire(key).spec.weights
    release(key)
    assert again == first
    assert len(hashed) == 1


def test_changed_files_are_read_again(tiny_folder: Callable[..., Path], tmp_path: Path, hashed: list[Path]) -> None:
    folder = copied(tiny_folder("llama"), tmp_path / "own")
    before = weights_digest(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(folder) != before
    assert len(hashed) == 2
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weights_digest(folder)
    assert len(hashed) == 4


@pytest.mark.parametrize("how", ["in place", "put in its place"])
def test_weights_of_equal_size_and_time_stamp_are_read_again(
    how: str, tiny_folder: Callable[..., Path], tmp_path: Path, hashed: list[Path]
) -> None:
    """`cp -p`, and layers of images with fixed times: size and modification time are those of the weights before."""
    folder = copied(tiny_folder("llama"), tmp_path / "own")
    file, other = folder / "model.safetensors", tiny_folder("llama", seed=44) / "model.safetensors"
    before, stat = weights_digest(folder), file.stat()
    if how == "in place":
        file.write_bytes(other.read_bytes())
    else:
        (folder / "new").write_bytes(other.read_bytes())
        (folder / "new").replace(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert weights_digest(folder) == weights_digest(other.parent) != before


def test_a_file_that_differs_in_its_bytes_alone_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a file system keeps no time of a change: a sample of the bytes tells them apart."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    stat = file.stat()
    before = digest._file_identity(file)
    file.write_bytes(random.Random(1).randbytes(1 << 20))
    monkeypatch.setattr(Path, "stat", lambda self, **_: stat)
    assert digest._file_identity(file) != before


@pytest.mark.parametrize("memory", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": 1}'])
def test_a_damaged_file_of_digests_is_made_again(
    memory: bytes, tiny_folder: Callable[..., Path], own_memory: Path, hashed: list[Path]
) -> None:
    folder = tiny_folder("llama")
    want = weights_digest(folder)
    (own_memory / digest.MEMORY_FILE).write_bytes(memory)
    assert weights_digest(folder) == want
    assert len(hashed) == 2
    assert weights_digest(folder) == want
    assert len(hashed) == 2


def test_without_a_cache_directory_the_digest_is_just_computed(
    tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[Path]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "file" / "below"))
    folder = tiny_folder("llama")
    assert weights_digest(folder) == weights_digest(folder)
    assert len(hashed) == 2


def test_a_folder_without_safetensors_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="never un-pickled"):
        weights_digest(tmp_path)


# -- running it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 23, 24, 25, 100])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_prefill_in_chunks_is_prefill_in_one_pass(
    kind: str,
    chunk: int,
    tiny_folder: Callable[..., Path],
    lease: Callable[..., ResidentModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Level 0: whatever the chunks, window or not."""
    model = lease(tiny_folder(kind))
    ids = torch.randint(3, 300, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        whole = model.model(torch.tensor([ids])).logits[0, -1]
    monkeypatch.setattr(scheduler, "ALONE_CHUNK_TOKENS", chunk)
    with model.empty_state().append(len(ids)) as tail:
        logits = model.prefill(ids, tail)
        state = tail.seal()
    assert state.num_tokens == 100
    assert torch.allclose(logits, whole, atol=1e-4, rtol=0)


def test_a_sequence_longer_than_the_model_takes_is_refused_before_anything_is_computed(
    tiny_folder: Callable[..., Path], lease: Callable[..., ResidentModel]
) -> None:
    model = lease(tiny_folder("llama", max_position_embeddings=64))
    with model.empty_state().append() as tail:
        with pytest.raises(ContextLengthError, match=r"65 tokens.*at most 64.*shorten"):
            model.prefill([5] * 65, tail)
        assert tail.num_tokens == 0
        model.prefill([5] * 60, tail)
        with pytest.raises(ContextLengthError, match="65"):
            model.prefill([5] * 5, tail)
        assert tail.num_tokens == 60
        model.prefill([5] * 4, tail)
        assert tail.seal().num_tokens == 64


def test_forwards_of_many_threads_on_one_model_do_not_mix(
    tiny_folder: Callable[..., Path], lease: Callable[..., ResidentModel]
) -> None:
    """Field case 55: parallel nodes on one model wait for one another and get their own logits."""
    model = lease(tiny_folder("llama"))
    with model.empty_state().append() as tail:
        model.prefill(list(range(5, 45)), tail)
        base = tail.seal()

    def answer(number: int) -> torch.Tensor:
        with base.append() as own:
            return model.prefill([number, number + 1], own)

    want = {number: answer(number) for number in range(50, 58)}
    todo = list(want) * 4
    found: list[tuple[int, torch.Tensor]] = []

    def work() -> None:
        while True:
            try:
                number = todo.pop()
            except IndexError:
                return
            found.append((number, answer(number)))

    in_threads(8, work)
    assert len(found) == 32
    assert all(torch.allclose(logits, want[number], atol=1e-4, rtol=0) for number, logits in found)


def test_logits_and_states_carry_no_gradient(
    tiny_folder: Callable[..., Path], lease: Callable[..., ResidentModel]
) -> None:
    """Field case 40, with gradients switched on by whoever calls."""
    model = lease(tiny_folder("llama"))
    with torch.enable_grad(), model.empty_state().append() as tail:
        logits = model.prefill([5, 6], tail)
        state = tail.seal()
    assert not logits.requires_grad
    assert not any(tensor.requires_grad for pair in state.layers() for tensor in pair)
    assert not model.model.training
