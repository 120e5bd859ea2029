"""Shared fixtures: one thread, no hub, tiny random models, and the real small model where its folder is present."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # several test processes on few cores: spinning threads cost more than they give

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.demo.model import demo_model
from langgraph_latent.disk_cache import cache_dir
from langgraph_latent.testing import tiny_model

torch.set_num_threads(1)


SLOWEST = ("test_standard_integration", "test_examples", "test_conformance", "test_catalogue", "test_checkpoints")
"""Files that are run first, so that no test process is left alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(SLOWEST)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_folder("llama", seed=0, ...)`: a folder with a tiny random model, made once per session and arguments."""
    made: dict[str, Path] = {}

    def folder(kind: str = "llama", **options: object) -> Path:
        key = repr((kind, sorted(options.items())))
        if key not in made:
            made[key] = tiny_model(tmp_path_factory.mktemp(kind), kind, **options)  # type: ignore[arg-type]
        return made[key]

    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real small model, SmolLM2-135M-Instruct, converted once into the user's cache."""
    return demo_model()


@pytest.fixture
def ws() -> Iterator[LatentWorkspace]:
    """A workspace of its own; its books are checked at the end."""
    with LatentWorkspace(memory="2GiB") as workspace:
        yield workspace
        workspace.check_integrity()


@pytest.fixture
def tiny_chat(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> ChatLatent:
    """A greedy chat model over the tiny llama."""
    return ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=12)


@pytest.fixture(scope="session")
def smol_lease(smollm2: Path) -> Iterator[None]:
    """Keeps the real model resident for the whole session, so that each test's workspace takes it without a load."""
    with LatentWorkspace(memory="1GiB") as keeper:
        ChatLatent(model=str(smollm2), workspace=keeper).load()
        yield


@pytest.fixture
def smol_chat(smollm2: Path, smol_lease: None, ws: LatentWorkspace) -> ChatLatent:
    """A greedy chat model over the real small model."""
    return ChatLatent(model=str(smollm2), workspace=ws, max_tokens=16)


@pytest.fixture(scope="session")
def tool_model() -> Path:
    """A real model that calls tools, Qwen2.5-Coder-0.5B-Instruct; without its folder the test is skipped."""
    own = os.environ.get("LANGGRAPH_LATENT_TOOL_MODEL")
    folder = Path(own).expanduser() if own else cache_dir() / "models" / "qwen2.5-coder-0.5b-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model in {folder}; LANGGRAPH_LATENT_TOOL_MODEL names another folder")
    return folder


@pytest.fixture(scope="session")
def tool_lease(tool_model: Path) -> Iterator[None]:
    """Keeps the tool-calling model resident for the whole session, as `smol_lease` does."""
    with LatentWorkspace(memory="1GiB") as keeper:
        ChatLatent(model=str(tool_model), device="cpu", workspace=keeper).load()
        yield


@pytest.fixture
def tool_chat(tool_model: Path, tool_lease: None, ws: LatentWorkspace) -> ChatLatent:
    """A greedy chat model over the tool-calling model."""
    return ChatLatent(model=str(tool_model), device="cpu", workspace=ws, max_tokens=64)
