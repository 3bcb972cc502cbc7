"""Co-resident replicas on one line under the Ensemble: the same run as with stored parameters, and everything that can happen in a cycle."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import hdet
from tests.harness import Run, model, probe

ADAMW = partial(hdet.FusedAdamW, decay_at="base")
SGD = partial(hdet.FusedSGD, momentum=0.9)
CASES = {
    "AdamW": {"optimizer": ADAMW, "weight_decay": 0.1},
    "SGD": {"optimizer": SGD, "lr": 1e-2},
    "softmax average": {"optimizer": ADAMW, "weights": "softmax", "spread": 0.9},
    "probe": {"optimizer": ADAMW, "controller": "probe"},
}


def pair(settings: dict[str, Any], count: int = 3, **stored: Any) -> tuple[Run, Run]:
    return Run(together=count, **settings, storage="displacement"), Run(
        together=count, **{**settings, **stored}
    )


@pytest.mark.parametrize("case", CASES)
def test_is_the_run_with_stored_parameters(case: str) -> None:
    """Four cycles in float32. Both forms round at most three times a step, by half a unit in the last place of weights below 1.1; what that
    changes in gradients is less than this bound leaves."""
    ours, theirs = pair(CASES[case])
    for step in range(20):
        ours.step()
        theirs.step()
        assert ours.ensemble.in_sync == theirs.ensemble.in_sync == ((step + 1) % 5 == 0)
        for one, other in zip(ours.all_weights(), theirs.all_weights(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2 * 3 * (step + 1) * 1.1 * 2.0**-24)
    a, b = ours.ensemble.history, theirs.ensemble.history
    assert a is not None and b is not None and a["losses"] == pytest.approx(b["losses"], rel=1e-5)
    assert ours.ensemble.corrections == pytest.approx(theirs.ensemble.corrections, rel=1e-5)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_bfloat16_is_the_run_with_masters(optimizer: Any) -> None:
    """A weight that is rounded the other way is off by 2^-8 for a step, in one of hundreds, and so are gradients. Losses are as near as that."""
    settings = {"optimizer": optimizer, "dtype": torch.bfloat16, "lr": 1e-3, "controller": "probe"}
    ours, theirs = pair(settings, optimizer=partial(optimizer, master_weights="fp32"))
    histories = [[record["losses"] for record in run.steps(20).records] for run in (ours, theirs)]
    assert len(histories[0]) == 4
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, rel=2.0**-7)
    assert ours.equal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_cycle_that_is_taken_back_leaves_what_was_before_it(
    dtype: torch.dtype, attempts: int
) -> None:
    settings = {"optimizer": ADAMW, "weight_decay": 0.1, "dtype": dtype, "storage": "displacement"}
    run = Run(together=3, divergence=hdet.Divergence(rollback="device"), **settings).steps(10)
    twin = Run(together=3, **settings).steps(10)
    for _ in range(attempts):
        for _ in range(5):
            run.step({k: float("nan") for k in range(3)})
    if attempts == 1:
        assert run.ensemble.history is not None and any(
            "taken back" in note for note in run.ensemble.history["notes"]
        )
        assert all(
            torch.equal(a, b) for a, b in zip(run.all_weights(), twin.all_weights(), strict=True)
        )
        for param, other in zip(run.net.parameters(), twin.net.parameters(), strict=True):
            state, expected = run.optimizer.state[param], twin.optimizer.state[other]
            for key in ("base", "displacement", "scale", "exp_avg", "step"):
                assert torch.equal(state[key], expected[key]), key
    run.steps(5)
    assert run.ensemble.in_sync


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": hdet.FusedAdamW, "weight_decay": 0.1},
            "construct the optimizer with decay_at='base'",
        ),
        ({"optimizer": partial(ADAMW, master_weights="fp32")}, "without master_weights='fp32'"),
        ({"optimizer": hdet.FusedSGD, "weight_decay": 0.1}, "set it to 0"),
    ],
)
def test_what_would_leave_the_line_is_refused_when_the_ensemble_is_made(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Run(together=2, storage="displacement", **settings)


def test_bounds_and_unknown_storage_are_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="storage='line' is unknown"):
        hdet.CoresidentReplicas(net, 2, storage="line")
    replicas = hdet.CoresidentReplicas(net, 2, storage="displacement")
    assert (
        repr(replicas) == "CoresidentReplicas(Sequential, num_replicas=2, storage='displacement')"
    )
    with pytest.raises(ValueError, match="has bounds"):
        hdet.Ensemble(
            ADAMW(net.parameters()),
            knobs=[hdet.LearningRate(0.3, bounds=(1e-9, 1.0))],
            replicas=replicas,
        )


def test_the_probe_sees_the_value_behind_rounded_parameters() -> None:
    """At a tiny rate the parameters stand still."""
    run = Run(
        together=2,
        optimizer=ADAMW,
        dtype=torch.bfloat16,
        lr=1e-7,
        storage="displacement",
        controller=partial(probe, average_every=1),
    ).steps(3)
    for k in range(2):
        values = run.optimizer.masters(list(run.net.parameters()), k)
        for value, param in zip(values, run.net.parameters(), strict=True):
            assert (
                value is not None
                and not torch.equal(value, param.float())
                and torch.equal(value.bfloat16(), param)
            )
