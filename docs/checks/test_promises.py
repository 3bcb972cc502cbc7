"""docs/promises.md: each promise names tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_every_promise_is_held_by_tests_that_exist() -> None:
    found = rows(PAGE.read_text())
    assert len(found) > 50
    for promise, tests in found:
        listed = TEST.findall(tests)
        assert listed and not TEST.sub("", tests).strip(" ,"), f"of {promise!r}: tests, no more"
        for file, name in listed:
            path = ROOT / "tests" / file
            assert path.is_file() and name in names(path), f"there is no test {file}::{name}"
