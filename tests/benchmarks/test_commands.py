"""The commands that the documents and the benchmarks themselves print can be run: they name
modules that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")
    ),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").rglob("*.py"),
]


def test_printed_commands_name_modules_that_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"-m (benchmarks(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    }
    places = {name: ROOT / name.replace(".", "/") for name in named}
    missing = [
        name
        for name, place in places.items()
        if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists())
    ]
    assert len(named) > 15 and not missing, missing


def test_no_benchmark_is_run_as_a_file() -> None:
    changes = (ROOT / "CHANGELOG.md",)  # says how it was
    found = [
        page.name
        for page in PAGES
        if page not in changes
        and re.search(r"python3? benchmarks/", page.read_text(encoding="utf-8"))
    ]
    assert not found
