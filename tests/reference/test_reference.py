"""The reference itself: each equation against numbers worked out by hand."""

import math

import pytest

from tests.reference import method


def close(expected, rel=1e-14, abs=1e-15):
    return pytest.approx(expected, rel=rel, abs=abs)


def test_multipliers_by_hand():
    assert method.multipliers(4, 0.3) == close([0.7, 0.9, 1.1, 1.3])
    assert method.multipliers(3, 0.5) == close([0.5, 1.0, 1.5])
    assert method.multipliers(2, 0.25) == close([0.75, 1.25])
    assert method.multipliers(1, 0.25) == [1.0]


def test_update_and_converge_by_hand():
    assert method.replica_update([1.0, 2.0], 0.5, 1.2, [1.0, -1.0]) == close([0.4, 2.6])
    assert method.converge([[1.0, 2.0], [3.0, 6.0]], method.uniform_weights(2)) == [2.0, 4.0]
    assert method.converge([[1.0], [3.0]], [0.75, 0.25]) == [1.5]


def test_controller_by_hand():
    assert method.scores([1.0, 2.0], 0.5) == [1.0, -1.0]
    assert method.softmax([1.0, -1.0])[0] == close(1 / (1 + math.exp(-2)))
    assert method.signal([0.75, 0.25], [1.0, 3.0]) == -0.5
    assert method.velocity_update(2.0, 1.0, 0.9) == close(1.9)
    assert method.base_update(10.0, 0.1, 0.5, 2.0) == close(10.0)


def test_printed_gamma_grows_400_fold_and_the_corrected_one_ends_at_the_floor():
    intervals = method.intervals_left(200_000, 100_000, 1000)
    assert intervals == 100
    printed = method.gamma_printed(25.0, 1e4, intervals)
    assert printed < 0
    assert (1 - printed) ** intervals == close(400, rel=1e-10)
    corrected = method.gamma_corrected(3.6e-9, 9e-4, intervals)
    assert 9e-4 * (1 - corrected) ** intervals == close(3.6e-9, rel=1e-10)


def test_noise_and_reassignment_by_hand():
    assert method.warm_noise_variance([3.0, 4.0], 0.1) == close(0.125)
    assert method.is_reassignment([2, 0, 1], 3)
    assert not method.is_reassignment([2, 0, 0], 3)
