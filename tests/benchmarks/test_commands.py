"""The commands that the documents and the benchmarks themselves print can be run: they name
modules that are there; and the recommender's, which has no other test."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

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
    changes = (ROOT / "CHANGELOG.md", ROOT / "docs" / "names.md")  # say how it was
    found = [
        page.name
        for page in PAGES
        if page not in changes
        and re.search(r"python3? benchmarks/", page.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize("options", [[], ["--paper"]])
def test_the_recommender_is_trained(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process: no replicas, but every line of the loop."""
    monkeypatch.setattr(sys, "argv", ["recsys", "--steps", "20", "--sync-interval", "5", *options])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_module("benchmarks.recsys", run_name="__main__")
    assert (
        0.5 < float(capsys.readouterr().out.split("held-out loss")[1].split()[0]) < 0.8
    )  # ln 2 is 0.693
