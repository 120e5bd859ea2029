"""LoRA adapters are a part of a model's identity by what they hold: loading, switching or re-loading changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from langgraph_latent import ChatLatent, LatentWorkspace, compare
from langgraph_latent.errors import ModelMismatchError
from langgraph_latent.spec.compat import Level

peft = pytest.importorskip("peft", reason="the package peft is not installed")
pytestmark = [  # raised by PEFT for what this file does on purpose, and inside it
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute:UserWarning"),
]
STORY = "the team that reads the report hands over what it knows. "


@pytest.fixture(scope="module")
def adapters(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two random adapters for the tiny llama."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folders.append(str(tmp_path_factory.mktemp("adapter")))
        peft.get_peft_model(model, config).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def adapted(tiny_chat: ChatLatent) -> Any:
    """transformers' model under the tiny chat, which is freed with the test's workspace."""
    return tiny_chat.resident().model


def enable(model: Any, wanted: bool) -> None:
    """As transformers' own enable_adapters and disable_adapters do it, for any version of PEFT."""
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.enable_adapters(wanted)


def switch(model: Any, names: str | list[str]) -> None:
    """As transformers' own set_adapter does it, for any version of PEFT."""
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.set_adapter(names)


def test_loading_switching_and_disabling_change_the_identity(
    tiny_chat: ChatLatent, adapted: Any, adapters: list[str]
) -> None:
    plain = tiny_chat.spec.identity
    adapted.load_adapter(adapters[0], "one")
    first = tiny_chat.spec.identity
    adapted.load_adapter(adapters[1], "two")
    switch(adapted, "two")
    second = tiny_chat.spec.identity
    assert len({plain, first, second}) == 3
    switch(adapted, "one")
    assert tiny_chat.spec.identity == first
    enable(adapted, False)
    assert tiny_chat.spec.identity == plain
    enable(adapted, True)
    assert tiny_chat.spec.identity == first
    switch(adapted, ["one", "two"])
    assert tiny_chat.spec.identity not in (plain, first, second)


def test_other_weights_under_the_same_name_are_another_model(
    tiny_chat: ChatLatent, adapted: Any, adapters: list[str]
) -> None:
    adapted.load_adapter(adapters[0], "same name")
    identities = [tiny_chat.spec.identity]
    for folder in (adapters[1], adapters[0]):
        adapted.load_adapter(folder, "same name", hotswap=True)
        identities.append(tiny_chat.spec.identity)
    assert identities[0] != identities[1]
    assert identities[0] == identities[2]


def test_writing_to_an_adapter_or_scaling_it_changes_the_identity(
    tiny_chat: ChatLatent, adapted: Any, adapters: list[str]
) -> None:
    adapted.load_adapter(adapters[0], "one")
    seen = [tiny_chat.spec.identity]
    parameter = next(part for name, part in adapted.named_parameters() if "lora_A" in name)
    with torch.no_grad():
        parameter.mul_(2)
    seen.append(tiny_chat.spec.identity)
    next(module for module in adapted.modules() if hasattr(module, "set_scale")).set_scale("one", 3.0)
    seen.append(tiny_chat.spec.identity)
    assert len(set(seen)) == 3


def test_a_cache_made_without_an_adapter_is_not_attended_to_with_one(
    tiny_chat: ChatLatent, adapted: Any, adapters: list[str], ws: LatentWorkspace
) -> None:
    before = tiny_chat.spec
    handle = tiny_chat.read(STORY * 3)
    blob = tiny_chat.export_kv_cache(handle)
    adapted.load_adapter(adapters[0], "one")
    reply = tiny_chat.invoke("and then?", inherit=handle)
    assert reply.response_metadata["kv_route"]["route"] == "text"
    assert "adapters" in reply.response_metadata["kv_route"]["reason"]
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 0
    assert compare(before, tiny_chat.spec).level is Level.SIBLING
    with LatentWorkspace() as empty:
        alone = ChatLatent(model=tiny_chat.model, workspace=empty, max_tokens=12)
        conversation = [{"role": "user", "content": STORY * 3}, {"role": "user", "content": "and then?"}]
        assert alone.invoke(conversation).text == reply.text
    with pytest.raises(ModelMismatchError):
        tiny_chat.export_kv_cache(handle)
    assert blob is not None
    enable(adapted, False)
    assert tiny_chat.invoke("and then?", inherit=handle).usage_metadata["input_token_details"]["cache_read"] > 0


def test_an_adapter_that_peft_puts_in_by_itself_is_seen(tiny_chat: ChatLatent, adapted: Any) -> None:
    plain = tiny_chat.spec.identity
    torch.manual_seed(3)
    peft.get_peft_model(adapted, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert tiny_chat.spec.identity != plain
