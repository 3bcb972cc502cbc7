"""What imports what, read from the sources alone."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.rooms import HDET, LAZY, PAGE, imports_of, module_of, page_with_drawing, sources

# The same thing in two places; every other file's name stands for one thing.
TWINS: dict[str, set[str]] = {
    "step": {"kernels.native", "kernels.triton", "kernels.reference", "triton_kernels"},
    "rules": {"kernels.reference", "triton_kernels"},
}


def test_the_drawing_in_the_documents_is_drawn_from_the_imports() -> None:
    """Rooms in a circle have no floors, and raise."""
    assert PAGE.read_text("utf-8") == page_with_drawing(), "python -m benchmarks.rooms --write"


def test_backends_of_the_kernels_do_not_import_each_other() -> None:
    backends = {"native", "triton", "reference"}
    for module in sources():
        package, _, own = module.partition(".")
        if package == "kernels" and (own := own.split(".")[0]) in backends:
            others = {other.split(".")[1] for other in imports_of(module) if "kernels." in other}
            assert not others & backends - {own}, module


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
