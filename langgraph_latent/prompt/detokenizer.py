"""Sampled token ids to text, token by token: no half characters, no stop strings. It knows no templates and no models.

The work for a token does not grow with the answer. `tokenizers`' own `DecodeStream` decodes wherever the tokenizer is a
plain fast one. It has no answer to three things, for which the last few ids are decoded here by the tokenizer itself:

* the text of tokens that end within a character, when no more tokens come;
* a run of tokens that never ends with a whole character: the stream would keep all of it;
* byte fallback: garbage after a byte makes the characters before it garbage too, and the stream raises. Text that was
  sent stays as it was sent.

The pieces add up to what decoding all ids at once gives, but for that last case.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are not a whole character yet."""
MAX_PENDING = 16
"""Tokens that wait for the rest of a character; so many are garbage. A character has at most four bytes."""
MIN_PENDING = 4
"""Tokens that still wait when garbage is given up: the last character among them may become whole."""


class IncrementalDecoder:
    """Text of token ids, as soon as no later id can change it.

    ```
    ids   ... ... ... [ before ][ pending ]
    text  sent ...... sent ..... sent|unfinished character
    ```

    `before` are the ids of the last piece. They are decoded again with the pending ids, because the first token of a
    text may be written without its leading space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._stream: Any = DecodeStream(skip_special_tokens=False) if _is_plain(tokenizer) else None
        self._before: list[int] = []
        self._pending: list[int] = []
        self._num_sent = 0  # letters of the pending ids' text

    def push(self, token: int) -> str:
        """Add a token; the text that became certain."""
        self._pending.append(token)
        streamed = self._streamed(token)
        text = streamed or self._text_of(self._before, self._pending)
        piece = self._send(text.rstrip(UNFINISHED))
        if text and not text.endswith(UNFINISHED):
            self._stream = self._stream if streamed else None  # else it would give this text once more
            self._before, self._pending, self._num_sent = self._pending, [], 0
        elif len(self._pending) > MAX_PENDING:
            piece += self._give_up(text)
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return self._send(self._text_of(self._before, self._pending)) if self._pending else ""

    def _streamed(self, token: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        except Exception:  # noqa: BLE001 - what it raises where a token changes the text before it
            self._stream = None
            return ""

    def _text_of(self, before: list[int], ids: list[int]) -> str:
        """The text of ids that follow others."""
        return self._decode([*before, *ids])[len(self._decode(before)) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _send(self, text: str) -> str:
        """What of the pending ids' text was not sent yet."""
        piece = text[self._num_sent :]
        self._num_sent += len(piece)
        return piece

    def _give_up(self, text: str) -> str:
        """Stop waiting for all but the last of the pending ids, and send their text.

        They are cut between two characters: there the texts of both sides add up to the text of all.
        """
        self._stream = None
        cuts = range(len(self._pending) - MIN_PENDING, 0, -1)
        cut = next((cut for cut in cuts if "".join(self._halves(cut)) == text), cuts[0])
        settled, _ = self._halves(cut)
        piece = self._send(settled)
        self._num_sent -= len(settled)
        self._before, self._pending = self._pending[:cut] if settled else self._before, self._pending[cut:]
        return piece

    def _halves(self, cut: int) -> tuple[str, str]:
        """The text of the pending ids up to `cut`, and from there on."""
        head, rest = self._pending[:cut], self._pending[cut:]
        settled = self._text_of(self._before, head)
        return settled, self._text_of(head if settled else self._before, rest)


class Detokenizer:
    """Text from sampled tokens, as early as it is certain: no half characters, nothing that may begin a stop string.

    Special tokens are left out, but for those `shown`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), shown: Collection[int] = ()
    ) -> None:
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._hidden = special.union(tokenizer.all_special_ids).difference(shown)
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = tuple(stop)
        self._unsent = ""  # may begin a stop string
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was sent."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Add a token; the text that became certain. Sets `stopped` where a stop string is complete."""
        if token in self._hidden:
            return ""
        text = self._unsent + self._decoder.push(token)
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._send(text[: min(found)], "")
        return self._send(*split_certain(text, self._stop))

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return "" if self.stopped else self._send(self._unsent + self._decoder.flush(), "")

    def _send(self, piece: str, unsent: str) -> str:
        self._pieces.append(piece)
        self._unsent = unsent
        return piece


def split_certain(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """A text without what at its end may begin one of the marks, and that end."""
    held = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - held], text[len(text) - held :]


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer's text is what its `tokenizers` backend decodes, with nothing done to it afterwards."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )
