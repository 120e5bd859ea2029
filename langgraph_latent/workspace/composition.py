"""Handles made of parts of others for one model: after a system prompt, by selections, within a budget of tokens.

It knows the services, the model and handles; not LangChain's messages. What it makes is computed when it is inherited.
"""

from __future__ import annotations

from collections.abc import Sequence

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, ModelMismatchError, TemplateError
from langgraph_latent.handle.compose import compose_after, composed, merge, repaired, system_prefix_of
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.selection import EVERY_KIND, WHOLE, Selection, excerpt_of
from langgraph_latent.kv.scorers import budget_spans
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.workspace.request import Caller
from langgraph_latent.workspace.services import Services


def compose_handles(
    services: Services,
    handles: Sequence[KVHandle],
    model: ResidentModel,
    system: Message | None,
    template_inputs: TemplateInputs,
    *,
    select: Selection | Sequence[Selection] | None,
    repair: Repair | None,
) -> KVHandle:
    """One handle of parts of others, as `ChatLatent.compose` describes it. `system` is a message, rendered with
    `template_inputs`.

    Raises `HandleError` for handles of other models or tenants, and `ConfigError` for an impossible selection.
    """
    if not handles:
        raise ConfigError("there is nothing to compose; pass at least one handle")
    for handle in handles:
        services.keeper.check(handle)
        if handle.model != model.spec.identity:
            raise ModelMismatchError(f"handle {handle.id} is of another model than {model.spec.name!r}; re-read it")
    if system is None and select is None:
        return repaired(merge(handles), repair)
    selections = _selections(select, handles, model)
    if system is None:
        prefix = system_prefix_of(handles[0])
    else:
        prefix = _rendered_system_prefix(system, model, template_inputs, services.keeper.tenant)
    return repaired(compose_after(prefix, handles, selections), repair)


def _rendered_system_prefix(
    system: Message, model: ResidentModel, template_inputs: TemplateInputs, tenant: str
) -> KVHandle:
    """The handle of a system prompt alone. Raises `TemplateError` where the template does not set it apart."""
    tokens = model.prompts.system_prefix([system], template_inputs)
    if not tokens:
        raise TemplateError(
            f"the chat template of {model.spec.name!r} does not part a system message from what follows; leave it out"
        )
    root, size = KVHandle.root(model.spec.identity, tenant), model.spec.bytes_per_token
    return root.extend("system", "", tokens, [system], size, inputs_digest=template_inputs.digest)


def within_budget(
    services: Services,
    handle: KVHandle,
    num_tokens: int,
    model: ResidentModel,
    caller: Caller,
    *,
    sinks: int,
    window: int,
) -> KVHandle:
    """A handle of the tokens of a handle's cache that matter most, as `ChatLatent.within_budget` describes it.

    Raises `ConfigError` for an impossible budget, `UnsupportedLayerError` for layers that keep no key per token, and
    `HandleError`.
    """
    services.keeper.check(handle)
    if num_tokens >= handle.num_tokens:
        return handle
    state = services.materializer.whole_state_of(handle, model, caller)
    spans = budget_spans(state, num_tokens, sinks=sinks, window=window)
    kept = excerpt_of(handle, Selection(kinds=EVERY_KIND, spans=spans))
    return composed(KVHandle.root(handle.model, handle.tenant), [kept])


def _selections(
    select: Selection | Sequence[Selection] | None, handles: Sequence[KVHandle], model: ResidentModel
) -> Sequence[Selection]:
    """One selection for each handle. Raises `ConfigError` where they do not fit the handles or the model."""
    each = WHOLE if select is None else select
    selections = [each] * len(handles) if isinstance(each, Selection) else each
    if not isinstance(selections, list | tuple) or not all(isinstance(one, Selection) for one in selections):
        raise ConfigError(f"select={select!r} is not a Selection or a list of them")
    if len(selections) != len(handles):
        raise ConfigError(f"{len(selections)} selections do not fit {len(handles)} handles; pass one for all, or each")
    for selection in selections:
        selection.check_layers(len(model.spec.layers))
    return selections
