"""docs/evidence and docs/results.md: their tables are those that the reports print from the lines
in the repository."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_report
from benchmarks.evidence import auto_report, scoreboard
from benchmarks.evidence.report.page import page, read
from benchmarks.evidence.report.tables import written

ROOT = Path(__file__).parents[2]


def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def tables(page: str) -> list[str]:
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(table) for table in found if table]


def test_the_page_has_the_tables_that_the_report_prints() -> None:
    printed = tables(
        page(read(sorted((ROOT / "benchmarks" / "results" / "evidence").glob("*.jsonl"))))
    )
    shown = tables(text("evidence/replicas"))
    assert len(printed) > 10
    assert not [table.splitlines()[0] for table in printed if table not in shown]


def test_the_pages_have_what_was_measured_of_auto_lr() -> None:
    found = auto_report.report(
        *(
            auto_report.read(str(ROOT / name))
            for name in (auto_report.RESULTS, auto_report.fixed_rates.RESULTS)
        )
    )
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in auto_report.PAGES]
    assert [written(page, found) for page in pages] == pages, (
        "python -m benchmarks.evidence.auto_report --write"
    )


def test_the_page_has_what_was_measured_on_a_gpu() -> None:
    kept, page = (
        gpu_report.report(ROOT / gpu_report.RESULTS),
        (ROOT / gpu_report.PAGE).read_text(encoding="utf-8"),
    )
    assert all(page.count(f"<!-- table: {name} -->") == 1 for name in kept)
    assert written(page, kept) == page, "python -m benchmarks.gpu_report --write"


def test_the_page_has_the_scoreboard() -> None:
    lines = read([ROOT / scoreboard.RESULTS])
    printed = tables(scoreboard.table(lines))
    assert printed[0] in tables(text("evidence/autolr"))
