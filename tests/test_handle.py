"""A handle survives every trip, stays small, and refuses to be anything but what was made. No model, no tensors."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import random
import re
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typing_extensions import TypedDict

from langgraph_latent.errors import HandleError, LatentError
from langgraph_latent.handle import KVHandle, Segment
from langgraph_latent.handle.segment import LatentSteps
from langgraph_latent.handle.tokens import common_tokens, pack_tokens, unpack_tokens

MODEL = "5f" * 16
SERDE = JsonPlusSerializer(allowed_msgpack_modules=[("langgraph_latent", "KVHandle")])
BIG_BOMB_BYTES = 100 << 20

# Any character a message can hold, lone surrogates (half an emoji, cut by a buggy tool) included.
texts = st.text(st.characters(), max_size=40)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
chat_messages = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from("ab"), texts)
message_lists = st.lists(chat_messages, max_size=3)
segments = st.one_of(
    st.tuples(st.sampled_from(["system", "prompt", "generated"]), texts, token_lists, message_lists),
    st.tuples(st.just("latent"), texts, st.integers(0, 40).map(lambda steps: [0] * steps), message_lists),
)


def handle_of(*rows: tuple[str, str, list[int], list[dict[str, Any]]], tenant: str = "") -> KVHandle:
    """A handle grown segment by segment."""
    handle = KVHandle.root(MODEL, tenant)
    for kind, source, ids, messages in rows:
        provenance = LatentSteps(len(ids)) if kind == "latent" else None
        handle = handle.extend(kind, source, pack_tokens(ids), messages, bytes_per_token=100, provenance=provenance)
    return handle


def example() -> KVHandle:
    return handle_of(
        ("prompt", "reader", [5, 6, 70_000, 7], [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]),
        ("generated", "router", [8, 9], [{"role": "assistant", "content": "a"}]),
    )


def packed(data: bytes) -> str:
    return b64encode(zlib.compress(data, 9)).decode()


# -- reading it ------------------------------------------------------------------------------------------------------


def test_a_handle_says_how_long_it_is_who_made_it_and_what_it_holds() -> None:
    """Field case 68: it is plain which tokens are prompt and which were generated, and by whom."""
    handle = example()
    assert handle.num_tokens == 6
    assert handle.token_ids == (5, 6, 70_000, 7, 8, 9)
    assert handle.source == "router"
    assert handle.model == MODEL
    assert handle.nbytes == 600
    assert [message["content"] for message in handle.messages] == ["s", "q", "a"]
    assert [(s.kind, s.source, s.num_tokens) for s in handle.segments] == [
        ("prompt", "reader", 4),
        ("generated", "router", 2),
    ]


def test_the_root_handle_is_empty() -> None:
    root = KVHandle.root(MODEL)
    assert (root.num_tokens, root.token_ids, root.source, root.messages, root.nbytes) == (0, (), "", (), 0)
    assert KVHandle.from_dict(root.to_dict()) == root


def test_extending_leaves_the_parent_as_it_was() -> None:
    parent = example()
    before = (parent.id, parent.tokens, parent.segments, hash(parent))
    child = parent.extend("prompt", "next", pack_tokens([1]), [{"role": "user", "content": "more"}])
    assert (parent.id, parent.tokens, parent.segments, hash(parent)) == before
    assert child.token_ids == (*parent.token_ids, 1)
    assert child.id != parent.id


def test_an_unknown_segment_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HandleError, match=r"dream.*system, prompt, generated, latent, moved"):
        handle_of(("dream", "n", [1], []))


@pytest.mark.parametrize("field", ["id", "model", "tenant", "nbytes", "tokens", "segments"])
def test_no_field_can_be_set(field: str) -> None:
    handle = example()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(handle, field, getattr(handle, field))
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(handle, field)


def test_a_handle_does_not_change_with_the_messages_it_was_made_from() -> None:
    """Law 5: an agent that edits its message list afterwards can't change a handle that is already on an edge."""
    message = {"role": "user", "content": "before", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    handle = handle_of(("prompt", "n", [1, 2], [message]))
    message["content"] = "after"
    message["tool_calls"][0]["function"]["arguments"]["x"] = 2  # type: ignore[index]
    assert handle.messages[0]["content"] == "before"
    assert handle.messages[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert KVHandle.from_dict(handle.to_dict()) == handle


def test_a_framing_is_part_of_the_id_and_is_not_taken_for_tokens() -> None:
    root = KVHandle.root("m")
    plain, framed = (root.extend("prompt", "n", pack_tokens([5]), [], inputs_digest=name) for name in ("", "f00d"))
    assert plain.id != framed.id
    assert KVHandle.from_dict(framed.to_dict()) == framed
    shifted = root.extend("prompt", "n", pack_tokens([7]), [], inputs_digest="\x05\0\0\0")
    assert shifted.id != root.extend("prompt", "n", pack_tokens([5, 7]), []).id


def test_equal_handles_are_equal_and_any_difference_is_another_id() -> None:
    message = {"role": "user", "content": "q"}
    same = handle_of(("prompt", "n", [1, 2], [message]))
    assert same == handle_of(("prompt", "n", [1, 2], [message]))
    assert hash(same) == hash(handle_of(("prompt", "n", [1, 2], [message])))
    others = [
        handle_of(("generated", "n", [1, 2], [message])),
        handle_of(("prompt", "m", [1, 2], [message])),
        handle_of(("prompt", "n", [1, 3], [message])),
        handle_of(("prompt", "n", [1, 2, 0], [message])),
        handle_of(("prompt", "n", [1, 2], [{"role": "user", "content": "Q"}])),
        handle_of(("prompt", "n", [1, 2], [message]), tenant="acme"),
        handle_of(("prompt", "n", [1], [message]), ("prompt", "n", [2], [])),
        KVHandle.root("ab" * 16).extend("prompt", "n", pack_tokens([1, 2]), [message]),
    ]
    assert len({same.id, *(other.id for other in others)}) == len(others) + 1
    assert len({same, *others}) == len(others) + 1


# -- trips -----------------------------------------------------------------------------------------------------------

TRIPS: dict[str, Callable[[KVHandle], KVHandle]] = {
    "to_dict": lambda handle: KVHandle.from_dict(handle.to_dict()),
    "json": lambda handle: KVHandle.from_dict(json.loads(json.dumps(handle.to_dict()))),
    "pickle": lambda handle: pickle.loads(pickle.dumps(handle)),
    "deepcopy": copy.deepcopy,
    "langgraph": lambda handle: SERDE.loads_typed(SERDE.dumps_typed(handle)),
}


@pytest.mark.parametrize("trip", TRIPS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(segments, max_size=4), tenant=st.sampled_from(["", "acme"]))
def test_every_trip_gives_an_equal_handle_back(trip: str, rows: list[Any], tenant: str) -> None:
    """Field cases 46 and 48: LangGraph's serialiser gives the class back, not a mapping, and warns of nothing."""
    handle = handle_of(*rows, tenant=tenant)
    back = TRIPS[trip](handle)
    assert type(back) is KVHandle
    assert back == handle
    assert hash(back) == hash(handle)
    assert (back.id, back.token_ids, back.messages, back.nbytes) == (
        handle.id,
        handle.token_ids,
        handle.messages,
        handle.nbytes,
    )
    back.verify()


@pytest.mark.parametrize("trip", TRIPS)
def test_a_second_trip_changes_nothing(trip: str) -> None:
    once = TRIPS[trip](example())
    assert TRIPS[trip](once).to_dict() == once.to_dict() == example().to_dict()


def test_messages_survive_as_plain_json_whatever_their_containers() -> None:
    """Tool arguments may hold tuples and integer keys; a handle holds what JSON keeps of them, from the start."""
    arguments = {"rows": (1, 2), 3: "three", "deep": {"unicode": "\N{GRINNING FACE}", "none": None, "yes": True}}
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": arguments}}
    handle = handle_of(("generated", "n", [1], [{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert KVHandle.from_dict(handle.to_dict()) == handle


@settings(max_examples=100, deadline=None)
@given(ids=token_lists)
def test_packed_tokens_unpack_to_the_same_ids(ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert len(pack_tokens(ids)) == 4 * len(ids)


def naive_common(a: list[int], b: list[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


# Ids that share bytes: a comparison that stops inside a token must count only whole tokens.
alike = st.sampled_from([0, 1, 256, 257, 65_536, 65_537, 1 << 24, (1 << 24) + 1, 2**32 - 1])


@settings(max_examples=400, deadline=None)
@given(shared=st.lists(alike, max_size=30), a=st.lists(alike, max_size=10), b=st.lists(alike, max_size=10))
def test_common_tokens_counts_like_a_plain_loop(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    assert common_tokens(pack_tokens(left), pack_tokens(right)) == naive_common(left, right)
    assert common_tokens(pack_tokens(right), pack_tokens(left)) == naive_common(left, right)


# -- size ------------------------------------------------------------------------------------------------------------

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS = re.findall(
    r"\w+",
    "the report of a team that reads it and writes what matters for budget latency outage customer refund plan "
    "deadline because however nobody could explain why every third request failed during migration between regions",
)


def english(rng: random.Random, num_words: int) -> str:
    """Words with the repetition of prose, and a made-up one (a name, a number) in every eight."""
    words = [
        rng.choice(WORDS) if rng.random() < 0.87 else "".join(rng.choices(LETTERS, k=rng.randint(4, 9)))
        for _ in range(num_words)
    ]
    return " ".join(words)


def emoji(rng: random.Random, count: int) -> str:
    ranges = [(0x1F300, 0x1FAFF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x0600, 0x06FF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(count))


def one_chat(text: str, encode: Callable[[str], list[int]]) -> KVHandle:
    message = {"role": "user", "content": text}
    return handle_of(("prompt", "reader", encode(f"<|im_start|>user\n{text}<|im_end|>\n"), [message]))


def loop_of_turns(rng: random.Random, encode: Callable[[str], list[int]]) -> KVHandle:
    handle = KVHandle.root(MODEL)
    for turn in range(300):
        question, answer = english(rng, 6), english(rng, 5)
        asked = encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        handle = handle.extend("prompt", "planner", pack_tokens(asked), [{"role": "user", "content": question}])
        said = [{"role": "assistant", "content": f"{answer} {turn}"}]
        handle = handle.extend("generated", "planner", pack_tokens(encode(f"{answer} {turn}<|im_end|>")), said)
    return handle


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> KVHandle:
    ids = [rng.randrange(vocabulary) for _ in range(count)]
    return handle_of(("prompt", "thinker", ids, [{"role": "user", "content": "think"}]))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kind", ["english", "turns", "code", "emoji", "one_token", "random_151k", "random_151k_long", "noise_as_text"]
)
def test_a_serialised_handle_takes_at_most_8_bytes_a_token_and_2_kb(
    kind: str, seed: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    rng = random.Random(seed)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    noise = [rng.randrange(len(tokenizer)) for _ in range(4000)]
    makers: dict[str, Callable[[], KVHandle]] = {
        "english": lambda: one_chat(english(rng, 1500), encode),
        "turns": lambda: loop_of_turns(rng, encode),
        "code": lambda: one_chat(Path(json.__file__).read_text() + Path(copy.__file__).read_text(), encode),
        "emoji": lambda: one_chat(emoji(rng, 1500), encode),
        "one_token": lambda: random_tokens(rng, 1, 151_000),
        "random_151k": lambda: random_tokens(rng, 300, 151_936),
        "random_151k_long": lambda: random_tokens(rng, 20_000, 151_936),
        "noise_as_text": lambda: handle_of(
            ("generated", "babbler", noise, [{"role": "assistant", "content": tokenizer.decode(noise)}])
        ),
    }
    handle = makers[kind]()
    _, blob = SERDE.dumps_typed(handle)
    assert len(blob) <= 8 * handle.num_tokens + 2048, f"{len(blob) / handle.num_tokens:.2f} bytes a token"


# -- refusals --------------------------------------------------------------------------------------------------------


def forged(**changes: Any) -> dict[str, Any]:
    return {**example().to_dict(), **changes}


def with_rows(rows: object) -> dict[str, Any]:
    return forged(segments=packed(json.dumps({"version": 2, "sources": [], "rows": rows}).encode()))


ROWS = [
    ["prompt", "reader", 4, [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]],
    ["generated", "router", 2, [{"role": "assistant", "content": "a"}]],
]


def altered_row(index: int, at: int, value: object) -> dict[str, Any]:
    rows = copy.deepcopy(ROWS)
    rows[index][at] = value
    return with_rows(rows)


def deep(num: int) -> bytes:
    return b'[["prompt","n",3,' + b"[" * num + b"]" * num + b"]]"


ALTERED: dict[str, Callable[[], object]] = {
    "another id": lambda: forged(id="kv-" + "0" * 32),
    "another model": lambda: forged(model="ab" * 16),
    "another tenant": lambda: forged(tenant="someone"),
    "another token": lambda: forged(tokens=packed(b"\x04" + pack_tokens([5, 6, 70_000, 7, 8, 10]))),
    "a token more": lambda: forged(tokens=packed(b"\x04" + pack_tokens([5, 6, 70_000, 7, 8, 9, 1]))),
    "a token less": lambda: forged(tokens=packed(b"\x04" + pack_tokens([5, 6, 70_000, 7, 8]))),
    "another kind": lambda: altered_row(1, 0, "prompt"),
    "an unknown kind": lambda: altered_row(1, 0, "dream"),
    "another source": lambda: altered_row(0, 1, "admin"),
    "another split": lambda: with_rows([[*ROWS[0][:2], 3, ROWS[0][3]], [*ROWS[1][:2], 3, ROWS[1][3]]]),
    "a negative length": lambda: altered_row(1, 2, -2),
    "a length that is no integer": lambda: altered_row(1, 2, 2.0),
    "an absurd length": lambda: altered_row(1, 2, 10**30),
    "another message": lambda: altered_row(1, 3, [{"role": "assistant", "content": "b"}]),
    "a segment more": lambda: with_rows([*ROWS, ["prompt", "x", 0, []]]),
    "segments swapped": lambda: with_rows(ROWS[::-1]),
    "segments that are a number": lambda: with_rows(5),
    "a segment that is text": lambda: with_rows(["abcd"]),
    "a segment that is null": lambda: with_rows([None]),
    "half a token": lambda: forged(tokens=packed(b"\x04" + pack_tokens([5, 6]) + b"\x00")),
    "an unknown token width": lambda: forged(tokens=packed(b"\x03" + pack_tokens([5, 6]))),
    "no token width": lambda: forged(tokens=packed(b"")),
    "tokens that are not base64": lambda: forged(tokens="\N{SNOWMAN}"),
    "tokens that are not deflated": lambda: forged(tokens=b64encode(b"plain bytes").decode()),
    "tokens cut short": lambda: forged(tokens=example().to_dict()["tokens"][:-8]),
    "tokens with a tail": lambda: forged(
        tokens=b64encode(zlib.compress(b"\x04" + example().tokens) + b"tail").decode()
    ),
    "tokens without their checksum": lambda: forged(
        tokens=b64encode(zlib.compress(b"\x04" + example().tokens)[:-4]).decode()
    ),
    "no text in the tokens": lambda: forged(tokens=""),
    "segments that are not JSON": lambda: forged(segments=packed(b"{]")),
    "segments that are not UTF-8": lambda: forged(segments=packed(b'["\xff"]')),
    "a field too few": lambda: {name: value for name, value in example().to_dict().items() if name != "nbytes"},
    "a field too many": lambda: forged(extra="x"),
    "tokens of a wrong type": lambda: forged(tokens=b"bytes"),
    "a size of a wrong type": lambda: forged(nbytes="600"),
    "a tenant of a wrong type": lambda: forged(tenant=None),
    "a list": lambda: [1, 2],
    "nothing": lambda: None,
    "text": lambda: "kv-0",
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_packed_form_is_refused(name: str) -> None:
    with pytest.raises(HandleError):
        KVHandle.from_dict(ALTERED[name]())  # type: ignore[arg-type]


def test_the_unaltered_parts_of_those_forgeries_are_accepted() -> None:
    """So that each case above is refused for what it alters and not for how this file builds it."""
    assert KVHandle.from_dict(with_rows(ROWS)) == example()
    assert KVHandle.from_dict(forged(tokens=packed(b"\x04" + example().tokens))) == example()


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        {"role": "user"},
        [["user", "hi"]],
        ["hi"],
        [None],
        5,
        None,
        [{"content": "who says it?"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "x"}],
    ],
)
def test_messages_that_are_no_messages_are_refused_even_under_a_matching_id(messages: Any) -> None:
    """Anyone can compute an id; what comes out of a checkpoint must still be chat messages."""
    try:
        digest = Segment.of("prompt", "n", pack_tokens([1]), messages).digest
    except (LatentError, AttributeError, KeyError, TypeError):
        digest = ""  # no id can match it
    forged_id = "kv-" + hashlib.sha256(f"{MODEL}\n\n{digest}".encode()).hexdigest()[:32]
    with pytest.raises(HandleError):
        KVHandle.from_dict(
            {
                "id": forged_id,
                "model": MODEL,
                "tenant": "",
                "nbytes": 0,
                "tokens": packed(b"\x04" + pack_tokens([1])),
                "segments": with_rows([["prompt", "n", 1, messages]])["segments"],
            }
        )


def test_a_handle_rebuilt_with_another_field_is_refused_when_it_is_used() -> None:
    """Field case 60: a forged tenant does not open another tenant's cache."""
    longer = {"tokens": example().tokens + pack_tokens([1])}
    for change in ({"tenant": "other"}, {"model": "0" * 32}, {"id": "kv-1"}, {"tokens": pack_tokens([1])}, longer):
        with pytest.raises(HandleError, match="altered"):
            dataclasses.replace(example(), **change).verify()  # type: ignore[arg-type]
    for junk in ({"tokens": None}, {"segments": None}, {"segments": (1, 2)}):
        with pytest.raises(HandleError):
            dataclasses.replace(example(), **junk).verify()  # type: ignore[arg-type]


def test_a_pickled_handle_is_verified_when_it_is_loaded() -> None:
    altered = example()
    object.__setattr__(altered, "tokens", pack_tokens([1, 2, 3, 4, 5, 6]))
    data = pickle.dumps(altered)
    with pytest.raises(HandleError, match="altered"):
        pickle.loads(data)


BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "100 MB of tokens": lambda: forged(tokens=packed(b"\x04" + bytes(BIG_BOMB_BYTES))),
    "100 MB of segments": lambda: forged(segments=packed(b"[" + b" " * BIG_BOMB_BYTES + b"]")),
    "64 MB of narrow tokens": lambda: forged(tokens=packed(b"\x02" + bytes((64 << 20) - 2))),
    "64 MB of empty lists": lambda: forged(segments=packed(b"[" + b"[]," * ((64 << 20) // 3 - 2) + b"[]]")),
    "64 MB of numbers": lambda: forged(segments=packed(b"[" + b"1.5," * ((64 << 20) // 4 - 2) + b"1]")),
    "lists 100,000 deep": lambda: forged(segments=packed(b"[" * 100_000)),
    "messages 900 deep": lambda: forged(segments=packed(deep(900))),
    "300 blocks of 2 million tokens": lambda: forged(
        tokens=packed(b"\x02\0\0"),
        segments=packed(
            json.dumps(
                {
                    "version": 2,
                    "sources": [
                        [0, packed(b"\x02" + bytes(1 << 22)), with_rows([["prompt", "", 1 << 21, []]])["segments"]]
                    ],
                    "rows": [["moved", "", 1, [], "", {"blocks": [[0, 1, 1 << 21, 1.0, None]] * 300, "repair": None}]],
                }
            ).encode()
        ),
    ),
    "2 million segments": lambda: {
        **with_rows([["prompt", "", 1, []]] * (1 << 21)),
        "tokens": packed(b"\x02" + bytes(1 << 22)),
    },
    "a message of 60 million characters": lambda: with_rows(
        [["prompt", "", 1, [{"role": "user", "content": "\U0001f600" + "x" * 60_000_000}]]]
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_at_once_and_without_a_memory_spike(name: str) -> None:
    """A few kilobytes in a checkpoint must not become gigabytes, minutes or a RecursionError."""
    bomb = BOMBS[name]()
    assert len(bomb["tokens"]) + len(bomb["segments"]) < 500_000
    with pytest.raises(HandleError):
        KVHandle.from_dict(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(HandleError):
            KVHandle.from_dict(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20


@settings(max_examples=150, deadline=1000)
@given(
    field=st.sampled_from(["id", "model", "tenant", "tokens", "segments"]),
    at=st.integers(0, 10_000),
    new=st.characters(codec="utf-8"),
    cut=st.booleans(),
)
def test_one_changed_character_anywhere_is_refused(field: str, at: int, new: str, cut: bool) -> None:
    data = example().to_dict()
    text: str = data[field] or "-"
    at %= len(text)
    data[field] = text[:at] if cut else text[:at] + new + text[at + 1 :]
    if data[field] == example().to_dict()[field]:
        return
    try:
        read = KVHandle.from_dict(data)
    except HandleError:
        return
    assert field in ("tokens", "segments"), "a deflated stream has a few spare bits, nothing else has"
    assert read == example()


@settings(max_examples=150, deadline=1000)
@given(data=st.binary(max_size=200), field=st.sampled_from(["tokens", "segments"]), deflated=st.booleans())
def test_garbage_is_refused_by_our_own_error(data: bytes, field: str, deflated: bool) -> None:
    text = packed(data) if deflated else b64encode(data).decode()
    with pytest.raises(LatentError):
        KVHandle.from_dict(forged(**{field: text}))


# -- nothing in it can be changed --------------------------------------------------------------------------------------


def test_the_messages_of_a_handle_can_not_be_changed_and_copies_can() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": [1, {"b": 2}]}}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    handle = KVHandle.root("m").extend("prompt", "reader", pack_tokens([1, 2]), [message])
    held = handle.segments[0].messages[0]
    arguments = held["tool_calls"][0]["function"]["arguments"]
    for change in (
        lambda: held.update(content="y"),
        lambda: held.__setitem__("content", "y"),
        lambda: held.pop("content"),
        lambda: held.setdefault("z", 1),
        lambda: held.__ior__({"content": "y"}),
        lambda: held["tool_calls"].append(1),
        lambda: held["tool_calls"].__setitem__(0, 1),
        lambda: arguments["a"].sort(),
        lambda: arguments["a"][1].clear(),
        lambda: handle.spans[0].messages[0].update(content="y"),
    ):
        with pytest.raises(TypeError, match="can't be changed"):
            change()
    assert held == message
    by_pickle = pickle.loads(pickle.dumps(held))
    for copied in (handle.messages[0], dict(held), copy.deepcopy(held), copy.copy(held), by_pickle):
        assert copied == held
        assert type(copied) is dict
        copied["content"] = "y"
    handle.messages[0]["tool_calls"][0]["function"]["arguments"]["a"].append(3)
    message["content"] = call["id"] = "z"
    handle.verify()
    assert KVHandle.from_dict(handle.to_dict()) == handle
    restored = KVHandle.from_dict(handle.to_dict())
    with pytest.raises(TypeError):
        restored.segments[0].messages[0]["content"] = "y"


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([0, 1, 1000, 60_000, 600_000]),
    where=st.sampled_from(["content", "name", "reasoning_content", "source", "arguments"]),
    what=st.text(min_size=1, max_size=5),
    num_tokens=st.integers(0, 3),
)
def test_whatever_a_handle_can_hold_can_be_read_back(size: int, where: str, what: str, num_tokens: int) -> None:
    """Also what says far more than its tokens: reasoning that a template drops, a long name."""
    long = (what * (size // len(what) + 1))[:size]
    message: dict[str, Any] = {"role": "assistant", "content": "x"}
    if where == "arguments":
        arguments = {"list": list(range(size // 100)), "text": long}
        message["tool_calls"] = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}]
    elif where != "source":
        message[where] = long
    source = long if where == "source" else "reader"
    tokens = pack_tokens(range(1, num_tokens + 1))
    handle = KVHandle.root(MODEL).extend("prompt", source, tokens, [message])
    assert KVHandle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle


def test_what_could_not_be_read_back_is_not_made() -> None:
    message = {"role": "assistant", "content": "x" * 10_000_000}
    with pytest.raises(HandleError, match="too long for a handle"):
        KVHandle.root(MODEL).extend("prompt", "reader", pack_tokens([1]), [message])


# -- as a field of Pydantic's models, dataclasses and typed mappings ---------------------------------------------------


class Model(BaseModel):
    handle: KVHandle | None = None
    handles: list[KVHandle] = []


@pydantic_dataclass
class Record:
    handle: KVHandle


class Mapped(TypedDict):
    handle: KVHandle


def test_a_handle_goes_through_pydantic_in_json_and_python_mode() -> None:
    handle = example()
    model = Model(handle=handle, handles=[handle, handle])
    assert Model.model_validate_json(model.model_dump_json()) == model
    assert Model.model_validate(json.loads(json.dumps(model.model_dump(mode="json")))) == model
    assert Model.model_validate(model.model_dump()) == model
    assert model.model_dump()["handle"] == handle.to_dict()
    assert Model.model_validate({"handle": handle.to_dict(), "handles": [handle.to_dict()]}).handle == handle
    for kind, value in ((Record, Record(handle)), (Mapped, {"handle": handle}), (KVHandle, handle)):
        adapter = TypeAdapter(kind)
        assert adapter.validate_json(adapter.dump_json(value)) == value
        assert adapter.validate_python(adapter.dump_python(value)) == value
        assert adapter.validate_python(adapter.dump_python(value, mode="json")) == value
    assert Model.model_json_schema()["properties"]["handles"]["items"]["title"] == "KVHandle"


@pytest.mark.parametrize("value", [5, "kv-1", {}, {"id": "kv-1"}, [], object()])
def test_pydantic_refuses_what_is_no_handle(value: Any) -> None:
    with pytest.raises(ValidationError):
        Model.model_validate({"handle": value})


def test_pydantic_refuses_an_altered_handle() -> None:
    with pytest.raises(ValidationError, match="altered"):
        Model.model_validate({"handle": {**example().to_dict(), "tenant": "other"}})
