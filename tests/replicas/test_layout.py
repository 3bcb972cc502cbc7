"""The arithmetic of ranks: worked tables, properties of every layout, refusals. No processes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hdet.replicas.layout import Layout, Table, paired

PAGE = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `from_layout\((.*)\)` \| (\d+) \| (.*) \|$", PAGE, re.MULTILINE)


def peers(layout: Layout) -> Table:
    """[member][replica]: ranks that hold the same part of the model."""
    return tuple(zip(*layout.replicas, strict=True))


def tables(layout: Layout) -> list[list[list[int]]]:
    """As in a row of the page: replicas, peers, who sees a loss (the last stage), and who has a
    tied embedding (the first and the last stage)."""
    stages = layout.groups("pp")
    last = {group[-1] for group in stages}
    losses = [[rank for rank in replica if rank in last] for replica in layout.replicas]
    tied = [[group[0], group[-1]] for group in stages if layout.pp > 1]
    return [*([list(ranks) for ranks in t] for t in (layout.replicas, peers(layout), losses, tied))]


def written(cell: str) -> list[list[int]]:
    """Of "{0, 2} {4-7}"."""
    spans = [re.findall(r"(\d+)(?:-(\d+))?", ranks) for ranks in re.findall("{(.*?)}", cell)]
    return [[r for a, b in span for r in range(int(a), int(b or a) + 1)] for span in spans]


@pytest.mark.parametrize(("sizes", "world", "cells"), ROWS)
def test_the_pages_tables_hold(sizes: str, world: str, cells: str) -> None:
    layout = Layout(int(world), **eval(f"dict({sizes})"))
    assert tables(layout) == [written(cell) for cell in cells.split(" | ")]
    assert len(ROWS) > 5


SIZES = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp = draw(SIZES), draw(SIZES)
    pp, dp = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 8))
    ep, etp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([None, None, 1, 2]))
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    shard = draw(st.sampled_from([d for d in range(1, dp * cp + 1) if dp * cp % d == 0]))
    try:
        return Layout(tp * cp * pp * dp, tp, cp, ep, pp, order, etp, shard)
    except ValueError:
        assume(False)
        raise


def lines_of(layout: Layout, axis: str) -> set[tuple[int, ...]]:
    """Groups by the definition: rank = sum of coordinate * stride, the axis named first at 1."""
    etp = layout.tp if layout.etp is None else layout.etp
    edp = layout.world // (etp * layout.ep * layout.pp)
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    if axis in ("ep", "etp", "edp"):
        sizes = {"tp": etp, "ep": layout.ep, "dp": edp, "pp": layout.pp}
    names = layout.order.split("-")[::-1]
    grid = np.arange(layout.world).reshape([sizes.get(name, 1) for name in names])
    place = names.index({"etp": "tp", "edp": "dp"}.get(axis, axis))
    return set(map(tuple, np.moveaxis(grid, place, -1).reshape(-1, grid.shape[place]).tolist()))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_replicas_of_any_layout(layout: Layout) -> None:
    """They are equal, closed under what is shared, minimal, with peers at the same place; or the
    layout is refused because its experts are in no such relation to the rest."""
    shared = {axis: layout.groups(axis) for axis in ("tp", "cp", "pp", "ep", "etp", "shard")}
    has_experts = layout.ep > 1 or layout.etp is not None
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
        is_used = has_experts or axis not in ("ep", "etp", "edp")
        assert set(layout.groups(axis)) == (lines_of(layout, axis) if is_used else set())
    try:
        replicas = layout.replicas
    except ValueError as error:
        assert has_experts, error
        return
    assert sorted(itertools.chain(*replicas)) == [*range(layout.world)]
    assert len({len(replica) for replica in replicas}) == 1
    home = {rank: r for r, replica in enumerate(replicas) for rank in replica}
    for groups in shared.values():
        assert all(len({home[rank] for rank in group}) == 1 for group in groups)
    # Minimal: from its first rank every other one is reached through shared groups.
    for replica in replicas:
        reached, grown = {replica[0]}, set(replica[:1])
        while grown:
            met = [g for groups in shared.values() for g in groups if set(g) & grown]
            grown = {*itertools.chain(*met)} - reached
            reached |= grown
        assert reached == set(replica)
    lines = peers(layout)
    assert sorted(itertools.chain(*lines)) == [*range(layout.world)]
    assert all([home[rank] for rank in line] == list(range(len(replicas))) for line in lines)
    assert all(list(line) == sorted(line) for line in lines)
    # Peers hold the same part: the same coordinate along tp, pp, ep and etp, and the same shard.
    for axis, groups in shared.items():
        place = {rank: k for group in groups for k, rank in enumerate(group)}
        assert all(len({place.get(rank) for rank in line}) == 1 for line in lines), axis
    if layout.ep == 1 and layout.etp is None and layout.shard == 1:
        assert len(replicas) == layout.dp and len(replicas[0]) == layout.tp * layout.cp * layout.pp


@pytest.mark.parametrize(("sizes", "message"), [
    ({"tp": True}, "tp must be a whole number >= 1, got True"),
    ({"etp": 0}, "etp must be a whole number >= 1, got 0"),
    ({"tp": 3}, "8 ranks are not divisible by tp 3 .* start a multiple"),
    ({"ep": 3}, "8 ranks are not divisible by etp 1 \\* ep 3 .* start a multiple"),
    ({"shard": 3}, "shard 3 must divide dp 8 \\* cp 1"),
    ({"world": 12, "cp": 2, "shard": 3}, "shard 3 must .* not cut .* choose a multiple"),
    *(({"order": order}, f"order must name dp once.* got '{order}'")
      for order in ("tp-dp-xp", "tp-tp-dp", "tp-cp-pp")),
    ({"pp": 2, "order": "tp-dp"}, "order must name dp, pp once"),
    ({"ep": 2, "tp": 2, "pp": 2, "etp": 1, "order": "tp-pp-dp-ep"},
        "other pipelines.*put pp last"),
])  # fmt: skip
def test_refusals_name_the_way_out(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**{"world": 8, **sizes})
    with pytest.raises(ValueError, match="axis must be one of"):
        Layout(16).groups("fsdp")


@pytest.mark.parametrize(("world", "sharing", "copies", "message"), [
    (3, {"tp": ((0, 1), (2,))}, {}, "unequal size: ranks 2 and ranks 0-1"),
    # four ranks each; in one tp is 0-1, in the other 4-6
    (8, {"tp": ((0, 1), (2, 3), (4, 6), (5, 7)), "pp": ((0, 2), (1, 3), (4, 5), (6, 7))}, {},
        "ranks 0-3 and ranks 4-7 have tp groups at different places"),
    # the other way round in one of them
    (4, {"tp": ((0, 1), (3, 2))}, {}, "tp groups at different places"),
    # tp was forgotten: 0 and 1 are no copies
    (4, {}, {"dp": ((0, 2), (1, 3))}, "ranks 0-3 .* not in one dp group.* missing"),
])  # fmt: skip
def test_replicas_that_are_not_alike_are_refused(world, sharing, copies, message) -> None:
    with pytest.raises(ValueError, match=message):
        paired(range(world), sharing, copies)


def test_ten_thousand_ranks() -> None:
    layout = Layout(10240, tp=8, pp=8, shard=16)
    assert len(layout.replicas) == 10 and len(layout.replicas[0]) == 1024
