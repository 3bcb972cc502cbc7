"""Rank tables by hand, from rank = sum of coordinate * stride; docs/ranks.md shows the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from hdet.replicas.layout import Layout, Table


class Case(NamedTuple):
    world: int
    sizes: dict[str, Any]
    replicas: list[list[int]]
    peers: list[list[int]]
    losses: list[list[int]]
    tied: list[list[int]]


def peers(layout: Layout) -> Table:
    """[member][replica]: ranks that hold the same part of the model."""
    return tuple(zip(*layout.replicas, strict=True))


def tables(layout: Layout) -> list[list[list[int]]]:
    """The columns of a `Case`: a loss is seen by the ranks of the last pipeline stage, a tied
    embedding is on the first and the last one."""
    stages = layout.groups("pp")
    last = {group[-1] for group in stages}
    losses = [[rank for rank in replica if rank in last] for replica in layout.replicas]
    tied = [[group[0], group[-1]] for group in stages if layout.pp > 1]
    return [*([list(ranks) for ranks in t] for t in (layout.replicas, peers(layout), losses, tied))]


def pairs(first: int, last: int, distance: int) -> list[list[int]]:
    return [[rank, rank + distance] for rank in range(first, last + 1)]


def runs(*spans: tuple[int, int]) -> list[int]:
    return [rank for low, high in spans for rank in range(low, high + 1)]


HALVES = [runs((0, 7)), runs((8, 15))]
BY_FOUR = [runs((0, 3)), runs((4, 7)), runs((8, 11)), runs((12, 15))]
# two stages of eight ranks, two replicas of four ranks in each
STAGED = [runs((0, 3), (8, 11)), runs((4, 7), (12, 15))]
LAST_STAGE = [runs((8, 11)), runs((12, 15))]
LINES = [[k, k + 4, k + 8, k + 12] for k in range(4)]
FOURS, TWOS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
ODD_EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]

CASES = [
    Case(8, {}, [[r] for r in range(8)], [[*range(8)]], [[r] for r in range(8)], []),
    # rank = tp + 2 dp + 4 pp
    Case(8, {"tp": 2, "pp": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    # Experts live on four neighbours: rank = ep + 4 edp.
    Case(8, {"ep": 4}, FOURS, pairs(0, 3, 4), FOURS, []),
    Case(8, {"cp": 2}, TWOS, ODD_EVEN, TWOS, []),
    # Two instances of a distributed optimizer over eight ranks, or FSDP2 on a mesh (2, 4).
    Case(8, {"shard": 4}, FOURS, pairs(0, 3, 4), FOURS, []),
    # Layers without experts are whole on each rank, an expert is split over two.
    Case(8, {"etp": 2}, TWOS, ODD_EVEN, TWOS, []),
    # Two stages next to each other: rank = pp + 2 dp; stage 1 is odd.
    Case(8, {"pp": 2, "order": "pp-dp"}, TWOS, ODD_EVEN, [[1], [3], [5], [7]], TWOS),
    # rank = tp + 2 cp + 4 dp + 8 pp
    Case(16, {"tp": 2, "cp": 2, "pp": 2}, STAGED, pairs(0, 3, 4) + pairs(8, 11, 4), LAST_STAGE,
        pairs(0, 7, 8)),
    # Dense: tp + 2 dp + 8 pp, dp 4. Experts: tp + 2 ep + 4 edp + 8 pp: {0, 2}, {1, 3}, {4, 6}, ...
    # share them, which joins dp in twos.
    Case(16, {"tp": 2, "ep": 2, "pp": 2}, STAGED, pairs(0, 3, 4) + pairs(8, 11, 4), LAST_STAGE,
        pairs(0, 7, 8)),
    Case(16, {"ep": 4}, BY_FOUR, LINES, BY_FOUR, []),
    # Experts that are not split: ep + 4 edp, beside tp + 2 dp.
    Case(16, {"tp": 2, "ep": 4, "etp": 1}, BY_FOUR, LINES, BY_FOUR, []),
    Case(16, {"shard": 8}, HALVES, pairs(0, 7, 8), HALVES, []),
    # rank = tp + 2 dp; the shards of tp 0 are {0, 2, 4, 6} and {8, 10, 12, 14}.
    Case(16, {"tp": 2, "shard": 4}, HALVES, pairs(0, 7, 8), HALVES, []),
    # rank = tp + 2 pp + 8 dp; the last stage is pp = 3.
    Case(16, {"tp": 2, "pp": 4, "order": "tp-pp-dp"}, HALVES, pairs(0, 7, 8), [[6, 7], [14, 15]],
        [[0, 6], [1, 7], [8, 14], [9, 15]]),
]  # fmt: skip


def shown(ranks: list[int]) -> str:
    """Runs of three and more are shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 2 else str(run)[1:-1] for run in runs)
    return f"{{{', '.join(texts)}}}"


def row(case: Case) -> str:
    """As the page has it; printed by `python -m tests.replicas.tables`."""
    quoted = {n: f'"{size}"' if isinstance(size, str) else size for n, size in case.sizes.items()}
    sizes = ", ".join(f"{name}={size}" for name, size in quoted.items())
    columns = [" ".join(map(shown, table)) or "-" for table in case[2:]]
    return f"| `from_layout({sizes})` | {case.world} | " + " | ".join(columns) + " |"


if __name__ == "__main__":
    print("\n".join(map(row, CASES)))
