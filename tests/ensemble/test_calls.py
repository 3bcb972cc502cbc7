"""What a step in which nothing is to be done costs: calls of ours."""

from __future__ import annotations

from benchmarks.calls import a_rate


def test_a_step_with_nothing_to_do_makes_at_most_15_calls() -> None:
    calls = a_rate()
    assert len(calls) <= 15, calls
