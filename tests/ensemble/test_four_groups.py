"""examples/four_groups.py on four processes, and on eight in groups of two."""

from __future__ import annotations

from typing import Any

import pytest

from examples import four_groups
from tests.distributed import run_ranks

CYCLES, BASE = 4, 1e-4


def train(rank: int, world: int) -> tuple[list[Any], float]:
    """[cycle](base value after it, multipliers, losses), and the loss at the end."""
    arguments = ["--steps", "60", "--cycle", "6", "--rate", str(BASE)]
    records, loss = four_groups.train(four_groups.arguments(arguments))
    rows = [[one["values"]["lr"], one["multipliers"]["lr"], one["losses"]] for one in records]
    return rows, loss


@pytest.mark.parametrize("world", [4, 8])
def test_the_base_value_moves_to_the_best_groups(world: int) -> None:
    """On all ranks alike; afterwards replicas are near it."""
    first, *others = run_ranks(train, world)
    assert all(other == first for other in others)
    rows, totals = first[0], dict.fromkeys(sorted(four_groups.RATES), 0.0)
    for _, multipliers, losses in rows[:CYCLES]:
        pairs = sorted(zip(multipliers, losses, strict=True))
        assert [BASE * rho for rho, _ in pairs] == pytest.approx([*totals])
        totals = {rate: totals[rate] + loss for rate, (_, loss) in zip(totals, pairs, strict=True)}
    assert [base for base, *_ in rows[: CYCLES - 1]] == [BASE] * (CYCLES - 1)
    best = min(totals, key=totals.__getitem__)
    assert rows[CYCLES - 1][0] == pytest.approx(best) and best > BASE
    assert {round(rho, 9) for row in rows[CYCLES:7] for rho in row[1]} == {0.9, 1.1}
