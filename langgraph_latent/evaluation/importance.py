"""Which layers of a model carry what a context says: measured once per model, remembered for all processes.

It knows texts, one model and its predictions; nothing of handles, pools or edges.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.checks import is_number
from langgraph_latent.disk_cache import DiskCache
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, UnsupportedLayerError
from langgraph_latent.evaluation.metrics import kl
from langgraph_latent.evaluation.receiver import Start, predict, prefilled
from langgraph_latent.handle.tokens import common_tokens, unpack_tokens
from langgraph_latent.kv.state import KVState
from langgraph_latent.prompt.template import TemplateInputs

FILE = "importance.json"
VERSION = 1
"""Of the measurement: what another version remembered is not used."""


class Passage(NamedTuple):
    """A short context, a question about it, and its answer, which is given to the model and not sampled."""

    context: str
    question: str
    answer: str


PASSAGES = (
    Passage(
        "The cold store in hall 3 lost power at 04:10. Marta Lindqvist, who had the night shift, moved the vaccines to "
        "hall 7 within twenty minutes. The cause was a worn relay, which will be replaced on Friday.",
        "Who moved the vaccines, and where to?",
        "Marta Lindqvist moved the vaccines to hall 7.",
    ),
    Passage(
        "The bridge over the Orle was built in 1931 of grey granite. It is 212 metres long and carries two railway "
        "tracks. Trains cross it at 60 kilometres an hour, because the eastern pier has sunk by nine centimetres.",
        "Why do trains cross the bridge slowly?",
        "Trains cross it slowly because the eastern pier has sunk by nine centimetres.",
    ),
    Passage(
        "Order 5581 holds forty lamps, twelve chairs and a green carpet. It was paid in advance by the Hotel Aurora. "
        "The carpet will be late, since the mill in Porto is closed until March.",
        "Which part of the order will be late?",
        "The green carpet will be late, since the mill in Porto is closed until March.",
    ),
    Passage(
        "Doctor Imani Okoro found that the new seed grows with half the water. Her fields lie near the village of "
        "Tamsa, at a height of 1,400 metres. The harvest was 3.2 tonnes per hectare, a third more than the year "
        "before.",
        "How large was the harvest?",
        "The harvest was 3.2 tonnes per hectare, a third more than the year before.",
    ),
)
"""Where a caller gives none."""


def layer_importance(chat: ChatLatent, texts: Sequence[Passage] | None = None) -> tuple[float, ...]:
    """One score per cache layer, the higher the more important: how much the answers change without it.

    A score is the Kullback-Leibler divergence, in nats a token and averaged over the answers' tokens, between the
    model's predictions over the whole context and over a context that is hidden in this layer alone. `texts` are
    (context, question, answer); a few passages of our own by default. Measured with one model call per layer and text
    (44 s for SmolLM2-135M on a busy core), the same each time, and then remembered under the model's identity.

    The idea of sending some layers only is KVComm's (arXiv 2510.03346), which ranks them by the attention mass on the
    context and a Gaussian prior over depth. We measure instead, as that kept much more. `effect_kept` with
    SmolLM2-135M, eight passages that were not measured on, 75/50/25 % of 30 layers: measured .99/.97/.87; attention
    mass alone .96/.37/.11, with the prior at best .99/.53/.24 (of 4 settings); every so many layers .92/.70/.40; the
    last ones .99/.92/.29; two random choices .90/.69/.43 and .67/.50/.17. Dropping three at a time and
    measuring again, on two of the texts, keeps .99/.98/.91 and takes twice as long. In the other layers a receiver
    hides what was not sent. `pytest tests/test_importance.py -k held_out` checks the order on three passages.

        layers = best_layers(layer_importance(chat), 0.5)
        handle = chat.compose(doc, select=Selection(layers=layers))

    Raises `ConfigError` for impossible texts, `UnsupportedLayerError` for a model whose attention can't hide tokens,
    and what `ChatLatent.read` raises for the messages.
    """
    model, passages = chat.resident(), _checked(texts)
    content = hashlib.sha256(json.dumps([passages, chat.template_options], sort_keys=True).encode()).hexdigest()
    key = f"{model.spec.identity} {VERSION} {content}"
    num_layers, stored = len(model.kinds), DiskCache(FILE)
    if (known := stored.get(key)) is not None and _are_scores(known, num_layers):
        return tuple(known)
    read = _read(chat, model, passages)
    everywhere = set(range(num_layers))
    scores = [math.fsum(each.loss(everywhere - {layer}) for each in read) / len(read) for layer in everywhere]
    stored.put(key, scores)
    return tuple(scores)


def best_layers(scores: Sequence[float], share: float) -> tuple[int, ...]:
    """Indices of the most important layers, ascending: a share of them, rounded up. Equal scores: the lower layer.

    Raises `ConfigError` for no scores and for a share that is not above 0 and at most 1.
    """
    if not is_number(share) or not 0 < share <= 1:
        raise ConfigError(f"share={share!r} is impossible; it must be a part of the layers, above 0, at most 1")
    if not scores:
        raise ConfigError("there are no scores to choose layers by; pass those of layer_importance()")
    num_best = max(1, math.ceil(share * len(scores) - 1e-9))  # 0.1 * 30 is a little above 3
    ranked = sorted(range(len(scores)), key=lambda layer: -scores[layer])
    return tuple(sorted(ranked[:num_best]))


def effect_kept(chat: ChatLatent, layers: Collection[int], texts: Sequence[Passage] | None = None) -> float:
    """How much of a context's effect on the answers is left when it is seen in these layers only.

    1 minus the divergence from the predictions over the whole context, in parts of the divergence without any context:
    1 where nothing changes, 0 where it is as if the context were not there. Nothing is remembered.

    Raises what `layer_importance` raises, and `ConfigError` for layers that the model does not have.
    """
    model = chat.resident()
    if not all(layer in range(len(model.kinds)) for layer in layers):
        raise ConfigError(f"layers={layers!r} is impossible; the model's are 0 to {len(model.kinds) - 1}")
    read = _read(chat, model, _checked(texts))
    without = math.fsum(each.loss(()) for each in read)
    return 1 - math.fsum(each.loss(layers) for each in read) / without if without else 1.0


class _ReadPassage:
    """One passage as the model reads it, and what it predicts for the answer.

        | system prefix | context | question | answer |
        0             begin     num_tokens

    The system prefix, which leads every conversation, is never hidden.
    """

    def __init__(self, model: ResidentModel, passage: Passage, template_inputs: TemplateInputs) -> None:
        context, question = ({"role": "user", "content": text} for text in (passage.context, passage.question))
        prefix = model.prompts.system_prefix([], template_inputs)
        read = model.prompts.write([context], template_inputs, reply=False).tokens
        asked = model.prompts.write([context, question], template_inputs, reply=True).tokens
        num_tokens = common_tokens(read, asked)
        ids = unpack_tokens(asked)
        self._model = model
        self._begin = common_tokens(prefix, asked)
        self._state, self._asked = prefilled(model, ids[:num_tokens]), ids[num_tokens:]
        self._answer: list[int] = model.tokenizer.encode(passage.answer, add_special_tokens=False)
        self._whole = self._predictions(range(len(model.kinds)))

    def loss(self, layers: Collection[int]) -> float:
        """Divergence from the predictions over the whole context, in nats a token, when `layers` alone see it."""
        return float(kl(self._whole, self._predictions(layers)).mean())

    def _predictions(self, layers: Collection[int]) -> torch.Tensor:
        return predict(self._model, Start(self._seen_in(layers), self._asked), self._answer)

    def _seen_in(self, layers: Collection[int]) -> KVState:
        """The state with its context hidden in all other layers, as a composed handle's is."""
        hidden = torch.zeros(self._state.num_tokens, device=self._model.device)
        hidden[self._begin :] = -math.inf
        seen = torch.zeros_like(hidden)
        return self._state.with_biases(
            tuple(seen if layer in layers else hidden for layer in range(len(self._model.kinds)))
        )


def _read(chat: ChatLatent, model: ResidentModel, passages: Sequence[Passage]) -> list[_ReadPassage]:
    if refusal := model.spec.capabilities.refusal("batch"):
        raise UnsupportedLayerError(f"a context can't be hidden in some layers of {chat.model!r}: {refusal}")
    template_inputs = TemplateInputs((), chat.template_options)
    return [_ReadPassage(model, passage, template_inputs) for passage in passages]


def _checked(texts: Sequence[Passage] | None) -> list[Passage]:
    passages = [*(PASSAGES if texts is None else texts)]
    for passage in passages:
        is_sequence = isinstance(passage, Sequence) and not isinstance(passage, str)
        if not is_sequence or len(passage) != 3 or not all(isinstance(text, str) and text for text in passage):
            raise ConfigError(
                f"{passage!r} is not a passage; it must be a context, a question and an answer, each some text"
            )
    if not passages:
        raise ConfigError("there are no texts to measure on; pass at least one, or None for the built-in ones")
    return [Passage(*passage) for passage in passages]


def _are_scores(known: object, num_layers: int) -> bool:
    """Whether a remembered value is one finite number per layer."""
    return (
        isinstance(known, list)
        and len(known) == num_layers
        and all(isinstance(score, float) and math.isfinite(score) for score in known)
    )
