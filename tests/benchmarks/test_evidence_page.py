"""docs/evidence and docs/results.md: their tables are those that the reports print from the lines
in the repository."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_report
from benchmarks.evidence import auto_report, report, scoreboard
from benchmarks.tables import written

ROOT = Path(__file__).parents[2]


def tables(page: str) -> set[str]:
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return {"\n".join(table) for table in found if table}


def shown(page: str) -> set[str]:
    return tables((ROOT / "docs" / "evidence" / f"{page}.md").read_text(encoding="utf-8"))


def test_tables_of_the_page_about_replicas_are_those_that_the_report_prints() -> None:
    """It shows some of them."""
    printed = tables(report.report())
    heads = {table.splitlines()[0] for table in printed}
    page = {table for table in shown("replicas") if table.splitlines()[0] in heads}
    assert len(page) == 6 and page <= printed


def test_the_pages_have_what_was_measured_of_auto_lr() -> None:
    found = auto_report.report()
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in auto_report.PAGES]
    assert [written(page, found) for page in pages] == pages, (
        "python -m benchmarks.evidence.auto_report --write"
    )


def test_the_page_has_what_was_measured_on_a_gpu() -> None:
    kept = gpu_report.report(ROOT / gpu_report.RESULTS)
    page = (ROOT / gpu_report.PAGE).read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 5
    assert written(page, kept) == page, "python -m benchmarks.gpu_report --write"


def test_the_page_has_the_scoreboard() -> None:
    scores, _ = sorted(tables(scoreboard.table(scoreboard.EXPERIMENT.read())), reverse=True)
    assert scores in shown("autolr")
