"""Imports point down, foreign libraries have one door each, the public face is guarded, and importing does no work."""

from __future__ import annotations

import ast
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import langgraph_latent
from langgraph_latent import ChatLatent
from langgraph_latent import errors as error_tree
from langgraph_latent.errors import ConfigError, LatentError

PACKAGE = Path(langgraph_latent.__file__).parent

# From the bottom up: a module imports only what stands above it here. Names without a file are planned (design §5).
LAYERS = [
    "errors",
    "paths",
    "parity",
    "recipe",
    "handle",
    "compose",
    "spec",
    "compat",
    "matrix",
    "events",
    "rates",
    "router",
    "kv",
    "kv.buffer",
    "kv.whole",
    "kv.state",
    "kv.rope",
    "kv.compose",
    "kv.repair",
    "kv.codec",
    "models",
    "models.compute",
    "models.digest",
    "models.lora",
    "folder",
    "models.sampling",
    "models.shapes",
    "models.template",
    "models.answer",
    "models.grammar",
    "models.prompt",
    "models.probe",
    "models.align",
    "models.attention",
    "models.scheduler",
    "models.resident",
    "pool",
    "pool.budget",
    "pool.policies",
    "pool.prefix",
    "pool.recipes",
    "pool.tiers",
    "pool.pool",
    "adapters.base",
    "adapters",
    "delivery",
    "composer",
    "tracer",
    "metrics",
    "workspace",
    "turn",
    "channel",
    "threads",
    "messages",
    "chat_model",
    "node",
    "testing.tiny",
    "testing.catalogue",
    "testing.conformance",
    "testing.pages",
    "testing.__main__",
    "testing",
    "experiment",
    "audit",
    "report",
    "demo",
    "demo.convert",
    "demo.model",
    "demo.threads",
    "demo.stats",
    "demo.agents",
    "demo.view",
    "demo.run",
    "cli",
    "__main__",
]
PLAIN = ["errors", "paths", "parity", "recipe", "handle", "compose", "spec", "compat", "events", "rates", "router"]
TORCH_FREE = [
    *PLAIN,
    "channel",
    "tracer",
    "pool.policies",
    "pool.prefix",
    "pool.recipes",
    "matrix",
    "models.digest",
    "folder",
]
OUTSIDE = ("demo", "cli", "testing", "__main__")  # may use what they show or fake
DOORS = {
    "langgraph": {"channel", "node"},
    "langchain_core": {"chat_model", "messages", "node"},
    "transformers.cache_utils": {"kv.state"},
    "transformers.generation": {"models.grammar", "models.sampling", "turn"},
    "safetensors": {"kv.codec"},
}
PUBLIC = [
    "ChatLatent",
    "Compatibility",
    "EdgePolicy",
    "EdgeRouter",
    "KVHandle",
    "LatentChannel",
    "LatentError",
    "LatentNode",
    "LatentState",
    "LatentTracer",
    "LatentWorkspace",
    "Level",
    "ModelSpec",
    "Repair",
    "Route",
    "RouteDecision",
    "Selection",
    "compare",
    "merge",
]


def module_files() -> dict[str, Path]:
    """Every module of the package by its name without the package's."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            files[name] = path
    return files


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, also inside functions, `from x import module` resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_for_types(path: Path) -> Iterator[str]:
    """Those of them under `if TYPE_CHECKING`: a handle and its recipe hold each other; one imports the other."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (each.module or "" for each in node.body if isinstance(each, ast.ImportFrom))


def own_imports(path: Path, files: dict[str, Path]) -> set[str]:
    for_types = set(imports_for_types(path))
    used = (name for name in imports_of(path) if name not in for_types)
    named = {name.removeprefix("langgraph_latent.") for name in used if name.startswith("langgraph_latent")}
    found = {name for name in named if name in files}
    # `from package import module` names the package only for its modules
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def test_every_module_has_its_place_in_the_layers() -> None:
    missing = sorted(set(module_files()) - set(LAYERS))
    adapters = [
        name for name in missing if name.startswith("adapters.")
    ]  # one idea, one file: between base and catalogue
    assert sorted(set(missing) - set(adapters)) == [], (
        "put them where they belong in LAYERS, and into docs/structure.md"
    )
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("name", module_files())
def test_imports_point_down_only(name: str) -> None:
    files = module_files()
    ranks = {layer: rank for rank, layer in enumerate(LAYERS)}
    between = (ranks["adapters.base"] + ranks["adapters"]) / 2
    mine = ranks.get(name, between)
    up = sorted(other for other in own_imports(files[name], files) if ranks.get(other, between) >= mine)
    assert up == []


def test_the_check_of_imports_sees_them() -> None:
    files = module_files()
    assert {"kv.state", "pool.pool", "models.resident", "router"} <= own_imports(files["workspace"], files)
    assert own_imports(files["kv.state"], files) == {"errors", "kv.buffer", "kv.whole"}
    assert own_imports(files["errors"], files) == set()
    assert own_imports(files["recipe"], files) == {"errors"}


@pytest.mark.parametrize("library", DOORS)
def test_a_foreign_library_has_its_doors_and_no_other(library: str) -> None:
    """A version change of it is one file to repair."""
    users = {
        name
        for name, path in module_files().items()
        if not name.startswith(OUTSIDE)
        and any(used == library or used.startswith(f"{library}.") for used in imports_of(path))
    }
    assert users <= DOORS[library]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_import_the_standard_library_only(name: str) -> None:
    roots = {used.split(".")[0] for used in imports_of(module_files()[name])} - {"langgraph_latent"}
    assert roots <= set(sys.stdlib_module_names) | {"__future__"}


def test_nothing_is_pickled_anywhere() -> None:
    forbidden = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.load", "torch.save")
    for name, path in module_files().items():
        if name.startswith("demo"):
            continue
        assert not [used for used in imports_of(path) if used.split(".")[0] in forbidden], name
        text = path.read_text(encoding="utf-8")
        assert "torch.load(" not in text, name
        assert "torch.save(" not in text, name


def loaded_by(statement: str) -> set[str]:
    """Names of modules in a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["", *TORCH_FREE])
def test_importing_what_needs_no_tensors_takes_no_torch(name: str) -> None:
    loaded = loaded_by(f"import langgraph_latent{'.' if name else ''}{name}")
    assert not loaded & {"torch", "transformers", "safetensors"}
    if name in ("", *PLAIN):
        assert not loaded & {"langgraph.graph", "langchain_core"}


def test_torch_free_names_are_reached_through_the_package_without_torch() -> None:
    names = (
        "KVHandle, ModelSpec, compare, EdgePolicy, EdgeRouter, Route, RouteDecision, Level, LatentChannel, LatentError"
    )
    assert "torch" not in loaded_by(f"from langgraph_latent import {names}")


# -- the public face -------------------------------------------------------------------------------------------------


def test_the_public_names_are_these_and_each_is_there() -> None:
    """A contract: other people's scripts use them."""
    assert sorted(langgraph_latent.__all__) == PUBLIC
    assert dir(langgraph_latent) == sorted(langgraph_latent.__all__)
    for name in PUBLIC:
        value = getattr(langgraph_latent, name)
        assert value.__module__ == f"langgraph_latent.{langgraph_latent._HOMES[name]}"
        assert value.__doc__, name
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value
    assert set(langgraph_latent._HOMES) == set(PUBLIC)


def test_what_a_type_checker_sees_is_what_there_is() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: (node.module or "").removeprefix("langgraph_latent.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("langgraph_latent.")
        for alias in node.names
    }
    assert seen == langgraph_latent._HOMES
    assert (PACKAGE / "py.typed").is_file()


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="KVHandel"):
        langgraph_latent.KVHandel  # noqa: B018


def test_every_error_of_ours_is_in_the_tree_and_in_the_drawing_of_it() -> None:
    classes = {name: value for name, value in vars(error_tree).items() if isinstance(value, type)}
    assert classes
    for name, value in classes.items():
        assert issubclass(value, LatentError), name
        assert value.__doc__
        assert name in (error_tree.__doc__ or "")


# -- construction ----------------------------------------------------------------------------------------------------


def test_a_chat_model_is_constructed_in_well_under_a_millisecond() -> None:
    """Weights, workspace and device are looked at on first use."""
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        ChatLatent(model="no/such-model", temperature=0, max_tokens=64, seed=1, stop=["END"])
        times.append(time.perf_counter() - begin)
    assert statistics.median(times) < 0.0005


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatLatent(model="m", temprature=0)  # type: ignore[call-arg]
    assert "temprature" in str(caught.value)
    assert all(name in str(caught.value) for name in ("temperature", "max_tokens", "workspace", "model", "dtype"))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": ""},
        {"stop": [""]},
    ],
)
def test_an_impossible_value_is_refused_at_once_and_named(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ChatLatent(model="m", **options)  # type: ignore[arg-type]
