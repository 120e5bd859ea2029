"""`ChatLatent`: a LangChain chat model over a resident model: options, tools, structured output, streaming."""

from __future__ import annotations

import difflib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.chat_models import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, SystemMessage
from langchain_core.messages.ai import OutputTokenDetails, UsageMetadata
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from transformers import StoppingCriteriaList

from langgraph_latent.engine.loader import ModelKey
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.sampling import Sampling
from langgraph_latent.engine.scheduler import MAX_BATCH, Limits
from langgraph_latent.errors import (
    ClosedError,
    ConfigError,
    ModelMismatchError,
    PromptError,
    TemplateError,
    UnsupportedLayerError,
)
from langgraph_latent.event_loop import in_thread, iterate_in_thread
from langgraph_latent.events import CallSite
from langgraph_latent.handle.compose import (
    EVERY_KIND,
    WHOLE,
    Selection,
    behind,
    composed,
    merge,
    part_of,
    system_prefix_of,
)
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.provenance import Repair
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.scorers import SINKS, WINDOW, budget_spans, check_budget
from langgraph_latent.messages import answer_chunk, answer_message, plain_message, with_schema
from langgraph_latent.prompt.answer import Call, InvalidCall, Part
from langgraph_latent.prompt.grammar import Constraint, check_grammars, has_grammars
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.spec.spec import ModelSpec
from langgraph_latent.workspace.delivery import Request
from langgraph_latent.workspace.generation import Generation
from langgraph_latent.workspace.workspace import LatentWorkspace

Inherited = KVHandle | AIMessage | Sequence[KVHandle | AIMessage] | None
Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "seed", "max_tokens")
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
STOCK_OPTIONS = ("logits_processor", "stopping_criteria", "streamer")
CALL_OPTIONS = ("inherit", *SAMPLING_OPTIONS, "stop", "timeout", "template_options", *TOOL_OPTIONS, *STOCK_OPTIONS)
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
THINK_STEPS = 20
"""Latent steps that `think` takes by default."""
HIDDEN, UNFORCED, FORCED = ("none", False), ("none", False, "auto", None), ("any", "required", True)
"""Tool choices that are no tool's name: no tools are shown, none must be called, one must be."""


class ChatLatent(BaseChatModel):
    """A local Hugging Face model as a chat model whose answers come with a handle of their KV cache.

    Weights load on first use, once per process. Prompts reuse the longest prefix that the workspace still holds, with
    the same output, and calls that run at the same time share the model's work. Beyond the usual methods, `read`
    prefills without answering, and `inherit=` (of `invoke`, `stream`, `read`, ...) continues one or several handles, or
    replies that have one.

    Args:
        model: hub id, or a folder made by `save_pretrained`.
        workspace: where caches live; the process's default workspace when None.
        temperature: 0 is greedy.
        top_p, top_k, seed, max_tokens, stop: as usual; each can be given per call too.
        timeout: seconds after which a call raises `RequestTimeoutError`; None for no limit. Per call too.
        max_queue: calls under way on the model beyond which a new one raises `QueueFullError`; None for no limit.
        max_retries: how many seconds a call waits for room when the queue is full.
        template_options: what the chat template is told beside the messages, such as `{"enable_thinking": False}`. Per
            call too.
        streaming: `invoke` streams internally, for callbacks that want tokens.
        reuse: False prefills every prompt from its first token; for comparisons.
        probe: False loads without the probe of a few tokens that finds out what the model's caches can do. Then moving,
            thinking and batching are refused, unless an earlier probe is remembered. It counts for whoever loads first.
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
    timeout: float | None = None
    max_queue: int | None = None
    max_retries: int = 0
    template_options: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False
    reuse: bool = True
    probe: bool = True
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    _owner: LatentWorkspace | None = PrivateAttr(default=None)
    _load_lock: Any = PrivateAttr(default_factory=threading.Lock)
    _used_key: ModelKey | None = PrivateAttr(default=None)
    _is_closed: bool = PrivateAttr(default=False)
    _own_profile: ModelProfile | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _known_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            if unknown := sorted(set(values) - set(cls.model_fields)):
                known = [name for name in cls.model_fields if name not in BaseChatModel.model_fields]
                raise ConfigError(f"ChatLatent has no option {unknown[0]!r}; {_advice(unknown[0], known)}")
            if isinstance(values.get("model"), Path):
                values["model"] = str(values["model"])
        return values

    @model_validator(mode="after")
    def _possible_options(self) -> ChatLatent:
        self._sampling({}, None)
        self._limits({})
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
        return self._read(messages, inherit, config, self._limits({}))

    async def aread(
        self, messages: LanguageModelInput, *, inherit: Inherited = None, config: RunnableConfig | None = None
    ) -> KVHandle:
        """`read` in a thread."""
        limits = self._limits({})
        return await in_thread(lambda gone: self._read(messages, inherit, config, replace(limits, cancelled=gone)))

    def _read(
        self, messages: LanguageModelInput, inherit: Inherited, config: RunnableConfig | None, limits: Limits
    ) -> KVHandle:
        plain = self._convert_input(messages).to_messages()
        request = self._request(plain, {"inherit": inherit}, _call_site(config), reply=False)
        return Generation(self._loaded_workspace(), self.resident(), request, limits).read()

    def think(
        self,
        messages: LanguageModelInput,
        *,
        inherit: Inherited = None,
        steps: int = THINK_STEPS,
        config: RunnableConfig | None = None,
    ) -> KVHandle:
        """Prefill messages, behind what is inherited, and take latent steps where the answer would begin.

        Each step feeds the last hidden state back as the next input embedding. The steps are read by whoever inherits
        the handle on an edge with `EdgePolicy(thoughts=True)`; as text they say nothing. With 0 steps it is `read`.

        Raises `ConfigError` for an impossible number of steps, `UnsupportedLayerError` for a model that can't think,
        and what `read` raises.
        """
        return self._think(messages, inherit, steps, config, self._limits({}))

    async def athink(
        self,
        messages: LanguageModelInput,
        *,
        inherit: Inherited = None,
        steps: int = THINK_STEPS,
        config: RunnableConfig | None = None,
    ) -> KVHandle:
        """`think` in a thread."""
        limits = self._limits({})
        return await in_thread(
            lambda gone: self._think(messages, inherit, steps, config, replace(limits, cancelled=gone))
        )

    def _think(
        self,
        messages: LanguageModelInput,
        inherit: Inherited,
        steps: int,
        config: RunnableConfig | None,
        limits: Limits,
    ) -> KVHandle:
        if type(steps) is not int or steps < 0:
            raise ConfigError(f"steps={steps!r} is impossible; it is a whole number, 0 or above")
        if not steps:
            return self._read(messages, inherit, config, limits)
        if refusal := self.spec.capabilities.refusal("think"):
            raise UnsupportedLayerError(f"{self.model!r} can't take latent steps: {refusal}; use read()")
        plain = self._convert_input(messages).to_messages()
        request = self._request(plain, {"inherit": inherit}, _call_site(config), reply=True)
        return Generation(self._loaded_workspace(), self.resident(), request, limits).think(steps)

    def compose(
        self,
        handles: Inherited,
        *,
        system: str | SystemMessage | None = None,
        select: Selection | Sequence[Selection] | None = None,
        repair: Repair | None = None,
    ) -> KVHandle:
        """One handle of parts of others, moved behind a system prompt; nothing is computed until it is inherited.

        Inherited on an edge whose policy allows level 1, its cache is put together from the others'; on any other edge,
        or by a model that can't move, its messages are read anew.

        Args:
            handles: a handle or reply, or several, in the order in which they are to be read.
            system: the reader's own system prompt, which takes the place of theirs; None keeps the first handle's.
            select: what is taken of each handle, one for all or one each; by default everything but system prompts.
            repair: how much is computed anew in its new place, which makes up for what it did not see when it was read.

        Without `system` and `select` it is a merge: the first handle as it is, behind it what is new in the others.
        Where nothing is moved it is a handle that was there before.

        Raises `HandleError` for handles of other models, and `ConfigError` for an empty or impossible selection.
        """
        chosen = [self.handle(each) if isinstance(each, AIMessage) else each for each in _listed(handles)]
        if not chosen:
            raise ConfigError("there is nothing to compose; pass at least one handle")
        spec = self.spec
        for handle in chosen:
            self._loaded_workspace().check(handle)
            if handle.model != spec.identity:
                raise ModelMismatchError(f"handle {handle.id} is of another model than {self.model!r}; read it anew")
        if system is None and select is None:
            return merge(chosen, repair=repair)
        each = WHOLE if select is None else select
        selections = [each] * len(chosen) if isinstance(each, Selection) else each
        if not isinstance(selections, list | tuple) or not all(isinstance(one, Selection) for one in selections):
            raise ConfigError(f"select={select!r} is no Selection and no list of them")
        if len(selections) != len(chosen):
            raise ConfigError(
                f"{len(selections)} selections do not fit {len(chosen)} handles; pass one for all, or each"
            )
        for selection in selections:
            selection.check_layers(len(spec.layers))
        if system is None:
            return behind(system_prefix_of(chosen[0]), chosen, selections, repair)
        return behind(self._head(system), chosen, selections, repair)

    def within_budget(self, handle: KVHandle, num_tokens: int, *, sinks: int = SINKS, window: int = WINDOW) -> KVHandle:
        """A handle of the `num_tokens` tokens of a handle's cache that matter most, its first and last ones among them.

        They are told by their keys (`kv/scorers.py`), system prompts like all others, and moved together: the handle is
        served like one of `compose`, where level 1 is allowed. Read as text, its messages are whole. A handle that is
        within the budget is given back. Tensors that are gone are rebuilt first.

        Raises `ConfigError` for an impossible budget, `UnsupportedLayerError` for a model whose layers keep no key per
        token, and `HandleError` (`ModelMismatchError` for another model's).
        """
        check_budget(num_tokens, sinks, window)
        workspace = self._loaded_workspace()
        workspace.check(handle)
        if num_tokens >= handle.num_tokens:
            return handle
        state = workspace.whole_state_of(handle, self.resident())
        spans = budget_spans(state, num_tokens, sinks=sinks, window=window)
        kept = part_of(handle, Selection(kinds=EVERY_KIND, spans=spans))
        return composed(KVHandle.root(handle.model, handle.tenant), [kept])

    def _head(self, system: str | SystemMessage) -> KVHandle:
        """The handle of a system prompt alone. Raises `TemplateError` where the template has no such thing."""
        resident = self.resident()
        template_inputs = TemplateInputs((), self.template_options)
        messages = [plain_message(SystemMessage(system) if isinstance(system, str) else system)]
        root = KVHandle.root(resident.spec.identity, self._loaded_workspace().tenant)
        tokens = resident.prompts.head(messages, template_inputs)
        if not tokens:
            raise TemplateError(
                f"the chat template of {self.model!r} does not part a system message from what follows; leave it out"
            )
        size = resident.spec.bytes_per_token
        return root.extend("system", "", tokens, messages, size, inputs_digest=template_inputs.digest)

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
        return self._loaded_workspace().ingest(source, self.resident(), _call_site(None))

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own token ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Any = None) -> int:
        """Number of tokens of messages as the model's own template renders them."""
        plain = [plain_message(message) for message in messages]
        template_inputs = TemplateInputs([convert_to_openai_tool(tool) for tool in tools or ()], self.template_options)
        return len(self.resident().prompts.write(plain, template_inputs, reply=False).tokens) // TOKEN_BYTES

    # -- tools and structured output ------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The chat model with tools in its prompt, whose replies have `tool_calls`.

        Args:
            tools: functions, `BaseTool`s, Pydantic or TypedDict classes, or JSON schemas in OpenAI's form.
            tool_choice: None or "auto" leaves it to the model, "any" (or "required", True) forces a call, a tool's name
                forces a call of it, "none" (or False) shows no tools. A forced call always fits its schema; it needs
                the extra `grammar`.
            parallel_tool_calls: False ends an answer after its first call.
            strict: goes into the tools' schemas.

        Raises `ConfigError` for a choice that is no tool, and `MissingExtraError`.
        """
        schemas = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        options = {"tools": schemas, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, **kwargs}
        options = {name: value for name, value in options.items() if value is not None}
        self._check_tools(options)
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The chat model with answers of a schema (Pydantic class, TypedDict class or JSON schema).

        Decoding is constrained to the schema, so an answer that is not cut by `max_tokens` always parses. Needs the
        extra `grammar`.

        Args:
            method: "function_calling" forces a call of a tool with the schema; "json_schema" asks for JSON of the
                schema at the prompt's end; "json_mode" allows any JSON object and leaves asking to the prompt.
            include_raw: answer with a dict of `raw`, `parsed` and `parsing_error`.
            strict: accepted and not needed: decoding is always strict.
        """
        check_grammars()
        if isinstance(schema, Mapping) and not {"title", "name", "function"} & set(schema):
            schema = {"title": "answer", **schema}
        if method == "function_calling":
            if kwargs:
                raise ConfigError(
                    f"with_structured_output takes no {next(iter(kwargs))!r}; give call options to invoke()"
                )
            return super().with_structured_output(schema, include_raw=include_raw)
        if method not in ("json_schema", "json_mode"):
            raise ConfigError(f"method={method!r} is unknown; known methods: function_calling, json_schema, json_mode")
        self._check_names(kwargs)
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            as_json = convert_to_json_schema(schema)
            form = {"type": "json_schema", "json_schema": {"name": as_json["title"], "schema": as_json}}
        llm = self.bind(
            response_format=form,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
            **kwargs,
        )
        parser: Any = JsonOutputParser()
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # -- LangChain's contract -------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "langgraph-latent"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, "revision": self.revision, "dtype": self.dtype, "reuse": self.reuse} | {
            name: getattr(self, name) for name in (*SAMPLING_OPTIONS, "stop", "template_options")
        }

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langgraph_latent", "chat_model"]

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The key of LangChain's response cache.

        A tenant never gets another tenant's answers, options are those of now (LangChain's memo of them outlives a
        change and a copy), and a call with transformers' own objects, which have no name but their address, gets a key
        of its own.
        """
        self.__dict__.pop("_serialized", None)
        tenant = self.workspace.tenant if self.workspace else ""
        once = uuid4().hex if any(kwargs.get(name) is not None for name in STOCK_OPTIONS) else ""
        return f"{tenant!r} {once} {super()._get_llm_string(stop=stop, **kwargs)}"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        return LangSmithParams(**{**params, "ls_provider": "langgraph-latent"})

    def _resolve_model_profile(self) -> ModelProfile:
        """What the chat model can do; `max_input_tokens` follows when the model is loaded."""
        self._own_profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=True,
            tool_choice=has_grammars(),
            tool_call_streaming=True,
            structured_output=has_grammars(),
            temperature=True,
        )
        return self._own_profile

    def batch(
        self, inputs: list[Any], config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """`invoke` for several inputs at a time: as many as share one model call, if `max_concurrency` says nothing."""
        return super().batch(inputs, _side_by_side(config), return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> Any:
        """`batch`, each answer with its index as soon as it is there."""
        config = _side_by_side(config)
        return super().batch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._whole_answer(messages, stop, kwargs, self._limits(kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(messages, stop, kwargs, self._limits(kwargs)):
            if run_manager:
                run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
            yield chunk

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        limits = self._limits(kwargs)
        return await in_thread(lambda gone: self._whole_answer(messages, stop, kwargs, replace(limits, cancelled=gone)))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        limits = self._limits(kwargs)
        async for chunk in iterate_in_thread(
            lambda gone: self._chunks(messages, stop, kwargs, replace(limits, cancelled=gone))
        ):
            if run_manager:
                await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
            yield chunk

    # -- one request ----------------------------------------------------------------------------------------------

    def _whole_answer(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        options: Mapping[str, Any],
        limits: Limits,
    ) -> ChatResult:
        turn, parts = self._answer(messages, stop, options, limits)
        for _ in parts:
            pass
        message = answer_message(turn.answer, usage_metadata=_usage(turn), response_metadata=self._metadata(turn))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        options: Mapping[str, Any],
        limits: Limits,
    ) -> Iterator[ChatGenerationChunk]:
        turn, parts = self._answer(messages, stop, options, limits)
        num_calls = 0
        for part in parts:
            yield ChatGenerationChunk(message=answer_chunk(part, num_calls))
            num_calls += isinstance(part, Call | InvalidCall)
        last = AIMessageChunk(
            content="", usage_metadata=_usage(turn), response_metadata=self._metadata(turn), chunk_position="last"
        )
        yield ChatGenerationChunk(message=last)

    def _answer(
        self,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        options: Mapping[str, Any],
        limits: Limits,
    ) -> tuple[Generation, Iterator[Part]]:
        """A turn, and the parts of its answer as they come."""
        self._check_names(options)
        sampling = self._sampling(options, stop)
        constraint = self._constraint(options)
        workspace = self._loaded_workspace()
        request = self._request(messages, options, _call_site(None), reply=True)
        turn = Generation(workspace, workspace.model(self._key), request, limits)
        criteria = options.get("stopping_criteria")
        return turn, turn.decode(
            sampling,
            constraint=constraint,
            max_calls=1 if options.get("parallel_tool_calls") is False else None,
            processors=options.get("logits_processor") or (),
            criteria=StoppingCriteriaList(criteria) if criteria else None,
            streamer=options.get("streamer"),
        )

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a per-call option that does not exist or has an impossible value."""
        self._check_names(options)
        self._check_tools(options)
        self._sampling(options, options.get("stop"))
        self._limits(options)

    def _check_names(self, options: Mapping[str, Any]) -> None:
        if unknown := sorted(set(options) - set(CALL_OPTIONS)):
            raise ConfigError(f"ChatLatent takes no call option {unknown[0]!r}; {_advice(unknown[0], CALL_OPTIONS)}")

    def _check_tools(self, options: Mapping[str, Any]) -> None:
        if self._constraint(options) is not None:
            check_grammars()

    def _sampling(self, options: Mapping[str, Any], stop: str | list[str] | None) -> Sampling:
        chosen = {name: options.get(name, getattr(self, name)) for name in SAMPLING_OPTIONS}
        stops = stop if stop is not None else self.stop
        return Sampling(stop=(stops,) if isinstance(stops, str) else tuple(stops or ()), **chosen)

    def _limits(self, options: Mapping[str, Any]) -> Limits:
        return Limits(self.max_queue, self.max_retries, options.get("timeout", self.timeout))

    def _constraint(self, options: Mapping[str, Any]) -> Constraint | None:
        """What the answer is constrained to, if anything. Raises `ConfigError` for an unknown choice or format."""
        tools, choice = _tools_of(options), options.get("tool_choice")
        schema = _schema_of(options.get("response_format"))
        if isinstance(choice, Mapping):  # in OpenAI's form, or in Anthropic's; any other is refused below
            named = choice.get("function", choice)
            choice = (named.get("name") if isinstance(named, Mapping) else None) or {**choice}
        if choice in UNFORCED:
            return None if schema is None else Constraint(tools, schema)
        chosen = [tool for tool in tools if choice in FORCED or tool["function"]["name"] == choice]
        if not chosen:
            names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
            raise ConfigError(f"tool_choice={choice!r} is no bound tool; bound tools: {names}; or auto, any, none")
        return Constraint(chosen)

    def _request(
        self, messages: Sequence[BaseMessage], options: Mapping[str, Any], call_site: CallSite, *, reply: bool
    ) -> Request:
        plain = [plain_message(message) for message in messages]
        if not any(str(message["content"]).strip() or message.get("tool_calls") for message in plain):
            raise PromptError("the prompt is empty: pass at least one message with some text")
        tools = _tools_of(options)
        told = with_schema(plain, _told_schema(options.get("response_format")), has_tools=bool(tools))
        handles = [
            self.handle(each) if isinstance(each, AIMessage) else each for each in _listed(options.get("inherit"))
        ]
        template_inputs = TemplateInputs(tools, {**self.template_options, **(options.get("template_options") or {})})
        return Request(told, template_inputs, handles, reply, self.reuse, call_site)

    def _metadata(self, turn: Generation) -> dict[str, Any]:
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
                workspace.use_model(self._key, probe=self.probe)
                self._owner = workspace
                self._complete_profile(workspace.model(self._key).spec)
            return self._owner

    def _complete_profile(self, spec: ModelSpec) -> None:
        """Put the model's length into the profile, unless the user gave one."""
        if self._own_profile is not None and self.profile is self._own_profile and spec.max_positions:
            self.profile = self._own_profile = {**self._own_profile, "max_input_tokens": spec.max_positions}


def _listed(inherit: Inherited) -> Sequence[Any]:
    return inherit if isinstance(inherit, list | tuple) else () if inherit is None else (inherit,)


def _advice(name: str, known: Sequence[str]) -> str:
    """What to write for an option that does not exist."""
    if name in STOCK_OPTIONS:
        return f"give it per call, or by .bind({name}=...)"
    likely = OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), "")
    return (f"did you mean {likely!r}? " if likely else "") + f"known options: {', '.join(known)}"


def _tools_of(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that a call shows to the model, in OpenAI's form."""
    is_hidden = options.get("tool_choice") in HIDDEN
    return [] if is_hidden else [convert_to_openai_tool(tool) for tool in options.get("tools") or ()]


def _schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema that a `response_format` (OpenAI's form) asks for. Raises `ConfigError` for another form."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        return {"type": "object"}
    named = response_format.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f"response_format={response_format!r} is unknown; use with_structured_output(), or "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}, or {"type": "json_object"}'
        )
    return schema


def _told_schema(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema that the prompt asks for."""
    schema = _schema_of(response_format)
    return None if response_format == {"type": "json_object"} else schema


def _side_by_side(config: Any) -> Any:
    """Configs for a batch that is not told how many calls may run at a time."""
    if isinstance(config, Sequence):
        return [_side_by_side(each) for each in config]
    return {**(config or {}), "max_concurrency": (config or {}).get("max_concurrency") or MAX_BATCH}


def _usage(turn: Generation) -> UsageMetadata:
    read, written, thought = turn.num_prompt_tokens, len(turn.sampled), turn.num_reasoning_tokens
    return UsageMetadata(
        input_tokens=read,
        output_tokens=written,
        total_tokens=read + written,
        input_token_details={"cache_read": turn.cache_read},
        output_token_details=OutputTokenDetails(reasoning=thought) if thought else {},
    )


def _call_site(config: RunnableConfig | None) -> CallSite:
    """Where in a graph this call happens, from the metadata that LangGraph puts into a run's config."""
    config = ensure_config(config)
    metadata = config.get("metadata") or {}
    run_id = config.get("run_id") or getattr(config.get("callbacks"), "parent_run_id", None)
    thread_id = metadata.get("thread_id") or (config.get("configurable") or {}).get("thread_id")
    return CallSite(str(metadata.get("langgraph_node") or ""), str(thread_id or ""), str(run_id or ""))
