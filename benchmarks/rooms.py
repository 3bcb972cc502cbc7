"""The rooms of hdet, what each imports, and their lines: `python -m benchmarks.rooms [--write]`.

A room is a package of `hdet/`, or a module beside the packages. A room stands above all that it
imports, so the drawing has no arrow up unless there is a circle, which is an error. ``--write``
puts the drawing into docs/design.md; tests/test_rooms.py compares the two.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
HDET, PAGE = ROOT / "hdet", ROOT / "docs" / "design.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->"
LAZY = "__init__"
"""`hdet/__init__.py` loads a name's module when the name is asked for, so any room may read it."""


def module_of(path: Path) -> str:
    """``run.cycles`` for hdet/run/cycles.py, ``run`` for hdet/run/__init__.py."""
    parts = path.relative_to(HDET).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """(file, syntax tree) by module; rglob does not follow the link to triton_kernels."""
    paths = sorted({*HDET.rglob("*.py"), *(HDET / "triton_kernels").glob("*.py")})
    return {module_of(path): (path, ast.parse(path.read_text("utf-8"))) for path in paths}


def imports_of(module: str) -> Iterator[str]:
    """The modules of hdet that ``module`` imports, inside functions and for type checks too."""
    path, tree = sources()[module]
    depth = len(path.relative_to(HDET).parts) - 1  # packages that the file lies in
    package = module.split(".")[:depth]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (".".join(name[1:]) or LAZY for name in names if name[0] == "hdet")
        elif isinstance(node, ast.ImportFrom):
            name = (node.module or "").split(".") if node.module else []
            if node.level == 0 and name[:1] != ["hdet"]:
                continue
            base = [*package[: depth - node.level + 1], *name] if node.level else name[1:]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                if alias.name != "_C":
                    yield inner if inner in sources() else ".".join(base) or LAZY


def room_of(module: str) -> str:
    return module.split(".")[0]


@cache
def imports_by_room() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {room_of(m): set() for m in sources() if room_of(m) != LAZY}
    found.pop("__main__")
    for module in sources():
        if room_of(module) in found:
            others = {room_of(other) for other in imports_of(module)}
            found[room_of(module)] |= (others & found.keys()) - {room_of(module)}
    return found


def floors() -> list[list[str]]:
    """Rooms by height, the ground first. Raises graphlib.CycleError for rooms in a circle."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(imports_by_room()).static_order():
        height[room] = 1 + max((height[other] for other in imports_by_room()[room]), default=-1)
    return [sorted(r for r in height if height[r] == n) for n in range(max(height.values()) + 1)]


def lines_of(room: str) -> int:
    paths = [path for module, (path, _) in sources().items() if room_of(module) == room]
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def drawing() -> str:
    """A table in Markdown, the upper floors first."""
    rows = ["| floor | packages |", "|---|---|"]
    for number, rooms in reversed(list(enumerate(floors()))):
        rows.append(f"| {number} | {', '.join(f'`{room}`' for room in rooms)} |")
    return "\n".join(rows) + "\n"


def page_with_drawing() -> str:
    """docs/design.md as it should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{drawing()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the drawing into docs/design.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with_drawing(), "utf-8")
    print(drawing())
    for room, others in sorted(imports_by_room().items()):
        imported = ", ".join(sorted(others)) or "nothing"
        print(f"{room}, {lines_of(room)} lines, imports {imported}")


if __name__ == "__main__":
    main()
