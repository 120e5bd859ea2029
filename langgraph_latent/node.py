"""`LatentNode`: a chat model as a LangGraph node that inherits and hands on a KV cache; and `LatentState`.

It knows prompts and state keys. It does not know models, caches or routes: these are the chat model's.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Annotated, Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from langgraph_latent import public
from langgraph_latent.channel import LatentChannel
from langgraph_latent.chat_model import THINK_STEPS, ChatLatent
from langgraph_latent.errors import ConfigError, PromptError, UnknownHandleError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.selection import Selection

MODES = ("read", "think", "decode")
INHERIT_MODES = ("append", "compose")
NodePrompt = str | Sequence[Any] | ChatPromptTemplate | Callable[[Mapping[str, Any]], Sequence[BaseMessage]]


@public
class LatentState(TypedDict, total=False):
    """A graph state with messages and one latent edge."""

    messages: Annotated[list[BaseMessage], add_messages]
    latent: Annotated[KVHandle | None, LatentChannel]


@public
class LatentNode(Runnable[Mapping[str, Any], dict[str, Any]]):
    """A node that continues the KV cache in the state and writes the grown one back.

    Args:
        chat: the model.
        prompt: a template filled from the state ("{report}"), a list as `ChatPromptTemplate` takes it
            ([("system", "..."), ("human", "{question}")]), or a function from state to messages.
        mode: "decode" answers; "read" only prefills; "think" prefills and takes latent `steps`.
        writes: state key for the answer: "messages" gets the AIMessage, any other key its text. None keeps no answer.
        latent: state key that the new handle is written to.
        inherit: how the handle under `latent` is inherited: "append" continues its cache (the default), "compose" moves
            it after this node's own system prompt, where the edge's policy allows level 1. Or the state key (or keys)
            whose handles are inherited, () to start afresh; or a mapping of keys to "append" and "compose".
        select: what is taken of composed handles; see `ChatLatent.compose`. The edge's policy says how far they are
            repaired.
        options: per-call options of the chat model, for example `max_tokens`; `steps` of a node that thinks.

    Raises `PromptError` where the state lacks a key that the template names.
    """

    def __init__(
        self,
        chat: ChatLatent,
        *,
        prompt: NodePrompt,
        mode: Literal["read", "think", "decode"] = "decode",
        writes: str | None = None,
        latent: str = "latent",
        inherit: str | Sequence[str] | Mapping[str, str] = "append",
        select: Selection | None = None,
        **options: Any,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} is unknown; known modes: {', '.join(MODES)}")
        steps = options.pop("steps", THINK_STEPS) if mode == "think" else None
        if mode != "decode" and (writes or options):
            raise ConfigError(f"mode={mode!r} writes no answer: leave out `writes` and decoding options")
        chat.check_options(options)
        self.chat = chat
        self.mode = mode
        self.writes = writes
        self.latent = latent
        self.steps = steps
        self.inherit = _inherit_modes(inherit, latent)
        self.select = select
        if select and "compose" not in self.inherit.values():
            raise ConfigError('select is for composed handles: pass inherit="compose" with it')
        self.options = options
        self._asked = prompt
        self._prompt = _prompt_function(prompt)

    def __getattr__(self, name: str) -> Any:
        """LangGraph files a node's cached results under the name of its callable: nodes that differ have others."""
        if name == "__qualname__":
            return f"LatentNode.{self._digest()}"
        raise AttributeError(f"a LatentNode has no attribute {name!r}")

    def _digest(self) -> str:
        """What its results follow from beside the state: the model and its options, the prompt, and its own options."""
        chat = self.chat.model_dump(exclude={"callbacks", "cache", "metadata", "name", "tags", "verbose"})
        tenant = self.chat.workspace.tenant if self.chat.workspace else ""
        own = (self.mode, self.writes, self.latent, self.steps, self.inherit, self.select, self.options)
        text = repr((sorted(chat.items()), tenant, own, _described(self._asked)))
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def invoke(self, input: Mapping[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the node on a state; the update for it."""
        messages, handles = self._begin(input, config)
        if self.mode == "read":
            return {self.latent: self.chat.read(messages, inherit=handles, config=config)}
        if self.steps is not None:
            return {self.latent: self.chat.think(messages, inherit=handles, steps=self.steps, config=config)}
        reply = self.chat.invoke(messages, config, inherit=handles, **self.options)
        handle = self._handle_of(reply) or self.chat.read([*messages, reply], inherit=handles, config=config)
        return self._update(reply, handle)

    async def ainvoke(
        self, input: Mapping[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """`invoke` without blocking the event loop."""
        messages, handles = self._begin(input, config)
        if self.mode == "read":
            return {self.latent: await self.chat.aread(messages, inherit=handles, config=config)}
        if self.steps is not None:
            return {self.latent: await self.chat.athink(messages, inherit=handles, steps=self.steps, config=config)}
        reply = await self.chat.ainvoke(messages, config, inherit=handles, **self.options)
        handle = self._handle_of(reply) or await self.chat.aread([*messages, reply], inherit=handles, config=config)
        return self._update(reply, handle)

    def _begin(self, state: Any, config: RunnableConfig | None) -> tuple[Sequence[BaseMessage], list[KVHandle]]:
        """The prompt's messages, and the handles under the inherited keys; a key that is not written yet adds none."""
        values = _state_values(state)
        is_in_graph = "langgraph_node" in (ensure_config(config).get("metadata") or {})
        for key in set(self.inherit) - set(values) if is_in_graph else ():
            warnings.warn(
                f"the graph's state has no key {key!r}, so nothing is inherited: declare "
                f"`{key}: Annotated[KVHandle | None, LatentChannel]` in its schema, or pass inherit=()",
                stacklevel=3,
            )
        messages = self._prompt(values)
        appended, composed = (self._inherited(values, mode) for mode in INHERIT_MODES)
        if not composed:
            return messages, appended
        system = messages[0] if messages and isinstance(messages[0], SystemMessage) else None
        handle = self.chat.compose(composed, system=system, select=self.select)
        return messages[1 if system else 0 :], [handle, *appended]

    def _inherited(self, state: Mapping[str, Any], mode: str) -> list[KVHandle]:
        handles: list[KVHandle] = []
        for key in (key for key, each in self.inherit.items() if each == mode):
            value = state.get(key)
            several = value if isinstance(value, list | tuple) else () if value is None else (value,)
            handles += map(KVHandle.given, several)
        return handles

    def _handle_of(self, reply: AIMessage) -> KVHandle | None:
        """The handle of a reply; None for one that LangChain's cache has from elsewhere: it is read as a message."""
        try:
            return self.chat.handle(reply)
        except UnknownHandleError:
            return None

    def _update(self, reply: AIMessage, handle: KVHandle) -> dict[str, Any]:
        update: dict[str, Any] = {self.latent: handle}
        if self.writes:
            update[self.writes] = [reply] if self.writes == "messages" else reply.text
        return update


def _described(prompt: NodePrompt) -> str:
    """A prompt as text that is equal in another process; of a function its name, its code and what that refers to."""
    code = getattr(prompt, "__code__", None)
    if code is None:
        return repr(prompt)
    cells = [cell.cell_contents for cell in getattr(prompt, "__closure__", None) or ()]
    defaults = (getattr(prompt, "__defaults__", None), getattr(prompt, "__kwdefaults__", None))
    name = f"{getattr(prompt, '__module__', '')}.{getattr(prompt, '__qualname__', '')}"
    return repr((name, _code(code), cells, defaults))


def _code(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without where it is written."""
    constants = [_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _inherit_modes(inherit: str | Sequence[str] | Mapping[str, str], latent: str) -> dict[str, str]:
    """State keys and how the handles under them are inherited."""
    if isinstance(inherit, str):
        inherit = {latent: inherit} if inherit in INHERIT_MODES else (inherit,)
    if not isinstance(inherit, Mapping | Sequence) or not all(isinstance(key, str) for key in (*inherit, latent)):
        raise ConfigError(f"inherit={inherit!r}: state keys are names; pass one, several, or a mapping of them")
    modes = dict(inherit) if isinstance(inherit, Mapping) else dict.fromkeys(inherit, "append")
    if unknown := [mode for mode in modes.values() if mode not in INHERIT_MODES]:
        raise ConfigError(f"inherit: {unknown[0]!r} is unknown; known modes: {', '.join(INHERIT_MODES)}")
    return modes


def _state_values(state: Any) -> Mapping[str, Any]:
    """A graph state (a mapping, a dataclass or a Pydantic model) as a mapping."""
    if isinstance(state, Mapping):
        return state
    if is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in fields(state)}
    return dict(state)


def _prompt_function(prompt: NodePrompt) -> Callable[[Mapping[str, Any]], Sequence[BaseMessage]]:
    if callable(prompt) and not isinstance(prompt, ChatPromptTemplate):
        return prompt
    template = (
        prompt
        if isinstance(prompt, ChatPromptTemplate)
        else ChatPromptTemplate.from_messages([("human", prompt)] if isinstance(prompt, str) else list(prompt))
    )

    def fill(state: Mapping[str, Any]) -> Sequence[BaseMessage]:
        if missing := [name for name in template.input_variables if name not in state]:
            raise PromptError(
                f"the prompt names {missing[0]!r}, but the state has only: {', '.join(sorted(state))}; "
                "write {{ and }} for braces that are meant as such"
            )
        names = (*template.input_variables, *template.optional_variables)
        return template.format_messages(**{name: state[name] for name in names if name in state})

    return fill
