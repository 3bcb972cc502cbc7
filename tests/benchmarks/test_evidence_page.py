"""docs/evidence.md: its tables are those that the report prints from the lines in the repository."""

from __future__ import annotations

from pathlib import Path

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
