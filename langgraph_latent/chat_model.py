"""`ChatLatent`: a local model as LangChain's chat model: options, answers, streams, batches, and handles of them.

It turns what LangChain passes into a request and a generation into LangChain's results. It does not know how a request
is served.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models import LanguageModelInput as Messages
from langchain_core.language_models.chat_models import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import ConfigDict, Field, PrivateAttr, model_validator
from transformers import StoppingCriteriaList

from langgraph_latent import public
from langgraph_latent.checks import check_names, check_no_bools, check_whole_number
from langgraph_latent.engine.limits import Limits
from langgraph_latent.engine.loader import ModelKey, as_text
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.sampling import Sampling
from langgraph_latent.engine.scheduler import MAX_BATCH
from langgraph_latent.errors import ConfigError, UnsupportedLayerError
from langgraph_latent.event_loop import in_thread, iterate_in_thread
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.selection import Selection
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.scorers import SINKS, WINDOW, check_budget
from langgraph_latent.messages import batch_config, call_site, plain_message, plain_prompt, reply_chunks, reply_result
from langgraph_latent.prompt.answer import AnswerPart
from langgraph_latent.prompt.grammar import check_grammars, has_grammars
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.spec.spec import ModelSpec
from langgraph_latent.tools import TOOL_OPTIONS, CallTools, Tool, openai_tools, structured_answers
from langgraph_latent.workspace.composition import compose_handles, within_budget
from langgraph_latent.workspace.decoding import AnswerOptions, ended
from langgraph_latent.workspace.files import export, ingest
from langgraph_latent.workspace.generation import Generation
from langgraph_latent.workspace.lease import ModelLease
from langgraph_latent.workspace.request import Caller, Request
from langgraph_latent.workspace.workspace import LatentWorkspace

Config = RunnableConfig | None
Inherited = KVHandle | AIMessage | Sequence[KVHandle | AIMessage] | None
Options = Mapping[str, Any]
Run = CallbackManagerForLLMRun | None
AsyncRun = AsyncCallbackManagerForLLMRun | None
SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "seed", "max_tokens")
NUMBERS = (*SAMPLING_OPTIONS, "timeout", "max_queue", "max_retries")
STOCK_OPTIONS = ("logits_processor", "stopping_criteria", "streamer")
CALL_OPTIONS = ("inherit", *SAMPLING_OPTIONS, "stop", "timeout", "template_options", *TOOL_OPTIONS, *STOCK_OPTIONS)
NO_OPTION = "ChatLatent takes no call option"
THINK_STEPS = 20
"""Latent steps that `think` takes by default."""


@public
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
        template_options: what the chat template gets beside the messages: `{"enable_thinking": False}`. Per call too.
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

    _lease: ModelLease = PrivateAttr(default_factory=ModelLease)
    _own_profile: ModelProfile | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _known_options(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in set(STOCK_OPTIONS) & set(values):
                raise ConfigError(f"ChatLatent has no option {name!r}; give it per call, or by .bind({name}=...)")
            inherited = set(BaseChatModel.model_fields)
            known = [name for name in cls.model_fields if name not in inherited]
            check_names("ChatLatent has no option", set(values) - inherited, known)
            check_no_bools(values, NUMBERS)
            values |= {name: as_text(values[name]) for name in ("model", "dtype", "device") if name in values}
        return values

    @model_validator(mode="after")
    def _possible_options(self) -> ChatLatent:
        self.check_options({})
        return self

    def __copy__(self) -> ChatLatent:
        """Another chat model on the same workspace, which loads and closes for itself."""
        copied = super().__copy__()
        copied._lease = ModelLease()
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
        self._lease.end()

    def resident(self) -> ResidentModel:
        """The model in memory, shared by the process; loads it if need be."""
        return self._loaded_workspace().models.get(self._lease.key)

    @property
    def spec(self) -> ModelSpec:
        """The model's identity; loads it if need be."""
        return self.resident().spec

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; loads it if need be."""
        return self.resident().tokenizer

    # -- handles --------------------------------------------------------------------------------------------------

    def read(self, messages: Messages, *, inherit: Inherited = None, config: Config = None) -> KVHandle:
        """Prefill messages, appended to what is inherited, without an answer; the handle of it all.

        Raises `PromptError` (empty, refused by the template, too long), `HandleError`, `CacheBudgetError`.
        """
        return self._prefill(messages, inherit, config, self._limits({}))

    async def aread(self, messages: Messages, *, inherit: Inherited = None, config: Config = None) -> KVHandle:
        """`read` in a thread."""
        limits = self._limits({})
        return await in_thread(lambda gone: self._prefill(messages, inherit, config, replace(limits, cancelled=gone)))

    def think(
        self, messages: Messages, *, inherit: Inherited = None, steps: int = THINK_STEPS, config: Config = None
    ) -> KVHandle:
        """Prefill messages, appended to what is inherited, and take latent steps where the answer would begin.

        Each step feeds the last hidden state back as the next input embedding. The steps are read by whoever inherits
        the handle on an edge with `EdgePolicy(latent_steps=True)`; they have no text. With 0 steps it is `read`.

        Raises `ConfigError` for an impossible number of steps, `UnsupportedLayerError` for a model that can't think,
        and what `read` raises.
        """
        return self._prefill(messages, inherit, config, self._limits({}), steps)

    async def athink(
        self, messages: Messages, *, inherit: Inherited = None, steps: int = THINK_STEPS, config: Config = None
    ) -> KVHandle:
        """`think` in a thread."""
        limits = self._limits({})
        return await in_thread(
            lambda gone: self._prefill(messages, inherit, config, replace(limits, cancelled=gone), steps)
        )

    def _prefill(
        self, messages: Messages, inherit: Inherited, config: Config, limits: Limits, steps: int = 0
    ) -> KVHandle:
        check_whole_number("steps", steps)
        if steps and (refusal := self.spec.capabilities.refusal("think")):
            raise UnsupportedLayerError(f"{self.model!r} can't take latent steps: {refusal}; use read()")
        plain, options = self._convert_input(messages).to_messages(), {"inherit": inherit}
        caller = Caller(call_site(config), limits)
        request = self._request(plain, options, CallTools.of(options), caller, reply=bool(steps))
        generation = Generation(self._loaded_workspace().services, self.resident(), request)
        return generation.think(steps) if steps else generation.read()

    def compose(
        self,
        handles: Inherited,
        *,
        system: str | SystemMessage | None = None,
        select: Selection | Sequence[Selection] | None = None,
        repair: Repair | None = None,
    ) -> KVHandle:
        """One handle of parts of others, moved after a system prompt; nothing is computed until it is inherited.

        On an edge whose policy allows level 1, its cache is put together from the others'. On any other edge, or by a
        model that can't move keys, its messages are re-read.

        Args:
            handles: a handle or reply, or several, in the order in which they are to be read.
            system: the reader's own system prompt, which takes the place of theirs; None keeps the first handle's.
            select: what is taken of each handle, one for all or one each; by default everything but system prompts.
            repair: how much is recomputed in its new place, to make up for what it did not see when it was read.

        Without `system` and `select` it is a merge: the first handle as it is, then what is new in the others. Where
        nothing is moved, the result is a handle that was there before.

        Raises `HandleError` for handles of other models, and `ConfigError` for an empty or impossible selection.
        """
        chosen, inputs = self._handles_of(handles), TemplateInputs((), self.template_options)
        prompt = None if system is None else plain_message(SystemMessage(system) if isinstance(system, str) else system)
        services, model = self._loaded_workspace().services, self.resident()
        return compose_handles(services, chosen, model, prompt, inputs, select=select, repair=repair)

    def within_budget(self, handle: KVHandle, num_tokens: int, *, sinks: int = SINKS, window: int = WINDOW) -> KVHandle:
        """A handle of the `num_tokens` tokens of a handle's cache that matter most, its first and last ones among them.

        Their keys tell which matter (`kv/scorers.py`), those of system prompts like all others. They are moved
        together, so the handle is served like one of `compose`, where level 1 is allowed. Read as text, its messages
        are complete. A handle within the budget is returned as it is. Tensors that are gone are rebuilt first.

        Raises `ConfigError` for an impossible budget, `UnsupportedLayerError` for a model whose layers keep no key per
        token, and `HandleError` (`ModelMismatchError` for another model's).
        """
        check_budget(num_tokens, sinks, window)
        handle = KVHandle.given(handle)
        services = self._loaded_workspace().services
        caller = Caller(limits=self._limits({}))
        return within_budget(services, handle, num_tokens, self.resident(), caller, sinks=sinks, window=window)

    def handle(self, reply: AIMessage) -> KVHandle:
        """The handle of everything up to and with a reply; `LatentWorkspace.handle`."""
        return self._loaded_workspace().handle(reply)

    def export_kv_cache(self, handle: KVHandle, path: str | Path | None = None) -> bytes | None:
        """Write a handle and its tensors to one self-describing file, or return the bytes when `path` is None.

        Tensors that are gone are rebuilt first. Raises `HandleError` (`ModelMismatchError` for another model's).
        """
        caller = Caller(limits=self._limits({}))
        return export(self._loaded_workspace().services, KVHandle.given(handle), self.resident(), path, caller)

    def ingest_kv_cache(self, source: str | Path | bytes) -> KVHandle:
        """Take an exported file or byte string into the workspace, after verifying every part of it.

        Raises `CodecError` for anything damaged, altered or made by another model; then nothing of it was used.
        """
        return ingest(self._loaded_workspace().services, source, self.resident(), call_site(None))

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own token ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Any = None) -> int:
        """Number of tokens of messages as the model's own template renders them."""
        plain = [plain_message(message) for message in messages]
        template_inputs = TemplateInputs(openai_tools(tools or ()), self.template_options)
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
    ) -> Runnable[Messages, AIMessage]:
        """The chat model with tools in its prompt, whose replies have `tool_calls`.

        Args:
            tools: functions, `BaseTool`s, Pydantic or TypedDict classes, or JSON schemas in OpenAI's form.
            tool_choice: None or "auto" leaves it to the model, "any" (or "required", True) forces a call, a tool's name
                forces a call of it, "none" (or False) shows no tools. A forced call always fits its schema; it needs
                the extra `grammar`.
            parallel_tool_calls: False ends an answer after its first call.
            strict: goes into the tools' schemas.

        Raises `ConfigError` for a choice that is not a tool, and `MissingExtraError`.
        """
        chosen = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, **kwargs}
        options = {"tools": openai_tools(tools, strict=strict)}
        options |= {name: value for name, value in chosen.items() if value is not None}
        CallTools.of(options).check_grammars()
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Messages, Any]:
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
                name = next(iter(kwargs))
                raise ConfigError(f"with_structured_output takes no {name!r}; give call options to invoke()")
            return super().with_structured_output(schema, include_raw=include_raw)
        check_names(NO_OPTION, kwargs, CALL_OPTIONS)
        return structured_answers(self, schema, method, include_raw=include_raw, options=kwargs)

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
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "langgraph-latent"}

    def _resolve_model_profile(self) -> ModelProfile:
        """What the chat model can do; `max_input_tokens` follows when the model is loaded."""
        can = dict.fromkeys(("text_inputs", "text_outputs", "tool_calling", "tool_call_streaming", "temperature"), True)
        can |= dict.fromkeys(("image_inputs", "audio_inputs", "video_inputs"), False)
        can |= dict.fromkeys(("tool_choice", "structured_output"), has_grammars())
        self._own_profile = ModelProfile(**can)  # type: ignore[typeddict-item]
        return self._own_profile

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[AIMessage]:
        """`invoke` for several inputs at a time: as many as share one model call, unless `max_concurrency` is given."""
        return super().batch(inputs, batch_config(config, MAX_BATCH), **kwargs)

    def batch_as_completed(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        """`batch`, each answer with its index as soon as it is there."""
        return super().batch_as_completed(inputs, batch_config(config, MAX_BATCH), **kwargs)

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Run = None, **kwargs: Any
    ) -> ChatResult:
        with ended(kwargs.get("streamer")):
            return reply_result(*self._answer(messages, stop, kwargs, self._limits(kwargs)), self.model)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Run = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with ended(kwargs.get("streamer")):
            for chunk in reply_chunks(*self._answer(messages, stop, kwargs, self._limits(kwargs)), self.model):
                if run_manager:
                    run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        def result(gone: threading.Event) -> ChatResult:
            return reply_result(*self._answer(messages, stop, kwargs, replace(limits, cancelled=gone)), self.model)

        with ended(kwargs.get("streamer")):
            limits = self._limits(kwargs)
            return await in_thread(result)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        def chunks(gone: threading.Event) -> Iterator[ChatGenerationChunk]:
            return reply_chunks(*self._answer(messages, stop, kwargs, replace(limits, cancelled=gone)), self.model)

        with ended(kwargs.get("streamer")):
            limits = self._limits(kwargs)
            async for chunk in iterate_in_thread(chunks):
                if run_manager:
                    await run_manager.on_llm_new_token(str(chunk.message.content), chunk=chunk)
                yield chunk

    # -- one request ----------------------------------------------------------------------------------------------

    def _answer(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: Options, limits: Limits
    ) -> tuple[Generation, Iterator[AnswerPart]]:
        """A generation, and the parts of its answer as they come."""
        check_names(NO_OPTION, options, CALL_OPTIONS)
        sampling, tools = self._sampling(options, stop), CallTools.of(options)
        request = self._request(messages, options, tools, Caller(call_site(None), limits), reply=True)
        generation = Generation(self._loaded_workspace().services, self.resident(), request)
        criteria = options.get("stopping_criteria")
        answer_options = AnswerOptions(
            sampling,
            tools.constraint,
            tools.max_calls,
            processors=options.get("logits_processor") or (),
            criteria=StoppingCriteriaList(criteria) if criteria else None,
            streamer=options.get("streamer"),
        )
        return generation, generation.decode(answer_options)

    def check_options(self, options: Options) -> None:
        """Raise `ConfigError` for a per-call option that does not exist or has an impossible value."""
        check_names(NO_OPTION, options, CALL_OPTIONS)
        CallTools.of(options).check_grammars()
        self._sampling(options, options.get("stop"))
        self._limits(options)

    def _sampling(self, options: Options, stop: str | list[str] | None) -> Sampling:
        chosen = {name: options.get(name, getattr(self, name)) for name in SAMPLING_OPTIONS}
        stops = stop if stop is not None else self.stop
        return Sampling(stop=(stops,) if isinstance(stops, str) else tuple(stops or ()), **chosen)

    def _limits(self, options: Options) -> Limits:
        return Limits(self.max_queue, self.max_retries, options.get("timeout", self.timeout))

    def _request(
        self, messages: Sequence[BaseMessage], options: Options, tools: CallTools, caller: Caller, *, reply: bool
    ) -> Request:
        plain = plain_prompt(messages, tools.asked_schema, has_tools=bool(tools.shown))
        template_options = {**self.template_options, **(options.get("template_options") or {})}
        template_inputs = TemplateInputs(tools.shown, template_options)
        handles = self._handles_of(options.get("inherit"))
        return Request(plain, template_inputs, handles, reply, self.reuse, caller)

    def _handles_of(self, inherit: Inherited) -> list[KVHandle]:
        """Handles, for replies the ones that they have."""
        several: Sequence[Any] = inherit if isinstance(inherit, list | tuple) else () if inherit is None else (inherit,)
        return [self.handle(each) if isinstance(each, AIMessage) else KVHandle.given(each) for each in several]

    def _loaded_workspace(self) -> LatentWorkspace:
        """The workspace, in which this chat model's model is resident."""
        key = ModelKey(self.model, self.revision, self.dtype, self.device)
        profile = self._own_profile if self._lease.workspace is None else None
        workspace = self._lease.begin(self.workspace, key, probe=self.probe)
        if profile is not None and profile is self.profile:
            limit = workspace.models.get(self._lease.key).spec.max_positions
            self.profile = self._own_profile = {**profile, "max_input_tokens": limit} if limit else profile
        return workspace
