"""Which cycles count for a controller that learns near the schedule's peak, against what is said of
it: from the first at 95 % of the peak until the schedule is below 90 %."""

from __future__ import annotations

import warnings

from hypothesis import given
from hypothesis import strategies as st

from hdet import Decision
from hdet.controllers.near_peak import NearPeak
from hdet.core.evidence import Evidence
from tests.core import controller_runs

KNOBS = ("first", "second")
PARTS = st.sampled_from([0.1, 0.89, 0.9, 0.94, 0.95, 1.0])
PEAKS = st.sampled_from([0.0, 0.5, 1.0, 2.0])


class Looks(NearPeak):
    def decide(self, evidence: Evidence) -> list[Decision]:
        self.near = self.look(evidence)
        return [Decision()] * len(self.near)


@given(st.lists(st.tuples(PARTS, PARTS), max_size=12), st.tuples(PEAKS, PEAKS))
def test_cycles_count_from_near_the_peak_until_past_it(
    history: list[tuple[float, float]], peaks: tuple[float, float]
) -> None:
    """A value whose peak is 0 is always there. Where fewer than two have counted by the first
    cycle past the peak, it is said, once."""
    rule = Looks()
    counted, fallen = dict.fromkeys(KNOBS, 0), dict.fromkeys(KNOBS, False)
    warm = dict.fromkeys(KNOBS, False)
    for parts in history:
        scheduled = [part * peak for part, peak in zip(parts, peaks, strict=True)]
        evidence = controller_runs.evidence(knobs=KNOBS, scheduled=scheduled, peak=list(peaks))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rule.learn(evidence)
        near, late = [], []
        for name, part, peak in zip(KNOBS, parts, peaks, strict=True):
            at = part if peak else 1.0
            warm[name] |= at >= 0.95
            if warm[name] and at < 0.9 and not fallen[name]:
                fallen[name] = True
                late += [name] if counted[name] < 2 else []
            near.append(warm[name] and at >= 0.9)
            counted[name] += near[-1]
        assert rule.near == near
        assert [str(w.message).split(" has fallen")[0] for w in caught] == [
            f"the schedule of {', '.join(late)}" for _ in late[:1]
        ]
        assert rule.idle == all(
            warm[name] and peak and part < 0.9
            for name, part, peak in zip(KNOBS, parts, peaks, strict=True)
        )
