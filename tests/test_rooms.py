"""The rooms of the house: what imports what, read from the sources alone. docs/design.md describes
them."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

HDET = Path(__file__).parents[1] / "hdet"

# From the ground up; rooms of one floor do not import each other. A module that lies flat in hdet/
# is a room.
FLOORS = [
    {"core"},
    {"tensors", "profiling", "triton_kernels"},
    {"kernels.spec"},
    {"kernels.native", "kernels.triton", "kernels.reference"},
    {"kernels"},
    {"optim"},
    {"replicas"},
    {"converge", "noise"},
    {"knobs", "policies"},
    {"measure", "schedule"},
    {"controllers"},
    {"run"},
    {"trial"},
    {"parts"},
    {"ensemble"},
    {"schedulers", "checkpoint", "logging"},
    {"cli", "integrations"},
]
# hdet/__init__.py loads a name's module when the name is asked for, and holds __version__, which
# any room may read
LAZY = "__init__"

# The same thing in two places; every other file's name stands for one thing.
TWINS: dict[str, set[str]] = {
    "step": {"kernels.native", "kernels.triton", "kernels.reference", "triton_kernels"},
    "rules": {"kernels.reference", "triton_kernels"},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(HDET).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room_of(module: str) -> str:
    first, *more = module.split(".")
    return f"{first}.{more[0]}" if first == "kernels" and more else first


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    return {
        module_of(path): (path, ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(HDET.rglob("*.py"))
    } | {
        module_of(path): (path, ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted((HDET / "triton_kernels").glob("*.py"))
    }  # rglob does not follow links


def imports_of(module: str) -> Iterator[str]:
    """The modules of hdet that ``module`` imports anywhere in its file, also for the type checker
    alone."""
    path, tree = sources()[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2] or LAZY
                for alias in node.names
                if alias.name.split(".")[0] == "hdet"
            )
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != "hdet":
                continue
            if module == LAZY:
                package = []
            base = package[: len(package) - node.level + 1] if node.level else []
            named = (
                (node.module or "").split(".") if node.level else (node.module or "").split(".")[1:]
            )
            at = ".".join([*base, *filter(None, named)])
            for alias in node.names:
                inner = f"{at}.{alias.name}" if at else alias.name
                if alias.name == "_C":
                    continue
                yield inner if inner in sources() else at or LAZY


@cache
def arrows() -> dict[tuple[str, str], list[str]]:
    """(room, room it imports), with the modules that do."""
    found: dict[tuple[str, str], list[str]] = {}
    for module in sources():
        for other in imports_of(module):
            pair = room_of(module), room_of(other)
            if LAZY not in pair and "__main__" not in pair and pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{module} imports {other}")
    return found


def test_every_room_has_a_floor_and_every_arrow_points_down() -> None:
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {room_of(module) for module in sources()} - {LAZY, "__main__"}
    assert rooms == set(floor), "docs/design.md and FLOORS name every room"
    up = [
        line
        for pair, lines in arrows().items()
        if floor[pair[1]] >= floor[pair[0]]
        for line in lines
    ]
    assert not up, "\n".join(up)
    assert len(arrows()) > 40, "the graph has been read"


def test_no_circle_of_modules() -> None:
    """Not between rooms, which floors forbid, but inside of one."""
    graph = {
        module: {other for other in imports_of(module) if other != LAZY} - {module}
        for module in sources()
        if module != LAZY
    }
    while leaves := {module for module, others in graph.items() if not others & graph.keys()}:
        graph = {module: others for module, others in graph.items() if module not in leaves}
    assert not graph, "\n".join(
        f"{module} imports {', '.join(sorted(others & graph.keys()))}"
        for module, others in graph.items()
    )


def test_at_most_ten_modules_lie_flat() -> None:
    assert len(list(HDET.glob("*.py"))) <= 10


def test_a_files_name_stands_for_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path, _ in sources().values():
        if path.name not in ("__init__.py", "__main__.py"):
            places.setdefault(path.stem, set()).add(module_of(path).rpartition(".")[0])
    assert {name: rooms for name, rooms in places.items() if len(rooms) > 1} == TWINS


def controllers() -> dict[str, str]:
    """Concrete controllers and rules, and the module of each."""
    bases = {"Controller"}
    found: dict[str, str] = {}
    for _ in range(4):  # a class of a class of ...
        for module, (_, tree) in sources().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and bases & {
                    ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases
                }:
                    found[node.name] = module
        bases |= found.keys()
    return found


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    for module, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == name
            ):
                yield module, node


def test_no_controller_is_told_by_its_class_outside_of_its_file() -> None:
    known = controllers()
    assert {
        "ProbeRule",
        "SoftmaxController",
        "SequentialController",
        "Shadow",
        "AutoLR",
    } <= known.keys()
    told = []
    for module, call in calls("isinstance"):
        names = {
            node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)
        } & known.keys()
        told += [f"{module}: {ast.unparse(call)}" for name in names if known[name] != module]
    assert not told, "\n".join(told)


def test_no_optional_member_of_a_controller_is_asked_for_by_name() -> None:
    """One base class has every hook.

    (Optimizers and schedulers are others' classes: those are asked.)
    """
    asked = [
        f"{module}: {ast.unparse(call)}"
        for module, call in itertools.chain(calls("getattr"), calls("hasattr"))
        if ast.unparse(call.args[0]).split(".")[-1] in ("controller", "rule", "first", "then")
        and ast.unparse(call.args[1]) != "'name'"  # in a message about what is no controller
    ]
    assert not asked, "\n".join(asked)


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """Of itself pytest passes over some names, such as build, and says nothing."""
    folders = {path.parent.name for path in Path(__file__).parent.rglob("test_*.py")}
    passed_over = [
        (folder, pattern)
        for folder in folders
        for pattern in pytestconfig.getini("norecursedirs")
        if fnmatch(folder, pattern)
    ]
    assert not passed_over and "build" in folders
