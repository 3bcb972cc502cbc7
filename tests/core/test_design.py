"""Orthogonal designs: balance, products of columns, fold-over, and random orders and signs."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.clock import Clock
from hdet.core.design import columns, is_orthogonal_possible, orthogonal
from hdet.core.engine import Engine
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
