"""`ChatLatent`: a LangChain chat model over a resident model. The only module that translates LangChain's messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from transformers import StoppingCriteriaList

from langgraph_latent.errors import ClosedError, ConfigError, PromptError
from langgraph_latent.events import Origin
from langgraph_latent.handle import TOKEN_BYTES, KVHandle, Message
from langgraph_latent.models.resident import ModelKey, ResidentModel
from langgraph_latent.models.sampling import Sampling
from langgraph_latent.spec import ModelSpec
from langgraph_latent.turn import Turn
from langgraph_latent.workspace import LatentWorkspace, Request

Inherited = KVHandle | AIMessage | Sequence[KVHandle | AIMessage] | None
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "seed", "max_tokens")
CALL_OPTIONS = ("inherit", "logits_processor", "stopping_criteria", "streamer", "cancelled", *SAMPLING_OPTIONS)


class ChatLatent(BaseChatModel):
    """A local Hugging Face model as a chat model whose answers come with a handle of their KV cache.

    Weights load on first use, once per process. Prompts reuse the longest prefix that the workspace still holds, with
    the same output. Beyond the usual methods, `read` prefills without answering, and `inherit=` (of `invoke`, `stream`,
    `read`, ...) continues one or several handles, or replies that have one.

    Args:
        model: hub id, or a folder made by `save_pretrained`.
        workspace: where caches live; the process's default workspace when None.
        temperature: 0 is greedy.
        top_p, top_k, seed, max_tokens, stop: as usual; each can be given per call too.
        reuse: False prefills every prompt from its first token; for comparisons.
        revision, dtype, device: passed to transformers; "auto" takes the accelerator where there is one (the
            checkpoint's own dtype), else the CPU (float32).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())

    model: str
    workspace: LatentWorkspace | None = Field(default=None, exclude=True, repr=False)
    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] | None = None
    reuse: bool = True
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    _owner: LatentWorkspace | None = PrivateAttr(default=None)
    _load_lock: Any = PrivateAttr(default_factory=threading.Lock)
    _used_key: ModelKey | None = PrivateAttr(default=None)
    _is_closed: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _known_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            if unknown := sorted(set(values) - set(cls.model_fields)):
                known = ", ".join(sorted(cls.model_fields))
                raise ConfigError(f"ChatLatent has no option {unknown[0]!r}; known options: {known}")
            if isinstance(values.get("model"), Path):
                values["model"] = str(values["model"])
        return values

    @model_validator(mode="after")
    def _possible_options(self) -> ChatLatent:
        self._sampling({}, None)
        return self

    def __copy__(self) -> ChatLatent:
        """Another chat model on the same workspace, which loads and closes for itself."""
        copied = super().__copy__()
        copied._owner, copied._used_key, copied._is_closed = None, None, False
        copied._load_lock = threading.Lock()
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ChatLatent:
        return self.__copy__()

    # -- life -----------------------------------------------------------------------------------------------------

    def load(self) -> ChatLatent:
        """Make the model resident now and not on first use. Raises `ModelLoadError`."""
        self.resident()
        return self

    def close(self) -> None:
        """Give the model back; its weights are freed with the last user. Later calls raise `ClosedError`."""
        with self._load_lock:
            self._is_closed = True
            if self._owner is not None:
                self._owner.leave_model(self._key)
                self._owner = None

    def resident(self) -> ResidentModel:
        """The model in memory, shared by the process; loads it if need be."""
        return self._loaded_workspace().model(self._key)

    @property
    def spec(self) -> ModelSpec:
        """The model's identity; loads it if need be."""
        return self.resident().spec

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; loads it if need be."""
        return self.resident().tokenizer

    # -- handles --------------------------------------------------------------------------------------------------

    def read(
        self, messages: LanguageModelInput, *, inherit: Inherited = None, config: RunnableConfig | None = None
    ) -> KVHandle:
        """Prefill messages, behind what is inherited, without answering; the handle of it all.

        Raises `PromptError` (empty, refused by the template, too long), `HandleError`, `CacheBudgetError`.
        """
        request = self._request(self._convert_input(messages).to_messages(), inherit, _origin(config), reply=False)
        return Turn(self._loaded_workspace(), self.resident(), request).read()

    async def aread(
        self, messages: LanguageModelInput, *, inherit: Inherited = None, config: RunnableConfig | None = None
    ) -> KVHandle:
        """`read` in a thread."""
        return await asyncio.to_thread(self.read, messages, inherit=inherit, config=config)

    def handle(self, reply: AIMessage) -> KVHandle:
        """The handle of everything up to and with a reply; `LatentWorkspace.handle`."""
        return self._loaded_workspace().handle(reply)

    def export_kv_cache(self, handle: KVHandle, path: str | Path | None = None) -> bytes | None:
        """Write a handle and its tensors to one self-describing file, or return the bytes when `path` is None.

        Tensors that are gone are rebuilt first. Raises `HandleError` (`ModelMismatchError` for another model's).
        """
        return self._loaded_workspace().export(handle, self.resident(), path)

    def ingest_kv_cache(self, source: str | Path | bytes) -> KVHandle:
        """Take an exported file or byte string into the workspace, after verifying every part of it.

        Raises `CodecError` for anything damaged, altered or made by another model; then nothing of it was used.
        """
        return self._loaded_workspace().ingest(source, self.resident(), _origin(None))

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own token ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Any = None) -> int:
        """Number of tokens of messages as the model's own template renders them."""
        plain = [plain_message(message) for message in messages]
        return len(self.resident().prompts.write(plain, reply=False).tokens) // TOKEN_BYTES

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("ChatLatent does not call tools yet; use it in nodes that answer in text")

    # -- LangChain's contract -------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "langgraph-latent"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, "revision": self.revision, "dtype": self.dtype, "reuse": self.reuse} | {
            name: getattr(self, name) for name in (*SAMPLING_OPTIONS, "stop")
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn, pieces = self._answer(messages, stop, kwargs)
        for _ in pieces:
            pass
        message = AIMessage(turn.text, usage_metadata=_usage(turn), response_metadata=self._metadata(turn))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        turn, pieces = self._answer(messages, stop, kwargs)
        for piece in pieces:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        last = AIMessageChunk(
            content="", usage_metadata=_usage(turn), response_metadata=self._metadata(turn), chunk_position="last"
        )
        yield ChatGenerationChunk(message=last)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(self._generate, messages, stop, None, cancelled=cancelled, **kwargs)
        finally:
            cancelled.set()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        cancelled = threading.Event()
        chunks = self._stream(messages, stop, None, cancelled=cancelled, **kwargs)
        step: asyncio.Future[ChatGenerationChunk | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, chunks, None))
                chunk = await asyncio.shield(step)
                if chunk is None:
                    return
                if run_manager:
                    await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk
        finally:
            cancelled.set()
            if step is not None and not step.done():
                await asyncio.wait([step])  # a generator that runs in a thread can't be closed from here
            chunks.close()  # type: ignore[attr-defined]

    # -- one request ----------------------------------------------------------------------------------------------

    def _answer(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> tuple[Turn, Iterator[str]]:
        """A turn, and the pieces of its answer as they come."""
        self._check_names(options)
        sampling = self._sampling(options, stop)
        workspace = self._loaded_workspace()
        request = self._request(messages, options.get("inherit"), _origin(None), reply=True)
        turn = Turn(workspace, workspace.model(self._key), request)
        criteria = options.get("stopping_criteria")
        return turn, turn.decode(
            sampling,
            processors=options.get("logits_processor") or (),
            criteria=StoppingCriteriaList(criteria) if criteria else None,
            streamer=options.get("streamer"),
            cancelled=options.get("cancelled"),
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a per-call option that does not exist or has an impossible value."""
        self._check_names(options)
        self._sampling(options, options.get("stop"))

    def _check_names(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - {*CALL_OPTIONS, "stop"}):
            raise ConfigError(f"ChatLatent takes no call option {unknown[0]!r}; known: {', '.join(CALL_OPTIONS)}, stop")

    def _sampling(self, options: Mapping[str, Any], stop: str | list[str] | None) -> Sampling:
        chosen = {name: options.get(name, getattr(self, name)) for name in SAMPLING_OPTIONS}
        stops = stop if stop is not None else self.stop
        return Sampling(stop=(stops,) if isinstance(stops, str) else tuple(stops or ()), **chosen)

    def _request(self, messages: Sequence[BaseMessage], inherit: Inherited, origin: Origin, *, reply: bool) -> Request:
        plain = [plain_message(message) for message in messages]
        if not any(str(message["content"]).strip() or message.get("tool_calls") for message in plain):
            raise PromptError("the prompt is empty: pass at least one message with some text")
        inherited = inherit if isinstance(inherit, list | tuple) else () if inherit is None else (inherit,)
        handles = [self.handle(each) if isinstance(each, AIMessage) else each for each in inherited]
        return Request(plain, handles, reply, self.reuse, origin)

    def _metadata(self, turn: Turn) -> dict[str, Any]:
        return {
            "model_name": self.model,
            "model_provider": "langgraph-latent",
            "finish_reason": turn.finish_reason,
            "kv_handle": turn.handle.id,
            "kv_route": turn.decision.to_dict(),
        }

    @property
    def _key(self) -> ModelKey:
        """The model's key, settled on first use: the working directory may change later."""
        if self._used_key is None:
            self._used_key = ModelKey(self.model, self.revision, self.dtype, self.device).canonical()
        return self._used_key

    def _loaded_workspace(self) -> LatentWorkspace:
        """The workspace, in which this chat model is a user of its model."""
        with self._load_lock:
            if self._is_closed:
                raise ClosedError("this ChatLatent was closed; make a new one")
            if self._owner is None:
                workspace = self.workspace or LatentWorkspace.default()
                workspace.use_model(self._key)
                self._owner = workspace
            return self._owner


def plain_message(message: BaseMessage) -> Message:
    """A LangChain message as plain data for a chat template. Raises `PromptError` for content that is not text."""
    roles = {
        HumanMessage: "user",
        SystemMessage: "system",
        AIMessage: "assistant",
        ToolMessage: "tool",
        FunctionMessage: "tool",
    }
    if isinstance(message, ChatMessage):
        role = message.role
    else:
        known = [name for kind, name in roles.items() if isinstance(message, kind)]
        if not known:
            raise PromptError(f"a {type(message).__name__} can't be part of a prompt")
        role = known[0]
    plain: Message = {"role": role, "content": _text_of(message)}
    if message.name:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    return plain


def _text_of(message: BaseMessage) -> str:
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = []
    for block in blocks:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind != "text":
            raise PromptError(f"a message holds a block of type {kind!r}; this model reads text only")
        texts.append(block if isinstance(block, str) else str(block.get("text", "")))
    return "".join(texts)


def _usage(turn: Turn) -> UsageMetadata:
    read, written = turn.num_prompt_tokens, len(turn.sampled)
    return UsageMetadata(
        input_tokens=read,
        output_tokens=written,
        total_tokens=read + written,
        input_token_details={"cache_read": turn.cache_read},
        output_token_details={},
    )


def _origin(config: RunnableConfig | None) -> Origin:
    """Where in a graph this call happens, from the metadata that LangGraph puts into a run's config."""
    config = ensure_config(config)
    metadata = config.get("metadata") or {}
    run_id = config.get("run_id") or getattr(config.get("callbacks"), "parent_run_id", None)
    thread_id = metadata.get("thread_id") or (config.get("configurable") or {}).get("thread_id")
    return Origin(str(metadata.get("langgraph_node") or ""), str(thread_id or ""), str(run_id or ""))
