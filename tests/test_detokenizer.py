"""Text comes out of sampled tokens once it is sure. It is what a decode of all says, and no token decodes all again."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from langgraph_latent.prompt.detokenizer import MAX_PENDING, UNFINISHED, Detokenizer, IncrementalDecoder
from langgraph_latent.testing import tiny_tokenizer

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def byte_fallback_tokenizer(*more: str, decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """As of Llama 2, Mistral and Gemma: a character without a token of its own is one token per byte."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", *more]
    vocab = {word: index for index, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    bpe.decoder = decoder or decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


@pytest.fixture(scope="module")
def smol_tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


def stream(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: tuple[str, ...] = ()
) -> tuple[Detokenizer, list[str]]:
    """Every piece, the flushed one last; ends where a stop string is complete, as decoding does."""
    detokenizer, pieces = Detokenizer(tokenizer, stop), []
    for token in ids:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.flush())
    return detokenizer, pieces


TINY = tiny_tokenizer()
FALLBACK = byte_fallback_tokenizer()
TOKENIZERS = {"byte_level": TINY, "byte_fallback": FALLBACK}
answers = st.text(
    st.sampled_from("ab\N{GRINNING FACE}é\N{EURO SIGN}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}"), max_size=14
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=answers)
def test_pieces_add_up_to_the_text_and_never_hold_half_a_character(name: str, text: str) -> None:
    """Field case 16: streamed text is the text, also where a character takes four tokens."""
    tokenizer = TOKENIZERS[name]
    detokenizer, pieces = stream(tokenizer, encode(tokenizer, text))
    assert "".join(pieces) == detokenizer.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_whatever_was_sampled(name: str, data: st.DataObject) -> None:
    """Random bytes are not text; still, the streamed pieces are the text."""
    tokenizer = TOKENIZERS[name]
    stop = data.draw(st.sampled_from([(), ("ab",), ("a\N{REPLACEMENT CHARACTER}b",), ("b", "aab"), ("aé", "a")]))
    ids = data.draw(st.lists(st.integers(3, len(tokenizer) - 1), max_size=14))
    detokenizer, pieces = stream(tokenizer, ids, stop)
    assert "".join(pieces) == detokenizer.text
    if not detokenizer.stopped and name == "byte_level":  # byte fallback unmakes earlier characters beside garbage
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=answers, stop=st.lists(answers.filter(bool), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string_and_nothing_of_it_is_streamed(
    name: str, text: str, stop: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text)
    detokenizer, pieces = stream(tokenizer, ids, tuple(stop))
    sent = "".join(pieces)
    assert sent == detokenizer.text
    assert detokenizer.stopped == any(one in text for one in stop)
    assert not any(one in sent for one in stop)
    assert text.startswith(sent)
    if not detokenizer.stopped:
        assert sent == text


def test_a_stop_string_that_is_spread_over_tokens_is_held_back_until_it_is_sure() -> None:
    letters = [index for letter in "the END" for index in encode(TINY, letter)]
    detokenizer, pieces = stream(TINY, letters, ("END",))
    assert detokenizer.stopped
    assert detokenizer.text == "".join(pieces) == "the "
    assert pieces[:4] == ["t", "h", "e", " "]
    false_alarm = [index for letter in "ENough" for index in encode(TINY, letter)]
    detokenizer, pieces = stream(TINY, false_alarm, ("END",))
    assert pieces[:3] == ["", "", "ENo"]
    assert detokenizer.text == "ENough"


def test_a_character_is_sent_as_soon_as_its_last_byte_is_there() -> None:
    ids = encode(TINY, "a\N{GRINNING FACE}b")
    assert len(ids) == 6
    assert stream(TINY, ids)[1] == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]


def test_what_stays_half_is_flushed_at_the_end() -> None:
    ids = encode(TINY, "a\N{GRINNING FACE}")[:3]
    detokenizer, pieces = stream(TINY, ids)
    assert detokenizer.text == "".join(pieces) == "a\N{REPLACEMENT CHARACTER}"


def test_end_tokens_are_no_text() -> None:
    detokenizer, pieces = stream(TINY, encode(TINY, "the team<|im_end|>"))
    assert detokenizer.text == "".join(pieces) == "the team"


def test_a_real_tokenizers_pieces_add_up(smol_tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Plan B: naïve café — 東京 \N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}!\n\n```python\nx = {'a': 1}\n```  end ."
    detokenizer, pieces = stream(smol_tokenizer, encode(smol_tokenizer, text))
    assert "".join(pieces) == detokenizer.text == text
    assert len([piece for piece in pieces if piece]) > 15


# -- the same text as a decode of everything -------------------------------------------------------------------------


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2: spaces belong to the words after them, and the text's first one is left out."""
    decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return byte_fallback_tokenizer(SPACE, SPACE * 2, f"{SPACE}a", f"{SPACE}b", decoder=decoder)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    words = (SPACE, SPACE * 2, f"{SPACE}a", f"{SPACE}b")
    return byte_fallback_tokenizer(*words, decoder=decoders.Metaspace(prepend_scheme="always"))


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "a", "b", "##a", "##b", "do", "not", "n't", "'s", ".", ",", "##.", "##ing"]
    pieces = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")


class Shouting(PreTrainedTokenizerFast):
    """A fast one that does more to the text than its backend."""

    def _decode(self, *ids: object, **options: object) -> str:
        return super()._decode(*ids, **options).upper()


SHOUTING = Shouting(tokenizer_object=TINY.backend_tokenizer, eos_token="<|im_end|>")
ALL = {
    **TOKENIZERS,
    "llama": llama_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "word pieces": word_piece_tokenizer(),
    "overridden": SHOUTING,
    "slow": ByT5Tokenizer(extra_ids=0),
}
UNMAKES = ("byte_fallback", "llama")
"""Byte fallback: garbage makes the characters before it garbage too, which were sent by then."""


@cache
def halves(name: str) -> list[int]:
    """The tokens that are not text by themselves."""
    return [token for token in range(len(ALL[name])) if ALL[name].decode([token]) in ("", UNFINISHED)]


def check_like_decoding_all(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, may_unmake: bool = False) -> None:
    detokenizer, pieces = stream(tokenizer, ids)
    shown = [token for token in ids if token not in detokenizer._hidden]
    want = tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == detokenizer.text
    if not (may_unmake and UNFINISHED in want):
        assert detokenizer.text == want


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_text_is_what_a_decode_of_all_tokens_says(name: str, data: st.DataObject) -> None:
    """Any ids, those without a token too; runs of garbage longer than the decoder waits for."""
    tokenizer = ALL[name]
    tokens = st.integers(
        0, len(tokenizer) - 1 + 2 * tokenizer.is_fast
    )  # a slow one raises for an id that it does not know
    runs = st.lists(st.sampled_from(halves(name) or [0]), max_size=2 * MAX_PENDING)
    parts = data.draw(st.lists(st.lists(tokens, max_size=12) | runs, max_size=4))
    check_like_decoding_all(tokenizer, [token for part in parts for token in part], may_unmake=name in UNMAKES)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_so_it_is_with_a_real_tokenizer(smol_tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(smol_tokenizer) - 1), max_size=60))
    check_like_decoding_all(smol_tokenizer, ids)
    check_like_decoding_all(smol_tokenizer, encode(smol_tokenizer, data.draw(st.text(max_size=40))))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_so_it_is_with_another_real_tokenizer(tool_model: Path, data: st.DataObject) -> None:
    tokenizer = qwen_tokenizer(tool_model)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    check_like_decoding_all(tokenizer, ids)
    check_like_decoding_all(tokenizer, encode(tokenizer, data.draw(st.text(max_size=40))))


@cache
def qwen_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_only_a_plain_fast_tokenizer_is_decoded_by_its_backend() -> None:
    assert IncrementalDecoder(TINY)._stream is not None
    assert all(IncrementalDecoder(ALL[name])._stream is None for name in ("overridden", "slow"))


@pytest.mark.parametrize("name", ALL)
def test_no_token_decodes_the_whole_answer_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few ids each, also where nothing but halves of characters comes."""
    tokenizer, sizes = ALL[name], [0]
    decode = tokenizer.decode

    def counted(ids: list[int], **options: object) -> str:
        sizes.append(len(ids))
        return decode(ids, **options)

    half = next(iter(halves(name)), 3)
    monkeypatch.setattr(tokenizer, "decode", counted)
    for ids in ([half] * 300, [half, 3, 4] * 100, [3, 4, 5] * 100):
        stream(tokenizer, ids, ("a stop string",))
    assert max(sizes) <= 2 * (MAX_PENDING + 1)


def test_a_stop_string_in_front_of_half_a_character_is_found_at_once() -> None:
    """Some tokens end a word and begin a character."""
    bpe = Tokenizer(models.BPE({**TINY.backend_tokenizer.get_vocab(), "ENDð": len(TINY)}, []))
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert tokenizer.decode([len(TINY)]) == f"END{UNFINISHED}"
    detokenizer, pieces = stream(tokenizer, [*encode(TINY, "the "), len(TINY), *encode(TINY, "more")], ("END",))
    assert detokenizer.stopped
    assert detokenizer.text == "the "
    assert len(pieces) == len(encode(TINY, "the ")) + 2, "the token after it was not needed"
    assert stream(tokenizer, [len(TINY), len(TINY)])[1] == ["END", f"{UNFINISHED}END", UNFINISHED]
