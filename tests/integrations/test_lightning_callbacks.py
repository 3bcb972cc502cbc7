"""hdet's callback beside Lightning's own that average weights and add parameter groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from .frameworks import (
    EVERY,
    PARTS,
    SPREAD,
    STEPS,
    STILL,
    Halved,
    equal,
    halved,
    needs,
    on_ranks,
    weights,
)

needs("lightning")
import lightning.pytorch as pl

from .lightning_runs import Net, fit

EPOCHS = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 3 * PARTS}
"""Of three steps."""


def _averaged(folder: str, kind: str, ensemble: dict[str, Any] | None) -> Any:
    """The average is kept by a callback that stands before ours."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    if kind == "swa":
        callback: Any = StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=2)
    else:
        callback = WeightAveraging(avg_fn=get_ema_avg_fn(0.5) if kind == "ema" else None)
    module = Net(schedule="constant")
    trainer = fit(folder, ensemble, module, save=8, before=[callback], **EPOCHS)
    saved = torch.load(Path(folder, "step=8.ckpt"), weights_only=True)["state_dict"]
    flat, seen = torch.cat([p.flatten() for p in saved.values()]), trainer.callback
    return [weights(module), flat, torch.stack(seen.seen.evaluated)], seen.groups, seen.seen.weights


@pytest.mark.parametrize("kind", ["ema", "mean", "swa"])
def test_averages_that_other_callbacks_keep_are_the_replicas_mean_where_others_look(
    tmp_path: Path, kind: str
) -> None:
    plain, still, spread = (
        on_ranks(_averaged, 2, str(tmp_path), kind, of) for of in (None, STILL, SPREAD)
    )
    for (tensors, rates, _), (same, also, _) in zip(plain, still, strict=True):
        assert rates == also and all(map(torch.equal, tensors, same))
    (one, _, first), (two, _, second) = spread
    assert all(map(torch.equal, one, two)) and not torch.equal(first[8], second[8])
    if kind == "ema":  # of each replica half of what it was and half of what it is, averaged
        assert not torch.equal(one[1], one[2][1])


class Transfer(Net):
    """A head that trains on a backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        head = [p for p in self.net[3].parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(head, lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _unfrozen(folder: str, ensemble: dict[str, Any] | None, resume: int = 0) -> Any:
    backbone, module = pl.callbacks.BackboneFinetuning(1, lambda epoch: 1.5), Transfer()
    trainer = fit(folder, ensemble, module, save=6, resume=resume, before=[backbone], **EPOCHS)
    state = ensemble and trainer.hdet.ensemble.state_dict()
    return weights(module), trainer.callback.groups, state


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_is_added_in_mid_run_is_driven_by_an_ensemble_that_goes_on(
    tmp_path: Path, world: int
) -> None:
    of = {"plain": None, "still": STILL, "ours": {**SPREAD, "controller": halved}}
    plain, same, moved = (
        on_ranks(_unfrozen, world, str(tmp_path / name), ensemble) for name, ensemble in of.items()
    )
    if world == 1:  # DDP leaves out what is frozen when it begins, so its ranks drift apart there
        assert torch.equal(plain[0][0], same[0][0])
    assert equal([of[0] for of in moved]) and moved[0][2] == moved[-1][2]
    for (_, rates, _), (_, also, _), (_, corrected, state) in zip(plain, same, moved, strict=True):
        assert rates == also and [len(of) for of in rates.values()] == [1] * 3 + [2] * 9
        for step, by_group in rates.items():
            factor = 0.5 if step >= EVERY else 1.0
            assert corrected[step] == pytest.approx([factor * rate for rate in by_group])
        assert state["corrections"] == [0.5] and state["step"] == STEPS
    # Lightning freezes the backbone again when it goes on, with or without hdet.
    resumed = [
        on_ranks(partial(_unfrozen, resume=6), world, str(tmp_path / name), ensemble)
        for name, ensemble in of.items()
    ]
    for plain, same, again in zip(*resumed, strict=True):
        assert plain[1] == same[1] and (world > 1 or torch.equal(plain[0], same[0]))
        assert len(again[1]) == STEPS - 6 and again[2]["step"] == STEPS
        for step, by_group in plain[1].items():
            assert again[1][step] == pytest.approx([0.5 * rate for rate in by_group])


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_a_group_that_a_hook_of_the_module_adds_starts_at_the_rate_it_gives(
    tmp_path: Path, hook: str
) -> None:
    added: list[int] = []

    def add(module: Any, *args: Any) -> None:
        if module.current_epoch == 2 and not added:
            added.append(module.global_step)
            parameters = module.backbone.parameters()
            module.optimizers().add_param_group({"params": parameters, "lr": 1e-3})

    module = type("Adds", (Transfer,), {hook: add})()
    trainer = fit(str(tmp_path), {**SPREAD, "controller": Halved()}, module, **EPOCHS)
    assert trainer.callback.groups[added[0] + 1][1] == pytest.approx(1e-3)
    assert trainer.hdet.ensemble.engine.step == STEPS
