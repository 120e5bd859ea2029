"""`langgraph-latent probe`: what can be done with one model's caches, found out by loading it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from langgraph_latent.cli.terminal import AsJson, Model, refuse, silence_loading, terminal
from langgraph_latent.disk_cache import home_expanded
from langgraph_latent.errors import ModelLoadError, UnsupportedLayerError
from langgraph_latent.spec.spec import CAPABILITIES, ModelSpec


def probe(model: Model, as_json: AsJson = False) -> None:
    """Load a model and say what can be done with its caches. Exit code 1 where they can't be continued."""
    raise typer.Exit(_probe(model, as_json))


def _probe(model: str, as_json: bool) -> int:
    console = terminal(stderr=as_json)
    try:
        with console.status("loading the model ..."):
            spec = _load_spec(model)
    except UnsupportedLayerError as error:
        return refuse(error, 1)
    except ModelLoadError as error:
        return refuse(error, 2)
    if as_json:
        print(json.dumps(_to_dict(spec), indent=2))
    else:
        console.print(_table(spec))
    return 0 if spec.capabilities.can("append") else 1


def _load_spec(model: str) -> ModelSpec:
    """Raises `ModelLoadError` before torch is imported where there are no weights to load."""
    path = home_expanded(model)
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))  # the loader refuses *.bin
    if path.is_file() or ((path / "config.json").is_file() and not has_weights):
        raise ModelLoadError(
            f"{model!r} is not a folder with weights: probe needs the weights; for configs use "
            "`langgraph-latent matrix`"
        )
    from langgraph_latent.engine.loader import ModelKey, acquire, release

    silence_loading()
    key = ModelKey(model).canonical()
    spec = acquire(key).spec
    release(key)
    return spec


def _to_dict(spec: ModelSpec) -> dict[str, Any]:
    return {
        **asdict(spec),
        "identity": spec.identity,
        "capabilities": {
            name: {"can": spec.capabilities.can(name), "reason": spec.capabilities.refusal(name)}
            for name in CAPABILITIES
        },
        "positions": spec.capabilities.positions,
        "is_probed": spec.capabilities.is_probed,
    }


def _table(spec: ModelSpec) -> Table:
    quantization = f", {spec.quantization}" if spec.quantization else ""
    rows: list[tuple[str, str | Text]] = [
        ("model", f"{spec.name} ({spec.architecture}, {spec.dtype}{quantization})"),
        ("identity", spec.identity),
        ("layers", _layers(spec)),
        ("positions", spec.capabilities.positions or "not known"),
        ("longest sequence", f"{spec.max_positions:,} tokens" if spec.max_positions else "not known"),
        ("bytes per token", f"{spec.bytes_per_token:,}"),
    ]
    for name in CAPABILITIES:
        refusal = spec.capabilities.refusal(name)
        rows.append((name, Text(f"no: {refusal}", "bad") if refusal else Text("yes", "good")))
    if not spec.capabilities.is_probed:
        rows.append(("probed", "no: this is what the kinds of its layers prove"))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="name", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value) if isinstance(value, str) else value)
    return table


def _layers(spec: ModelSpec) -> str:
    """A line for each kind of layer, with its number."""
    counts: dict[str, int] = {}
    for layer in spec.layers:
        window = f", window {layer.window:,}" if layer.window else ""
        heads = f", {layer.kv_heads} heads of {layer.key_dim} and {layer.value_dim} channels" if layer.kv_heads else ""
        name = f"{layer.kind}{window}{heads}"
        counts[name] = counts.get(name, 0) + 1
    return "\n".join(f"{count} x {name}" for name, count in counts.items())
