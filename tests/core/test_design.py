"""Orthogonal designs: balance, products of columns, fold-over, and that slopes can always be told
apart; and the orders of one knob."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.controllers.regression import slopes
from hdet.core.clock import Clock
from hdet.core.design import columns, orthogonal
from hdet.core.engine import Engine, KnobSpec

KNOBS = [f"knob {k}" for k in range(40)]
UNKNOWN = {52, 92, 100}


def product(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def worst(design: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Largest sum of a column and product of two."""
    products = [abs(product(a, b)) for i, a in enumerate(design) for b in design[:i]]
    return max(abs(sum(column)) for column in design), max(products, default=0)


@pytest.mark.parametrize("count", [n for n in range(4, 105, 4) if n not in UNKNOWN] + [512])
def test_a_multiple_of_four_is_balanced_and_exactly_orthogonal(count: int) -> None:
    design = columns(count, min(count - 1, 40))
    assert worst(design) == (0, 0)
    assert {level for column in design for level in column} == {-1, 1}


@pytest.mark.parametrize(
    ("counts", "put_aside", "least", "levels"),
    [
        (range(5, 42, 4), 2, (0, 0), {-1, 0, 1}),  # one more stands in the middle
        # balanced columns of length 2 mod 4 agree in an even number of places: their product is
        # never 0
        (range(6, 43, 4), 3, (0, 2), {-1, 1}),
        (range(7, 44, 4), 1, (1, 1), {-1, 1}),  # the least for odd lengths
    ],
)  # fmt: skip
def test_other_numbers_have_the_least_sums_and_products(
    counts: range, put_aside: int, least: tuple[int, int], levels: set[int]
) -> None:
    for count in counts:
        design = columns(count, count - put_aside)
        assert worst(design) == least, count
        assert {(*sorted(set(column)), column.count(0)) for column in design} == {
            (*sorted(levels), int(0 in levels))
        }, count


@pytest.mark.parametrize("count", [52, 53, 54, 92])
def test_where_no_matrix_is_known_columns_are_nearly_orthogonal(count: int) -> None:
    sums, products = worst(columns(count, 12))
    assert sums <= count % 2 and products <= 4


@pytest.mark.parametrize("count", range(2, 34))
def test_as_many_knobs_as_there_can_be_are_told_apart(count: int) -> None:
    """A linear loss in 1 .. N - 1 knobs is recovered."""
    for knobs in range(1, count):
        truth = [random.Random(k).gauss(0, 1) for k in range(knobs)]
        levels = columns(count, knobs)
        rows = [[product(truth, [column[r] for column in levels])] for r in range(count)]
        found = slopes([[math.exp(level / 10) for level in column] for column in levels], rows)
        assert found is not None
        assert [one[0] / 10 for one in found] == pytest.approx(truth, abs=1e-6)


@pytest.mark.parametrize(("count", "knobs"), [(4, 4), (1, 1), (8, 9)])
def test_more_knobs_than_can_be_told_apart_are_refused(count: int, knobs: int) -> None:
    with pytest.raises(ValueError, match=f"at most {count - 1} knobs apart, got {knobs}"):
        columns(count, knobs)


counts = st.integers(2, 40)
seeds, pairs = st.integers(0, 2**31), st.integers(0, 1000)


@given(seeds, pairs, counts, st.data())
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


# -- one knob --------------------------------------------------------------------------------------


def test_the_engine_gives_each_knob_its_own_two_levels() -> None:
    knobs = [KnobSpec("a", 0.2), KnobSpec("b", 0.5)]
    engine = Engine(knobs, 4, Clock(1), seed=5, design="orthogonal")
    a, b = engine.multipliers()
    assert sorted(a) == [0.8, 0.8, 1.2, 1.2] and sorted(b) == [0.5, 0.5, 1.5, 1.5]
    assert product([x - 1 for x in a], [x - 1 for x in b]) == pytest.approx(0)
    engine.tick()
    engine.close([1.0] * 4, scheduled=[1.0, 1.0])
    assert engine.multipliers()[0] == pytest.approx([2 - x for x in a])
