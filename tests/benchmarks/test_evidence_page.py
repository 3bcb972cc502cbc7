"""docs/evidence and docs/results.md: their tables are those that the reports print from the lines
in the repository."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_report
from benchmarks.evidence import auto_report
from benchmarks.tables import written

ROOT = Path(__file__).parents[2]


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
