"""benchmarks.evidence.several: several knobs in one run of replicas, and random search."""

from __future__ import annotations

import math

import pytest

from benchmarks.evidence import several


def test_quick_prints_the_table(capsys: pytest.CaptureFixture[str], in_this_process: None) -> None:
    several.main(["--quick"])
    row = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| mlp-breast-cancer | 0 | hdet |")
    )
    assert (
        "lr 0.001, beta2 0." in row and "beta2 0.999" not in row and "weight_decay 0.01 " not in row
    )  # too short a run for trials of the rate


def test_a_search_has_the_usual_values_among_its_trials_and_chooses_by_other_batches_than_it_is_judged_by() -> (  # noqa: E501
    None
):
    tried = [several.drawn("mlp-breast-cancer", 0, number) for number in range(16)]
    assert tried[0] == several.USUAL and len({values["lr"] for values in tried}) == 16
    assert all(
        several.USUAL["lr"] / 16 <= values["lr"] <= several.USUAL["lr"] * 16 for values in tried
    )
    line = several.run("mlp-breast-cancer", "random 16", seed=0, steps=320, replicas=4)
    losses = [several.alone("mlp-breast-cancer", 0, 20, values) for values in tried]
    assert (
        line["validation"] == min(losses)[1] and line["values"] == tried[losses.index(min(losses))]
    )
    assert math.isfinite(line["again"]) and f"{line['again']:.4f}" in several.table([line])
