"""docs/layouts.md shows the worked tables, which test_layout.py holds against the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from .tables import CASES, Case

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def shown(ranks: list[int]) -> str:
    """Runs of three and more are shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "{" + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs) + "}"


def row(case: Case) -> str:
    """As the page has it; printed by `python -m tests.replicas.test_page`."""
    sizes = ", ".join(f'{name}="{size}"' if isinstance(size, str) else f"{name}={size}" for name, size in case.sizes.items())
    columns = [" ".join(map(shown, table)) or "-" for table in (case.replicas, case.peers, case.losses, case.tied)]
    return f"| `from_layout({sizes})` | {case.world} | " + " | ".join(columns) + " |"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.world}-{case.sizes}")
def test_the_page_has_every_worked_table(case: Case) -> None:
    assert row(case) in PAGE.splitlines()


def test_nothing_was_overlooked() -> None:
    assert len(CASES) == PAGE.count("| `from_layout(")


if __name__ == "__main__":
    print("\n".join(map(row, CASES)))
