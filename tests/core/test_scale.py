"""Scales: what factors do to values, what bounds do to both."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdet.core.scale import Scale

LOG, LINEAR, HORIZON = Scale("log"), Scale("linear", unit=0.1), Scale("horizon")
factors, kinds = st.floats(0.05, 20), st.sampled_from(["log", "linear", "horizon"])


@given(factors)
def test_each_scale_by_hand(factor: float) -> None:
    assert LOG.corrected(0.3, factor) == LOG.fanned(0.3, factor) == 0.3 * factor
    assert LINEAR.corrected(-0.2, factor) == pytest.approx(-0.2 + 0.1 * math.log(factor))
    assert LINEAR.fanned(-0.2, factor) == pytest.approx(-0.2 + 0.1 * (factor - 1))
    assert 1 / (1 - HORIZON.fanned(0.9, factor)) == pytest.approx(10 * factor)
    assert HORIZON.corrected(0.9, 2.0) == pytest.approx(0.95)


@given(kinds, st.floats(0.2, 0.8), st.floats(0.01, 100), st.floats(0.1, 1.9))
def test_no_value_leaves_its_bounds_and_the_multiplier_that_acts_gives_it(
    kind: str, value: float, factor: float, rho: float
) -> None:
    scale, free = Scale(kind, 0.5, low=0.2, high=0.8), Scale(kind, 0.5)
    base = scale.corrected(value, factor)
    used = scale.fanned(base, rho)
    assert 0.2 <= base <= 0.8 and 0.2 <= used <= 0.8
    acting = scale.effective(base, rho)
    assert acting > 0 and free.fanned(base, acting) == pytest.approx(used)
    if used == free.fanned(base, rho):
        assert acting == rho


@pytest.mark.parametrize("kind", ["log", "linear", "horizon"])
def test_corrections_that_matter_end_at_the_bounds(kind: str) -> None:
    scale = Scale(kind, 0.5, low=0.1, high=0.8)
    lowest, highest = scale.corrections(0.4)
    assert 0 < lowest < 1 < highest
    at_ends = [scale.corrected(0.4, correction) for correction in (lowest, highest)]
    assert at_ends == pytest.approx([0.1, 0.8])
    assert Scale(kind).corrections(0.4)[0] < 1e-12 and Scale(kind).corrections(0.4)[1] > 1e12


def test_tensors_stay_tensors() -> None:
    held = Scale("log", low=0.0, high=0.5).corrected(torch.tensor(0.4), 2.0)
    assert isinstance(held, torch.Tensor) and held == 0.5


@given(kinds, st.floats(0.01, 0.99), st.floats(0.01, 100))
def test_the_correction_that_leads_to_a_value_is_the_one_that_made_it(
    kind: str, value: float, factor: float
) -> None:
    scale = Scale(kind, 0.5)
    made = scale.corrected(value, factor)
    again = scale.corrected(value, scale.correction_to(made, value))
    assert again == pytest.approx(made, rel=1e-9, abs=1e-9)
    assert scale.corrected(value, 1.0) == scale.fanned(value, 1.0) == value  # bitwise
