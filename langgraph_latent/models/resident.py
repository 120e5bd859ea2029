"""One Hugging Face model and its tokenizer, loaded once per process, and the calls that run it.

A `ResidentModel` prefills and decodes over `KVState`s. It knows nothing of who keeps them, of messages or of graphs.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from langgraph_latent.errors import ContextLengthError, HandleError, LatentError, ModelLoadError, UnsupportedLayerError
from langgraph_latent.handle import KVHandle
from langgraph_latent.kv.state import KVState, KVTail, layer_kinds, rows_cache
from langgraph_latent.models import compute
from langgraph_latent.models.answer import AnswerReaders
from langgraph_latent.models.attention import use_row_attention
from langgraph_latent.models.digest import weights_digest
from langgraph_latent.models.grammar import GrammarCompiler
from langgraph_latent.models.prompt import PromptWriter
from langgraph_latent.models.sampling import Sampler
from langgraph_latent.models.scheduler import MAX_ROWS, Lane, Row, Scheduler
from langgraph_latent.models.shapes import shape_of
from langgraph_latent.spec import LayerSpec, ModelSpec

PROBE_WINDOW = 256
"""Sliding windows up to this many tokens are filled by the probe."""
PROBE_TOLERANCE, NARROW_PROBE_TOLERANCE = 1e-3, 1e-1
"""Largest relative difference of logits that the probe accepts; the second for dtypes of two bytes and less."""
NO_IDENTITY = re.compile(
    r"_name_or_path|transformers_version|architectures|dtype|use_cache|.*_token_id|output_.*|return_dict|id2label|label2id"
    r"|_attn_implementation.*|initializer_range|quantization_config"
)
"""Config fields that do not shape what a model computes from tokens, or are in the identity by another name."""


class ModelKey(NamedTuple):
    """What two requests for one model agree on: folder or hub id, revision, dtype, device ("auto" where open)."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    def canonical(self) -> ModelKey:
        """The key with a folder's one true name, whatever path led to it."""
        folder = Path(self.name).expanduser()
        return self._replace(name=str(folder.resolve())) if self.name and folder.is_dir() else self


class ResidentModel:
    """A model in memory. One forward runs at a time; every method is safe in threads.

    Attributes:
        spec: the model's identity.
        kinds: its cache layers.
        prompts: renders messages for it.
        devices: where each cache layer lives.
        answers: reads what was sampled.
        scheduler: lets concurrent requests share model calls.
        end_tokens: token ids that end an answer.
        cache_argument: the name under which the installed forward takes a cache.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, weights: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.kinds = layer_kinds(model.config)
        self.prompts = PromptWriter(tokenizer, name)
        self._lock = threading.Lock()
        attention = str(model.config.get_text_config()._attn_implementation)
        has_rows = use_row_attention(model)
        self.end_tokens = _end_tokens(model, tokenizer)
        self.answers = AnswerReaders(tokenizer, self.end_tokens)
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        ids = self._probe_ids()
        probe = self._probe(ids, name)
        self.scheduler = Scheduler(self.forward, MAX_ROWS if has_rows and self._takes_rows(ids) else 1)
        self.devices = [keys.device for keys, _ in probe]
        self.spec = _spec_of(self, probe, name, weights, attention)

    def _probe_ids(self) -> list[int]:
        """Tokens for a probe, more than fit into a small sliding window."""
        windows = [kind.window for kind in self.kinds if 0 < kind.window <= PROBE_WINDOW]
        vocab_size = self.model.config.get_text_config().vocab_size
        return [index % vocab_size for index in range(3, 15 + max(windows, default=0))]

    def _probe(self, ids: list[int], name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a short run, per layer: real shapes, dtypes and devices.

        Raises `UnsupportedLayerError` where feeding tokens in parts does not give what feeding them at once gives: such
        a model is not causal, or its cache can't be appended to.
        """
        try:
            results = []
            for sizes in ((len(ids),), (5, 1, len(ids) - 6)):
                with self.empty_state().append(len(ids)) as tail:
                    begin = 0
                    for size in sizes:
                        (logits,) = self.forward([Row(ids[begin : begin + size], tail)])
                        begin += size
                    results.append(logits.float())
                    layers = tail.seal().layers()
            error = _difference(*results)
            whole = len(layers) == len(self.kinds) and all(keys.shape[0] == 1 for keys, _ in layers)
        except Exception as caught:  # whatever a model class does with a cache that it does not understand
            raise UnsupportedLayerError(
                f"{name!r} ({type(self.model).__name__}) does not run over a cache of full and sliding-window layers: "
                f"{type(caught).__name__}: {caught}. Use a text edge for this model."
            ) from caught
        if not whole or not error <= self._tolerance:
            raise UnsupportedLayerError(
                f"{name!r} ({type(self.model).__name__}) gives other logits when its tokens are fed in parts (relative "
                f"difference {error:.1e}): it is not causal, or its cache can't be appended to"
            )
        return layers

    def _takes_rows(self, ids: list[int]) -> bool:
        """Whether several sequences in one call give what they give alone; where not, they run one after another."""
        begun: tuple[tuple[list[int], list[int]], ...] = ((ids[:-1], ids[-1:]), (ids[:4], ids[4:7]), ([], ids[2:5]))
        try:
            alone, rows = [], []
            for before, new in begun:
                tail = self.empty_state().append(len(ids))
                if before:
                    self.forward([Row(before, tail)])
                alone.append(self.forward([Row(new, tail)]))
                tail.rewind(len(before))
                rows.append(Row(new, tail))
            return _difference(torch.cat(alone).float(), self.forward(rows).float()) <= self._tolerance
        except Exception:  # noqa: BLE001 - whatever a model class does with rows that it does not understand
            return False

    @property
    def _tolerance(self) -> float:
        return PROBE_TOLERANCE if self.model.dtype.itemsize > 2 else NARROW_PROBE_TOLERANCE

    @property
    def device(self) -> torch.device:
        return self.model.device

    def empty_state(self) -> KVState:
        return KVState.empty(self.kinds)

    def check_length(self, num_tokens: int) -> None:
        """Raise `ContextLengthError` where a sequence of `num_tokens` is longer than the model takes."""
        if self.spec.max_positions and num_tokens > self.spec.max_positions:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, but {self.spec.name!r} takes at most {self.spec.max_positions}; "
                "shorten the messages, inherit less, or use a model with a longer context"
            )

    def check_vocabulary(self, handle: KVHandle) -> None:
        """Raise `HandleError` where a handle holds a token id that the model does not have."""
        if handle.largest_token >= self.spec.vocab_size:
            raise HandleError(
                f"handle {handle.id} holds token id {handle.largest_token}, but {self.spec.name!r} has "
                f"{self.spec.vocab_size} tokens; the handle was not made for it"
            )

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes constraints for answers."""
        return GrammarCompiler(self.tokenizer, self.end_tokens, shape_of(*self.prompts.template.call_frame))

    def prefill(self, ids: Sequence[int], tail: KVTail, lane: Lane | None = None) -> torch.Tensor:
        """Feed `ids` behind a tail, in chunks; the logits after the last one, shape (vocab,).

        `lane` is that of the request this belongs to; without one it is a request of its own.

        Returns when the device is done, so that its time and its errors are this call's.
        Raises `ContextLengthError` before anything is computed where the sequence would be longer than the model takes.
        """
        self.check_length(tail.num_tokens + len(ids))
        begin = 0
        with self._in(lane) as lane:
            while begin < len(ids):
                end = begin + lane.chunk_tokens
                logits = lane.feed(ids[begin:end], tail)
                begin = end
        logits[0].item()
        return logits

    def decode(
        self, logits: torch.Tensor, tail: KVTail, sampler: Sampler, limit: int, lane: Lane | None = None
    ) -> Iterator[int]:
        """Sample up to `limit` tokens behind a tail; `logits` follow its last token. End tokens do not end it.

        The last token yielded is not in the cache: it is the pending one, fed by whoever goes on.
        """
        if self.spec.max_positions:
            limit = min(limit, self.spec.max_positions - tail.num_tokens)
        with self._in(lane) as lane:
            for remaining in range(limit, 0, -1):
                token = sampler.pick(logits)
                yield token
                if remaining > 1:
                    logits = lane.feed([token], tail)

    def _in(self, lane: Lane | None) -> AbstractContextManager[Lane]:
        return nullcontext(lane) if lane is not None else self.scheduler.lane()

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """One model call on the new tokens of several sequences; logits after the last of each, (rows, vocab)."""
        return self._forward_alone(*rows[0]) if len(rows) == 1 else self._forward_rows(rows)

    def _forward_alone(self, ids: Sequence[int], tail: KVTail) -> torch.Tensor:
        """With a mask over the whole length, as transformers itself runs one sequence."""
        mask = torch.ones((1, tail.num_tokens + len(ids)), dtype=torch.long, device=self.device)
        return self._run(tail.cache, ids, [len(ids) - 1], attention_mask=mask)

    def _forward_rows(self, rows: Sequence[Row]) -> torch.Tensor:
        """With the sequences side by side, each at its own positions; `row_attention` keeps them apart."""
        sizes = [len(row.ids) for row in rows]
        positions = [at for ids, tail in rows for at in range(tail.num_tokens, tail.num_tokens + len(ids))]
        return self._run(
            rows_cache([row.tail for row in rows], sizes),
            [token for row in rows for token in row.ids],
            [end - 1 for end in itertools.accumulate(sizes)],
            position_ids=torch.tensor([positions], device=self.device),
            attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device),  # 4-d: taken as it is
        )

    def _run(self, *call: Any, **arguments: Any) -> torch.Tensor:
        if self.device.type == "cpu":
            return compute.run(lambda: self._run_here(*call, **arguments))
        return self._run_here(*call, **arguments)

    @torch.no_grad()
    def _run_here(self, cache: Any, ids: Sequence[int], wanted: list[int], **arguments: Any) -> torch.Tensor:
        """Logits at the `wanted` indices of `ids`, (wanted, vocab)."""
        at = torch.tensor(wanted)  # on the CPU: it indexes a tensor of any device
        arguments[self.cache_argument] = cache
        if self._keeps_logits:
            arguments["logits_to_keep"] = at
        with self._lock:
            output = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=True, **arguments)
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[at]


_resident: dict[ModelKey, ResidentModel] = {}
_users: dict[ModelKey, int] = {}
_load_lock = threading.Lock()


def acquire(key: ModelKey) -> ResidentModel:
    """The one resident model for `key`, loaded on first use. Every call needs a `release`.

    Parallel callers wait for one load. Raises `ModelLoadError` for a name or folder that holds no usable model.
    """
    with _load_lock:
        if key not in _resident:
            _resident[key] = compute.run(lambda: _load(key))
        _users[key] = _users.get(key, 0) + 1
        return _resident[key]


def release(key: ModelKey) -> None:
    """Give a model back; its weights are freed with the last user."""
    with _load_lock:
        _users[key] -= 1
        if not _users[key]:
            del _users[key], _resident[key]


def num_resident() -> int:
    """How many models this process holds."""
    return len(_resident)


def _load(key: ModelKey) -> ResidentModel:
    folder = _folder_of(key)
    device = _default_device() if key.device == "auto" else key.device
    dtype = _default_dtype(device) if key.dtype == "auto" else key.dtype
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=device, use_safetensors=True, output_loading_info=True
        )
        model, report = loaded
        if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
            raise ModelLoadError(f"the weights in {key.name!r} lack {len(missing)} tensors, first {missing[0]!r}")
    except LatentError:
        raise
    except Exception as error:  # the one place where loading errors, of whatever kind, become ours
        raise ModelLoadError(f"{key.name!r} can't be loaded as a causal language model: {error}") from error
    return ResidentModel(model.eval(), tokenizer, key.name, weights_digest(folder))


def _folder_of(key: ModelKey) -> Path:
    """The local folder of a model: the name itself, or the snapshot of a hub id (fetched if the hub is reachable)."""
    folder = Path(key.name)
    if key.name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"the folder {key.name!r} holds no config.json; pass a folder made by save_pretrained()"
            )
        return folder
    if key.name.startswith((".", "/", "~")) or key.name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {key.name!r}; check the path, or pass a hub id (owner/name)")
    try:
        config = cached_file(key.name, "config.json", revision=key.revision)
    except Exception as error:
        raise ModelLoadError(
            f"{key.name!r} is neither a local folder nor a model on the hub or in its cache. Check the spelling, pass "
            f"a folder, or download it first with `hf download`. ({error})"
        ) from error
    return Path(str(config)).parent


def _default_device() -> str:
    if torch.cuda.is_available():
        return "auto" if torch.cuda.device_count() > 1 else "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _default_dtype(device: str) -> str:
    """The checkpoint's own dtype on an accelerator; float32 on a CPU, where narrower types are slower."""
    return "float32" if device == "cpu" else "auto"


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((expected - actual).abs().max() / expected.abs().max().clamp(min=1e-6))


def _config_digest(config: PreTrainedConfig) -> str:
    fields = {name: value for name, value in config.to_dict().items() if not NO_IDENTITY.fullmatch(name)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _max_positions(config: PreTrainedConfig, rope: dict[str, Any]) -> int:
    """The longest sequence over which a cache stays valid; 0 where the model names none.

    With longrope, keys written below the original maximum are wrong above it: the frequencies change there.
    """
    longest = int(getattr(config, "max_position_embeddings", 0) or 0)
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0)
    return min(longest, int(original)) if rope.get("rope_type") == "longrope" and original else longest


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return frozenset(token for token in ends if token is not None)


def _spec_of(
    resident: ResidentModel, pairs: list[tuple[torch.Tensor, torch.Tensor]], name: str, weights: str, attention: str
) -> ModelSpec:
    """Read the identity off a loaded model; `pairs` are the keys and values of a short run, per layer."""
    config = resident.model.config.get_text_config()
    layers = tuple(
        LayerSpec(kind.name, kind.window, keys.shape[1], keys.shape[-1], values.shape[-1])
        for kind, (keys, values) in zip(resident.kinds, pairs, strict=True)
    )
    rope = getattr(config, "rope_parameters", None)
    tokenizer = resident.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    quantization = getattr(resident.model.config, "quantization_config", None)
    return ModelSpec(
        name=name,
        architecture=type(resident.model).__name__,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=layers,
        rope=json.dumps(rope, sort_keys=True, default=str) if rope else "",
        config=_config_digest(config),
        weights=weights,
        tokenizer=hashlib.sha256(words.encode()).hexdigest(),
        template=hashlib.sha256(str(tokenizer.chat_template or "").encode()).hexdigest(),
        adapters=(),
        dtype=str(pairs[0][0].dtype).removeprefix("torch."),
        quantization=str(getattr(quantization, "quant_method", "")) if quantization else "",
        attention=attention,
        max_positions=_max_positions(config, rope or {}),
        bytes_per_token=sum(keys[0, :, 0].nbytes + values[0, :, 0].nbytes for keys, values in pairs),
    )
