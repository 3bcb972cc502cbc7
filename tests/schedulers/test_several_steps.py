"""A scheduler that the user steps several times between two optimizer steps, as accelerate does with those that it has prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler as torchs

import hdet
from tests.harness import Scripted, sgd


def ratios(build: Callable[[Any], Any]) -> list[float]:
    """The rate in force over that of the schedule alone, after each round."""
    ours, plain = sgd(), sgd()
    scheduler, alone = build(ours), build(plain)
    ensemble, found = hdet.Ensemble(ours, None, sync=hdet.Sync(2), controller=Scripted([4.0])), []
    for _ in range(20):
        ours.step()
        ensemble.step(1.0)
        for _ in range(4):
            scheduler.step()
            alone.step()
        found.append(ensemble.value("lr") / plain.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "build",
    [
        lambda o: torchs.CosineAnnealingLR(o, 100, eta_min=1e-2),
        lambda o: torchs.CosineAnnealingLR(o, 30),  # past its end
        lambda o: torchs.StepLR(o, 5, 0.5),
        lambda o: torchs.ExponentialLR(o, 0.95),
        lambda o: torchs.LambdaLR(o, lambda t: 0.97**t),
        lambda o: torchs.LinearLR(o, 0.1, 1, 50),
    ],
)
def test_each_of_its_steps_is_replayed(build: Callable[[Any], Any]) -> None:
    found = ratios(build)
    assert found[0] == 1.0 and found[1:] == pytest.approx([4.0] * 19, rel=1e-9)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter")
def test_one_that_is_made_of_others_is_refused_where_its_steps_lead_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"SequentialLR has stepped several times.*rescheduling"):
        ratios(lambda o: torchs.SequentialLR(o, [torchs.LinearLR(o, 0.1, 1, 9), torchs.CosineAnnealingLR(o, 100)], [9]))


def test_a_schedule_that_is_built_after_many_writes_by_hand_is_found() -> None:
    ours = sgd()
    ensemble = hdet.Ensemble(ours, None, sync=hdet.Sync(2), controller=Scripted([4.0]))

    def by_hand() -> None:
        for _ in range(40):
            ours.step()
            ensemble.step(1.0)
            ours.param_groups[0]["lr"] *= 0.99

    with pytest.warns(UserWarning, match="taken as the base value in force"):
        by_hand()
    with ensemble.rescheduling():
        began = ours.param_groups[0]["lr"]
        scheduler = torchs.LambdaLR(ours, lambda t: 0.9**t)
    for t in range(1, 11):
        ours.step()
        ensemble.step(1.0)
        scheduler.step()
        assert ensemble.value("lr") == pytest.approx(4 * began * 0.9**t, rel=1e-9)
