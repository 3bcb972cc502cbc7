"""Grids; and orthogonal designs: balance, products of columns, fold-over, orders and signs."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.clock import Clock
from hdet.core.design import columns, is_orthogonal_possible, orthogonal
from hdet.core.engine import Engine
from hdet.core.scale import Scale
from hdet.core.spread import Grid
from hdet.core.value import Value

KNOBS = [f"knob {k}" for k in range(31)]


def product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("count", [2, 4, 8, 16, 64])
def test_columns_are_balanced_and_orthogonal(count: int) -> None:
    design = columns(count, count - 1)
    assert len(design) == count - 1 and {level for column in design for level in column} == {-1, 1}
    assert not any(map(sum, design))
    assert not any(product(a, b) for a, b in combinations(design, 2))


@pytest.mark.parametrize("count", [8, 16, 32])
def test_of_half_as_many_knobs_none_is_the_product_of_two_others(count: int) -> None:
    design = columns(count, count // 2)
    for a, b in combinations(design, 2):
        both = [x * y for x, y in zip(a, b, strict=True)]
        assert not any(product(both, column) for column in design)


@pytest.mark.parametrize("count", range(1, 34))
def test_a_power_of_two_and_fewer_knobs_than_replicas(count: int) -> None:
    assert is_orthogonal_possible(count, 1) == (count in (1, 2, 4, 8, 16, 32))
    assert not is_orthogonal_possible(count, max(count, 2))


@given(st.integers(0, 2**31), st.integers(0, 1000), st.sampled_from([2, 8, 32]), st.data())
def test_the_second_cycle_of_a_pair_is_folded_over(
    seed: int, pair: int, count: int, data: st.DataObject
) -> None:
    knobs = KNOBS[: data.draw(st.integers(1, count - 1))]
    first, second = (orthogonal(seed, 2 * pair + i, knobs, count) for i in range(2))
    assert second == [[-level for level in row] for row in first]


def test_places_and_signs_are_drawn_anew_for_each_pair() -> None:
    """Of 400 pairs each replica is up in about half, whichever the knob (5 standard deviations);
    and two knobs' signs are independent."""
    rows = [orthogonal(3, 2 * pair, KNOBS[:3], 8) for pair in range(400)]
    for k in range(3):
        for r in range(8):
            assert abs(sum(levels[k][r] for levels in rows)) < 5 * 20
    assert len({tuple(map(tuple, levels)) for levels in rows}) > 390


def test_the_engine_gives_each_knob_its_own_two_levels() -> None:
    knobs = [Value("a", 0.2), Value("b", 0.5)]
    engine = Engine(knobs, 4, Clock(1), seed=5, design="orthogonal")
    a, b = engine.multipliers()
    assert sorted(a) == [0.8, 0.8, 1.2, 1.2] and sorted(b) == [0.5, 0.5, 1.5, 1.5]
    assert product([x - 1 for x in a], [x - 1 for x in b]) == pytest.approx(0)
    engine.tick()
    engine.close([1.0] * 4)
    assert engine.multipliers()[0] == pytest.approx([2 - x for x in a])


@pytest.mark.parametrize(
    ("grid", "count", "points"),
    [
        (Grid(), 2, [1.0, 1.0]),
        (Grid(0.3), 4, [0.7, 0.9, 1.1, 1.3]),
        (Grid(ratio=5), 3, [0.2, 1.0, 5.0]),
        (Grid(ratio=8), 4, [1 / 8, 1 / 2, 2.0, 8.0]),
        (Grid(ratio=5), 1, [1.0]),
        (Grid(multipliers=[2, 0.5]), 4, [2.0, 2.0, 0.5, 0.5]),
    ],
)
def test_the_points_of_a_grid(grid: Grid, count: int, points: list[float]) -> None:
    assert Value("a", grid).points(count) == pytest.approx(points)
    assert grid.explores == (grid != Grid())


@pytest.mark.parametrize("kind", ["log", "linear", "horizon"])
def test_values_are_what_their_multipliers_make_of_the_peak(kind: str) -> None:
    """Whatever the schedule's value and the correction are now."""
    scale, values = Scale(kind, 0.5), [0.6, 0.3, 0.5]
    value = Value("a", Grid(values=values), scale, scheduled=[0.1])
    value.simulated = [(0.5, 0.1)]
    value.correction = 3.0
    tried = [scale.fanned(0.5, rho) for rho in value.points(3)]
    assert tried == pytest.approx(values) and value.points(3)[2] == 1.0


@given(st.integers(0, 99), st.integers(1, 3))
def test_given_multipliers_are_shuffled_in_each_cycle_as_others(cycle: int, each: int) -> None:
    """By the same permutation as a grid of a spread, which no rank needs to be told."""
    listed = [1.0, 0.5, 0.1, 5.0]
    grids, count = (Grid(multipliers=listed), Grid(0.3)), 4 * each
    engines = [Engine([Value("lr", grid)], count, Clock(1), seed=1) for grid in grids]
    for engine in engines:
        engine.cycle = cycle
    ours, evens = (engine.multipliers()[0] for engine in engines)
    ranks = [sorted(evens).index(rho) for rho in evens]
    assert ours == [listed[rank // each] for rank in ranks]
