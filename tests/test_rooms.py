"""What imports what, read from the sources alone."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from .packages import LAZY, PAGE, imports_of, page_with_drawing, sources


def test_the_drawing_in_the_documents_is_drawn_from_the_imports() -> None:
    """Packages in a circle have no floors, and raise."""
    assert PAGE.read_text("utf-8") == page_with_drawing(), "python -m tests.packages --write"


def test_backends_of_the_kernels_do_not_import_each_other() -> None:
    backends = {"native", "triton", "reference"}
    for module in sources():
        package, _, own = module.partition(".")
        if package == "kernels" and (own := own.split(".")[0]) in backends:
            others = {other.split(".")[1] for other in imports_of(module) if "kernels." in other}
            assert not others & backends - {own}, module


def test_no_circle_of_modules() -> None:
    """Not between packages, which floors forbid, but inside of one."""
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
