"""The commands that the documents and the benchmarks themselves print name modules that are there;
and tables of the documents are those that the reports print."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import gpu_report
from benchmarks.evidence import auto_report
from benchmarks.tables import written

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")
PAGES = [*(ROOT / name for name in NAMES), *(ROOT / "docs").rglob("*.md")]
PAGES += (ROOT / "benchmarks").rglob("*.py")


def test_printed_commands_name_modules_that_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"-m (benchmarks(?:\.\w+)+)", text))
    places = [ROOT / name.replace(".", "/") for name in named]
    missing = [p for p in places if not (p.with_suffix(".py").exists() or p.is_dir())]
    assert len(named) > 15 and not missing, missing


def test_the_pages_have_what_was_measured() -> None:
    found = auto_report.report()
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in auto_report.PAGES]
    assert [written(page, found) for page in pages] == pages, (
        "python -m benchmarks.evidence.auto_report --write"
    )


def test_the_page_has_what_was_measured_on_a_gpu() -> None:
    kept = gpu_report.report(ROOT / gpu_report.RESULTS)
    page = (ROOT / gpu_report.PAGE).read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == len(kept)
    assert written(page, kept) == page, "python -m benchmarks.gpu_report --write"
