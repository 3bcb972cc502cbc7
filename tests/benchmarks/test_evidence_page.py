"""docs/evidence.md and docs/results.md: their tables are those that the reports print from the lines in the repository."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evidence import auto_report, scoreboard
from benchmarks.evidence.report.page import page, read

ROOT = Path(__file__).parents[2]


def tables(text: str) -> list[str]:
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(table) for table in found if table]


def test_the_page_has_the_tables_that_the_report_prints() -> None:
    printed = tables(page(read(sorted((ROOT / "benchmarks" / "results" / "evidence").glob("*.jsonl")))))
    shown = tables((ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"))
    assert len(printed) > 15
    assert not [table.splitlines()[0] for table in printed if table not in shown]


def test_the_pages_have_what_was_measured_of_auto_lr() -> None:
    runs = auto_report.of_files(*(str(ROOT / name) for name in (auto_report.RESULTS, auto_report.fixed_rates.RESULTS)))
    evidence, results = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("evidence", "results"))
    assert len(auto_report.sections(runs)) == len(auto_report.SECTIONS)
    for name, text in auto_report.sections(runs).items():
        for table in tables(text):
            assert table in tables(evidence), name
    for table in tables(auto_report.by_workload(runs)) + tables(auto_report.in_all(runs)):
        assert table in tables(results)


def test_the_page_has_the_scoreboard() -> None:
    lines = read([ROOT / scoreboard.RESULTS])
    printed = tables(scoreboard.table(lines))
    assert printed[0] in tables((ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"))
