"""The packages of hdet, what each imports, and their lines: `python -m tests.packages [--write]`.

A module of `hdet/` beside the packages counts as one. A package stands above all that it imports,
so the drawing has no arrow up unless there is a circle, which is an error. ``--write`` puts the
drawing into docs/design.md; tests/test_rooms.py compares the two.
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
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->"
LAZY = "__init__"
"""`hdet/__init__.py` loads a name's module when that is asked for, so any package may read it."""


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


def package_of(module: str) -> str:
    return module.split(".")[0]


@cache
def imports_by_package() -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {package_of(m): set() for m in sources() if package_of(m) != LAZY}
    found.pop("__main__")
    for module in sources():
        if package_of(module) in found:
            others = {package_of(other) for other in imports_of(module)}
            found[package_of(module)] |= (others & found.keys()) - {package_of(module)}
    return found


def floors() -> list[list[str]]:
    """Packages by height, the ground first. Raises graphlib.CycleError for packages in a circle."""
    height: dict[str, int] = {}
    for package in TopologicalSorter(imports_by_package()).static_order():
        height[package] = 1 + max(
            (height[other] for other in imports_by_package()[package]), default=-1
        )
    return [sorted(p for p in height if height[p] == n) for n in range(max(height.values()) + 1)]


def lines_of(package: str) -> int:
    paths = [path for module, (path, _) in sources().items() if package_of(module) == package]
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def drawing() -> str:
    """A table in Markdown, the upper floors first."""
    rows = ["| floor | packages |", "|---|---|"]
    for number, packages in reversed(list(enumerate(floors()))):
        rows.append(f"| {number} | {', '.join(f'`{one}`' for one in packages)} |")
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
    for package, others in sorted(imports_by_package().items()):
        imported = ", ".join(sorted(others)) or "nothing"
        print(f"{package}, {lines_of(package)} lines, imports {imported}")


if __name__ == "__main__":
    main()
