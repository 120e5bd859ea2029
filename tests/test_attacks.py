"""Inputs that once broke a promise: wrong models taken for right ones, hangs, memory spikes, altered handles."""

from __future__ import annotations

import copy
import gc
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from langchain_core.messages import AIMessage, HumanMessage, trim_messages
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BertConfig, Phi3Config

from langgraph_latent import ChatLatent, KVHandle, LatentNode, LatentWorkspace
from langgraph_latent.errors import CodecError, ContextLengthError, HandleError, UnsupportedLayerError
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.testing import tiny_tokenizer

STORY = "the team that reads the report hands over what it knows to the team that decides. "
MARKS_LAST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'user' %}[tools: a b c]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
NO_LAST_ANSWER = (
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('end with a question') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def alone(model: str, messages: list, **options: object) -> str:
    with LatentWorkspace() as empty:
        return str(ChatLatent(model=model, workspace=empty, max_tokens=12, **options).invoke(messages).text)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"rms_norm_eps": 0.5}, {"hidden_act": "relu"}])
def test_equal_weights_under_another_config_are_another_model(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, change: dict[str, object]
) -> None:
    chats = [
        ChatLatent(model=str(tiny_folder("llama", **options)), workspace=ws, max_tokens=12) for options in ({}, change)
    ]
    assert chats[0].spec.weights == chats[1].spec.weights
    assert chats[0].spec.identity != chats[1].spec.identity
    reply = chats[1].invoke("and?", inherit=chats[0].read(STORY))
    assert reply.response_metadata["kv_route"]["route"] == "text"
    assert reply.text == alone(chats[1].model, [HumanMessage(STORY), HumanMessage("and?")])


def test_a_model_that_is_not_causal_is_refused_by_name(tmp_path: Path, ws: LatentWorkspace) -> None:
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedLayerError, match=r"not causal|does not run over a cache"):
        ChatLatent(model=str(tmp_path), workspace=ws).load()
    assert ws.size_info().num_models == 0


def test_longrope_takes_no_more_than_the_length_at_which_its_keys_change(tmp_path: Path, ws: LatentWorkspace) -> None:
    tokenizer = tiny_tokenizer()
    config = Phi3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        pad_token_id=0,
        eos_token_id=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    chat = ChatLatent(model=str(tmp_path), workspace=ws, max_tokens=500)
    assert chat.spec.max_positions == 64
    with pytest.raises(ContextLengthError, match="at most 64"):
        chat.read(STORY * 3)


@pytest.mark.parametrize("template", [MARKS_LAST, LLAMA2, NO_LAST_ANSWER])
def test_law_2_holds_for_templates_that_treat_the_last_message_apart(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, template: str
) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=12)
    question = HumanMessage("hello")
    reply = chat.invoke([question])
    handle = ws.handle(reply)
    following = chat.invoke("again", inherit=handle)
    written = chat.resident().prompts.write([*handle.messages, {"role": "user", "content": "again"}], reply=True)
    tokens = ws.handle(following).tokens
    if tokens.startswith(written.tokens):  # the message form
        assert following.text == alone(chat.model, [question, reply, HumanMessage("again")])
    else:  # the sampled tokens stand, and the template closes them once
        assert tokens.startswith(handle.tokens)
        text = chat.tokenizer.decode(list(ws.handle(following).token_ids))
        assert "<|im_end|> <|im_end|>" not in text
        assert text.count("[tools:") <= 1


@pytest.mark.slow
def test_a_stream_collected_inside_a_lock_does_not_hang(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A dropped stream gives its claim back and emits events wherever the garbage collector finds it."""
    program = (
        "import sys, threading\n"
        "from langgraph_latent import ChatLatent, LatentTracer, LatentWorkspace\n"
        "ws = LatentWorkspace(memory='8MB', tracer=LatentTracer(sys.argv[2]))\n"
        "chat = ChatLatent(model=sys.argv[1], workspace=ws, max_tokens=30).load()\n"
        "def work(name):\n"
        "    for number in range(40):\n"
        "        stream = chat.stream(f'{name} {number}')\n"
        "        next(stream)\n"
        "        cycle = [stream]; cycle.append(cycle)\n"
        "        del stream, cycle\n"
        "        chat.read(f'{name} reads {number}')\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "ws.check_integrity(); print('done')\n"
    )
    command = [sys.executable, "-c", program, str(tiny_folder("llama")), str(tmp_path / "trace.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip().endswith("done"), result.stderr


def test_a_large_max_tokens_costs_no_memory(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", max_position_embeddings=128)), workspace=ws)
    before = psutil.Process().memory_info().rss
    assert chat.invoke("go on", max_tokens=10**13).usage_metadata["total_tokens"] <= 128
    assert psutil.Process().memory_info().rss - before < 100e6


def hostile_files(good: bytes, folder: Path) -> list[Path]:
    sparse, deep, junk, pipe = (folder / name for name in ("sparse", "deep", "junk", "pipe"))
    sparse.write_bytes(good)
    os.truncate(sparse, 3 << 30)
    deep.write_bytes(struct.pack("<Q", 60 << 20) + b"[" + b"[]," * ((60 << 20) // 3) + b"[]]")
    save_file({"x": __import__("torch").zeros(3)}, junk)
    os.mkfifo(pipe)
    return [sparse, deep, junk, pipe, folder / "nul\0", folder]


@pytest.mark.timeout(60)
def test_hostile_files_are_refused_at_once_and_without_a_spike(tiny_chat: ChatLatent, tmp_path: Path) -> None:
    good = tiny_chat.export_kv_cache(tiny_chat.read(STORY)) or b""
    for file in hostile_files(good, tmp_path):
        gc.collect()
        before = psutil.Process().memory_info().rss
        with pytest.raises(CodecError):
            tiny_chat.ingest_kv_cache(file)
        assert psutil.Process().memory_info().rss - before < 150e6


def test_a_handles_messages_are_copies(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    handle = tiny_chat.read(STORY)
    handle.messages[0]["content"] = "redacted"
    assert handle.messages[0]["content"] == STORY
    assert KVHandle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle


def test_a_token_that_the_model_does_not_have_is_refused(tiny_chat: ChatLatent) -> None:
    root = KVHandle.root(tiny_chat.spec.identity)
    forged = root.extend("prompt", "", pack_tokens([5, 10**6]), [{"role": "user", "content": "x"}])
    for use in (lambda: tiny_chat.invoke("go on", inherit=forged), lambda: tiny_chat.export_kv_cache(forged)):
        with pytest.raises(HandleError, match="token id 1000000"):
            use()


def test_a_handle_of_no_tokens_adds_nothing(tiny_chat: ChatLatent) -> None:
    root = KVHandle.root(tiny_chat.spec.identity)
    assert tiny_chat.invoke(STORY, inherit=root).text == tiny_chat.invoke(STORY).text
    with pytest.raises(HandleError, match="no tokens"):
        tiny_chat.export_kv_cache(root)


def test_copies_of_a_chat_model_close_for_themselves(tiny_chat: ChatLatent) -> None:
    expected = tiny_chat.invoke(STORY).text
    for copied in (tiny_chat.model_copy(update={"max_tokens": 3}), copy.copy(tiny_chat), copy.deepcopy(tiny_chat)):
        assert copied.invoke(STORY).usage_metadata["output_tokens"] in (3, 12)
        copied.close()
    assert tiny_chat.invoke(STORY).text == expected


def test_a_reply_may_be_inherited_like_its_handle(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    reply = tiny_chat.invoke(STORY)
    assert tiny_chat.invoke("and?", inherit=reply).text == tiny_chat.invoke("and?", inherit=ws.handle(reply)).text


def test_a_placeholder_in_a_nodes_prompt_is_filled(tiny_chat: ChatLatent) -> None:
    node = LatentNode(tiny_chat, prompt=[("placeholder", "{messages}"), ("human", "q")])
    handle = node.invoke({"messages": [HumanMessage("the important context")]})["latent"]
    assert [message["content"] for message in handle.messages[:2]] == ["the important context", "q"]


def test_tokens_are_counted_by_the_models_own_tokenizer(tiny_chat: ChatLatent) -> None:
    assert tiny_chat.get_num_tokens(STORY) == len(tiny_chat.tokenizer.encode(STORY, add_special_tokens=False))
    messages = [HumanMessage("word " * 500), AIMessage("x"), HumanMessage("now")]
    assert len(trim_messages(messages, max_tokens=100, token_counter=tiny_chat)) == 2
