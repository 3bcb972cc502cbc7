"""Co-resident replicas on one line: the run with stored parameters, and what a cycle brings."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run, model, probe

from .helpers import TAKEN_BACK, same

ADAMW = partial(hdet.FusedAdamW, decay_at="base")
SGD = partial(hdet.FusedSGD, momentum=0.9)
BF16 = torch.bfloat16


def line(count: int = 3, **settings: Any) -> Run:
    return Run(together=count, storage="displacement", **{"optimizer": ADAMW, **settings})


@pytest.mark.parametrize("settings", [
    {"weight_decay": 0.1},
    {"optimizer": SGD, "lr": 1e-2},
    {"weights": "softmax", "spread": 0.9},
    {"controller": "probe"},
])  # fmt: skip
def test_is_the_run_with_stored_parameters(settings: dict[str, Any]) -> None:
    """Both round at most three times a step, by half a unit in the last place of weights < 1.1.

    What that changes in gradients is less than this bound leaves.
    """
    ours, theirs = line(**settings), Run(together=3, **{"optimizer": ADAMW, **settings})
    for step in range(1, 21):
        ours.step(), theirs.step()
        assert ours.ensemble.in_sync == theirs.ensemble.in_sync == (step % 5 == 0)
        for one, other in zip(ours.all_weights(), theirs.all_weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2 * 3 * step * 1.1 * 2.0**-24)
    assert ours.history["losses"] == pytest.approx(theirs.history["losses"], rel=1e-5)
    assert ours.ensemble.corrections == pytest.approx(theirs.ensemble.corrections, rel=1e-5)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD])
def test_bfloat16_is_the_run_with_masters(optimizer: Any) -> None:
    """A weight that is rounded the other way is off by 2^-8 for a step, as are gradients."""
    settings: dict[str, Any] = {"dtype": BF16, "lr": 1e-3, "controller": "probe"}
    ours = line(optimizer=optimizer, **settings)
    masters = partial(optimizer, master_weights="fp32")
    theirs = Run(together=3, optimizer=masters, **settings)
    histories = [[record["losses"] for record in run.steps(20).records] for run in (ours, theirs)]
    assert len(histories[0]) == 4 and ours.equal()
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, rel=2.0**-7)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_cycle_that_is_taken_back_leaves_what_was_before_it(
    dtype: torch.dtype, attempts: int
) -> None:
    run = line(weight_decay=0.1, dtype=dtype, divergence=TAKEN_BACK).steps(10)
    twin = line(weight_decay=0.1, dtype=dtype).steps(10)
    for _ in range(5 * attempts):
        run.step(dict.fromkeys(range(3), math.nan))
    if attempts == 1:
        assert any("taken back" in note for note in run.history["notes"])
        assert same(run.all_weights(), twin.all_weights())
        for param, other in zip(run.net.parameters(), twin.net.parameters(), strict=True):
            state, expected = run.optimizer.state[param], twin.optimizer.state[other]
            for key in ("base", "displacement", "scale", "exp_avg", "step"):
                assert torch.equal(state[key], expected[key]), key
    assert run.steps(5).ensemble.in_sync


@pytest.mark.parametrize(("settings", "message"), [
    ({"optimizer": hdet.FusedAdamW, "weight_decay": 0.1},
     "construct the optimizer with decay_at='base'"),
    ({"optimizer": partial(ADAMW, master_weights="fp32")}, "without master_weights='fp32'"),
    ({"optimizer": hdet.FusedSGD, "weight_decay": 0.1}, "set it to 0"),
    ({"knobs": [hdet.LearningRate(0.3, bounds=(1e-9, 1.0))]}, "has bounds"),
])  # fmt: skip
def test_what_would_leave_the_line_is_refused_when_the_ensemble_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        line(**settings)


def test_storage_is_named_and_an_unknown_one_refused() -> None:
    replicas = hdet.CoresidentReplicas(model(), 2, storage="displacement")
    said = "CoresidentReplicas(Sequential, num_replicas=2, storage='displacement')"
    assert repr(replicas) == said
    with pytest.raises(ValueError, match="storage='line' is unknown"):
        hdet.CoresidentReplicas(model(), 2, storage="line")


def test_the_probe_sees_the_value_behind_rounded_parameters() -> None:
    """At a tiny rate the parameters stand still."""
    run = line(2, dtype=BF16, lr=1e-7, controller=partial(probe, average_every=1)).steps(3)
    for k in range(2):
        values = run.optimizer.masters(list(run.net.parameters()), k)
        for value, param in zip(values, run.net.parameters(), strict=True):
            assert value is not None and not torch.equal(value, param.float())
            assert torch.equal(value.bfloat16(), param)
