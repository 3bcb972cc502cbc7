"""docs/promises.md: each promise names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def names(path: Path) -> set[str]:
    """What pytest could collect there: functions, classes, and a state machine's case."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.startswith(("test_", "Test"))}


def rows(text: str) -> list[tuple[str, str]]:
    """(promise, tests) of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[-1]) for row in cells if row[0] != "promise" and set(row[0]) != {"-"}]


def mistakes(text: str) -> list[str]:
    found = []
    for promise, tests in rows(text):
        listed = TEST.findall(tests)
        if not listed or TEST.sub("", tests).replace(",", "").strip():
            found.append(f"no test, or more than tests, beside {promise!r}")
        for file, name in listed:
            path = ROOT / "tests" / file
            if not path.is_file() or name not in names(path):
                found.append(f"there is no test {file}::{name}")
    return found


def test_every_promise_is_held_by_tests_that_exist() -> None:
    text = PAGE.read_text()
    assert len(rows(text)) > 50
    assert not mistakes(text), "\n".join(mistakes(text))


def test_a_promise_without_a_test_is_found() -> None:
    head = "| promise | held by |\n|---|---|\n"
    assert not mistakes(
        f"{head}| all is well | `test_promises.py::test_a_promise_without_a_test_is_found` |"
    )
    assert mistakes(f"{head}| all is well | |")
    assert mistakes(f"{head}| all is well | `test_promises.py::test_that_nobody_has_written` |")
    assert mistakes(f"{head}| all is well | `test_nowhere.py::test_it` |")
    assert mistakes(f"{head}| all is well | `test_promises.py::rows` |")
