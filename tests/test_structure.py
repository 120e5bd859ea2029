"""The rooms of the package: imports point down, foreign libraries have their doors, files stay short, public names stay
where they are, and importing does no work. All of it is read off one table, `HOUSE`."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from pydantic import BaseModel

import langgraph_latent
from langgraph_latent import ChatLatent
from langgraph_latent import errors as error_tree
from langgraph_latent.errors import ConfigError, LatentError

PACKAGE = Path(langgraph_latent.__file__).parent

MAX_ROOT_FILES, MAX_LINES, MAX_FUNCTION_LINES = 12, 500, 60
MAX_KNOWN = 26
"""Modules of the package that one module imports; the chat model, which joins all rooms to LangChain, has the most."""


class Room(NamedTuple):
    """A file at the package's root, or a package below it.

    Attributes:
        name: of the file or package.
        libraries: foreign libraries that it may import, each with the files that may, "*" for all of them. A longer
            name is a door of its own: where it is listed in any room, only the listed files may import it.
        light: files that import neither torch nor transformers, "*" for all of them.
    """

    name: str
    libraries: Mapping[str, str] = MappingProxyType({})
    light: str = "*"


# From the bottom up: a room imports what stands above it here. A new room is one line.
HOUSE = (
    Room("errors"),
    Room("checks"),
    Room("disk_cache"),
    Room("events"),
    Room("tracer"),
    Room("handle"),
    Room(
        "spec",
        {"transformers": "config geometry folder", "numpy": "digest", "huggingface_hub": "folder", "rich": "matrix"},
        light="__init__ spec compat digest matrix",
    ),
    Room("router"),
    Room(
        "kv",
        {
            "torch": "*",
            "transformers": "layers state batching",
            "transformers.cache_utils": "layers state batching",
            "safetensors": "codec",
        },
        light="__init__",
    ),
    Room(
        "prompt",
        {
            "transformers": "*",
            "transformers.generation": "grammar",
            "tokenizers": "detokenizer",
            "jinja2": "template",
            "llguidance": "grammar",
            "torch": "grammar",
            "numpy": "grammar",
        },
        light="__init__ tool_calls",
    ),
    Room(
        "engine",
        {"torch": "*", "transformers": "*", "transformers.generation": "sampling"},
        light="__init__",
    ),
    Room("pool", {"torch": "budget"}, light="__init__ policies prefix handle_book"),
    Room(
        "workspace",
        {
            "torch": "assemble decoding generation",
            "transformers": "decoding",
            "transformers.generation": "decoding",
        },
        light="",
    ),
    Room("channel", {"langgraph": "*", "typing_extensions": "*"}),
    Room("event_loop"),
    Room("tools", {"langchain_core": "*", "pydantic": "*"}, light=""),
    Room("messages", {"langchain_core": "*"}, light=""),
    Room("chat_model", {"langchain_core": "*", "pydantic": "*", "transformers": "*"}, light=""),
    Room("node", {"langchain_core": "*", "langgraph": "*", "typing_extensions": "*"}, light=""),
    Room("evaluation", {"torch": "*"}, light=""),
    Room("testing", {"*": "*"}, light=""),
    Room("demo", {"*": "*"}, light=""),
    Room("cli", {"*": "*"}, light=""),
)
PLAIN = ("errors", "checks", "disk_cache", "events", "tracer", "handle", "router")
"""Rooms that import the standard library and one another, and `spec.spec` and `spec.compat`."""
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
    """Every module of the package by its name without the package's; a package's `__init__` by "package.__init__"."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    }


FILES = module_files()
ROOMS = {room.name: room for room in HOUSE}


def room_of(module: str) -> Room:
    return ROOMS[module.split(".")[0]]


def is_named(name: str, listed: str) -> bool:
    return listed == "*" or name in listed.split()


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import: at its top, inside functions, for type checkers; `from x import y`
    as x and as x.y."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    named = {
        name.removeprefix("langgraph_latent.") for name in imports_of(path) if name.startswith("langgraph_latent.")
    }
    packages = {name for name in named if f"{name}.__init__" in FILES}
    found = {name for name in named if name in FILES}
    # `from package import module` names the package only for its modules
    return found | {f"{name}.__init__" for name in packages if not any(each.startswith(f"{name}.") for each in found)}


def foreign_imports(path: Path) -> set[str]:
    names = {name for name in imports_of(path) if name.split(".")[0] not in sys.stdlib_module_names}
    return {name for name in names if name.split(".")[0] not in ("langgraph_latent", "__future__")}


def test_every_module_is_in_a_room_and_every_room_is_there() -> None:
    assert {name.split(".")[0] for name in FILES} == set(ROOMS), (
        "a new room is a line in HOUSE and in docs/structure.md"
    )
    assert len(ROOMS) == len(HOUSE)
    for room in HOUSE:
        files = {name.removeprefix(f"{room.name}.") for name in FILES if room_of(name) is room}
        listed = " ".join([room.light, *room.libraries.values()]).replace("*", "").split()
        assert set(listed) <= files, f"{room.name} lists files that are not there"


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down_only(name: str) -> None:
    ranks = {room.name: rank for rank, room in enumerate(HOUSE)}
    mine = ranks[name.split(".")[0]]
    assert [other for other in own_imports(FILES[name]) if ranks[other.split(".")[0]] > mine] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Not at the top, not inside a function and not for a type checker."""
    graph = {name: own_imports(path) for name, path in FILES.items()}
    with contextlib.suppress(graphlib.CycleError):
        assert list(graphlib.TopologicalSorter(graph).static_order())
        return
    with pytest.raises(graphlib.CycleError) as caught:
        graphlib.TopologicalSorter(graph).prepare()
    pytest.fail(f"these import each other: {' -> '.join(caught.value.args[1])}")


def test_the_check_of_imports_sees_them() -> None:
    assert {"kv.state", "handle.handle", "router.choice", "workspace.keeper"} <= own_imports(
        FILES["workspace.materialize"]
    )
    assert own_imports(FILES["router.__init__"]) == {"router.policy", "router.choice", "router.router"}
    assert own_imports(FILES["errors"]) == set()


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_library_has_its_doors_and_no_other(name: str) -> None:
    """A version change of it is few files to repair, and the list of them is in HOUSE."""
    libraries = room_of(name).libraries
    if "*" in libraries:
        return
    doors = {library for room in HOUSE for library in room.libraries}
    file = name.split(".", 1)[-1]
    for used in foreign_imports(FILES[name]):
        through = max((door for door in doors if used == door or used.startswith(f"{door}.")), key=len, default=used)
        assert is_named(file, libraries.get(through, "")), f"{name} imports {used}"


@pytest.mark.parametrize("name", [name for name in FILES if name.split(".")[0] in PLAIN])
def test_plain_rooms_import_the_standard_library_and_one_another(name: str) -> None:
    assert foreign_imports(FILES[name]) == set()
    others = {other for other in own_imports(FILES[name]) if other.split(".")[0] not in PLAIN}
    assert others <= {"spec.spec", "spec.compat"}


def test_files_and_functions_stay_short_and_the_root_small() -> None:
    assert len([*PACKAGE.glob("*.py")]) <= MAX_ROOT_FILES
    for name, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_LINES, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{name}: {node.name}"


@pytest.mark.parametrize("name", FILES)
def test_a_module_says_what_it_holds_and_knows_few_others(name: str) -> None:
    assert ast.get_docstring(ast.parse(FILES[name].read_text(encoding="utf-8"))), name
    assert len(own_imports(FILES[name])) <= MAX_KNOWN


def test_nothing_is_pickled_anywhere() -> None:
    forbidden = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.load", "torch.save")
    for name, path in FILES.items():
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


LIGHT = [name for name in FILES if is_named(name.split(".", 1)[-1], room_of(name).light)]


@pytest.mark.parametrize("name", ["", *LIGHT])
def test_importing_what_needs_no_tensors_takes_no_torch(name: str) -> None:
    module = f".{name}".removesuffix(".").removesuffix(".__init__")
    loaded = loaded_by(f"import langgraph_latent{module}")
    assert not loaded & {"torch", "transformers", "safetensors"}
    if name.split(".")[0] in ("", *PLAIN):
        assert not loaded & {"langgraph.graph", "langchain_core"}


def test_torch_free_names_are_reached_through_the_package_without_torch() -> None:
    names = (
        "KVHandle, ModelSpec, compare, EdgePolicy, EdgeRouter, Route, RouteDecision, Level, LatentChannel, LatentError"
    )
    assert "torch" not in loaded_by(f"from langgraph_latent import {names}")


def test_the_page_on_the_structure_has_a_row_for_every_file() -> None:
    page = (PACKAGE.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    sections = {part.split("`")[1]: part for part in page.split("### ")[1:]}
    for name in FILES:
        room, _, file = name.partition(".")
        where = sections[f"{room}/"] if file else page
        assert file == "__init__" or f"`{(file or room)}.py`" in where, f"{name} is not on the page"


# -- the public face -------------------------------------------------------------------------------------------------


def test_the_public_names_are_these_and_each_is_there() -> None:
    """A contract: other people's scripts use them."""
    assert sorted(langgraph_latent.__all__) == PUBLIC
    assert dir(langgraph_latent) == sorted(langgraph_latent.__all__)
    for name in PUBLIC:
        value = getattr(langgraph_latent, name)
        assert value.__module__ == "langgraph_latent"
        assert value.__doc__, name
        home = importlib.import_module(f"langgraph_latent.{langgraph_latent._HOMES[name]}")
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


def test_a_chat_model_is_constructed_about_as_fast_as_a_pydantic_model_of_its_fields() -> None:
    """Weights, workspace and device are looked at on first use."""

    class Fields(BaseModel):
        model: str
        stop: list[str]
        temperature: float
        max_tokens: int
        seed: int

    def seconds(kind: type[BaseModel]) -> float:
        begin = time.perf_counter()
        kind(model="no/such-model", temperature=0, max_tokens=64, seed=1, stop=["END"])
        return time.perf_counter() - begin

    ours, bare = zip(*((seconds(ChatLatent), seconds(Fields)) for _ in range(300)), strict=True)
    assert statistics.median(ours) < 300 * statistics.median(bare)


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
