"""benchmarks.evidence.survey: trials that nothing follows from."""

from __future__ import annotations

from benchmarks.evidence import survey


def test_a_line_has_each_trial_and_what_its_arms_gain() -> None:
    line = survey.run("regression", -6, seed=0, steps=1000, places=[0.15, 0.3], lengths=[16, 32])
    assert [(trial["begins"], trial["steps"]) for trial in line["trials"]] == [(150, 16), (214, 32), (300, 16), (364, 32)]
    for trial in line["trials"]:
        gains = dict(zip(line["octaves"], trial["gains"], strict=True))
        assert gains[0] == 0 and gains[2] > 0 > gains[-2]  # a rate that is far too low
    heads, _, row = survey.table([line]).splitlines()
    assert heads == "| workload | start | 2^-1, 16 steps | 2^-1, 32 steps | 2^2, 16 steps | 2^2, 32 steps |"
    assert row.startswith("| regression | 2^-6 | -") and row.count(" to ") == 4
