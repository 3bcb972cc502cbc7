"""hdet's callback beside Lightning's own that average weights and add parameter groups."""

from __future__ import annotations

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
from lightning.pytorch.callbacks import ModelCheckpoint

from .lightning_runs import Net, fit, numbered


def averaging(kind: str) -> Any:
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
    from torch.optim.swa_utils import get_ema_avg_fn

    if kind == "swa":
        return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=2)
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.5) if kind == "ema" else None)


def _averaged(folder: str, kind: str, ensemble: dict[str, Any] | None) -> Any:
    """Four epochs of three steps; the average is kept by a callback that stands before ours."""
    callback = averaging(kind)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1)
    trainer = fit(
        folder, ensemble, saves=saves, before=[callback], max_epochs=4, max_steps=-1,
        limit_train_batches=3 * PARTS, val_check_interval=1.0, module=Net(schedule="constant"),
    )  # fmt: skip
    saved = torch.load(Path(folder, "step=8.ckpt"), weights_only=True)["state_dict"]
    flat = torch.cat([p.flatten() for p in saved.values()])
    return weights(trainer.lightning_module), trainer.seen, flat


@pytest.mark.parametrize("kind", ["ema", "mean", "swa"])
def test_averages_that_other_callbacks_keep_are_the_replicas_mean_where_others_look(
    tmp_path: Path, kind: str
) -> None:
    for plain, ours in zip(
        on_ranks(_averaged, 2, str(tmp_path), kind, None),
        on_ranks(_averaged, 2, str(tmp_path), kind, STILL),
        strict=True,
    ):
        assert torch.equal(plain[0], ours[0]) and torch.equal(plain[2], ours[2])
        assert equal([torch.stack(of[1].validated) for of in (plain, ours)])
        assert plain[1].rates == ours[1].rates
    last, seen, saved = zip(*on_ranks(_averaged, 2, str(tmp_path), kind, SPREAD), strict=True)
    assert not equal([of.weights[8] for of in seen])
    assert equal([torch.stack(of.validated) for of in seen]) and equal(list(last))
    if kind == "ema":  # of each replica half of what it was and half of what it is, averaged
        assert len(saved) == 2 and not torch.equal(saved[0], seen[0].validated[1])


class Transfer(Net):
    """A head that trains on a backbone that is frozen at first."""

    def __init__(self) -> None:
        super().__init__(schedule="step by step")
        self.backbone = self.net[0]

    def configure_optimizers(self) -> Any:
        head = [p for p in self.net[3].parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(head, lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Groups(pl.Callback):
    """[step]: the rates of all groups."""

    def __init__(self) -> None:
        self.rates: dict[int, list[float]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.rates[trainer.global_step] = rates


def _unfrozen(folder: str, ensemble: dict[str, Any] | None, resume: str | None = None) -> Any:
    groups = Groups()
    backbone = pl.callbacks.BackboneFinetuning(1, lambda epoch: 1.5)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = fit(
        folder, ensemble, before=[backbone, groups], module=numbered(Transfer), max_epochs=4,
        max_steps=-1, limit_train_batches=3 * PARTS, val_check_interval=1.0, saves=saves,
        resume=resume,
    )  # fmt: skip
    found = weights(trainer.lightning_module), groups.rates
    return (*found, ensemble and trainer.hdet.ensemble.state_dict())


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_that_is_added_in_mid_run_is_driven_by_an_ensemble_that_goes_on(
    tmp_path: Path, world: int
) -> None:
    ours = {**SPREAD, "controller": halved}
    plain, same, moved = (
        on_ranks(_unfrozen, world, str(tmp_path / name), of)
        for name, of in (("plain", None), ("still", STILL), ("ours", ours))
    )
    if world == 1:  # DDP leaves out what is frozen when it begins, so its ranks drift apart there
        assert torch.equal(plain[0][0], same[0][0])
    assert equal([of[0] for of in moved]) and moved[0][2] == moved[-1][2]
    for (_, rates, _), (_, also, _), (_, corrected, state) in zip(plain, same, moved, strict=True):
        assert rates == also and [len(of) for of in rates.values()] == [1] * 3 + [2] * 9
        for step, of in rates.items():
            factor = 0.5 if step >= EVERY else 1.0
            assert corrected[step] == pytest.approx([factor * rate for rate in of])
        assert state["corrections"] == [0.5] and state["step"] == STEPS
    # Lightning freezes the backbone again when it goes on, with or without hdet.
    went_on = [
        on_ranks(_unfrozen, world, str(tmp_path), of, str(tmp_path / name / "step=6.ckpt"))
        for name, of in (("plain", None), ("still", STILL), ("ours", ours))
    ]
    for plain, same, again in zip(*went_on, strict=True):
        assert plain[1] == same[1] and (world > 1 or torch.equal(plain[0], same[0]))
        assert len(again[1]) == STEPS - 6 and again[2]["step"] == STEPS
        for step, of in plain[1].items():
            assert again[1][step] == pytest.approx([0.5 * rate for rate in of])


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_a_group_that_a_hook_of_the_module_adds_starts_at_the_rate_it_gives(
    tmp_path: Path, hook: str
) -> None:
    class Adds(Transfer):
        added_after = None

    def add(module: Any, *args: Any) -> None:
        if module.current_epoch == 2 and module.added_after is None:
            module.added_after = module.global_step
            module.optimizers().add_param_group(
                {"params": module.backbone.parameters(), "lr": 1e-3}
            )

    setattr(Adds, hook, add)
    ensemble = {**SPREAD, "controller": Halved()}
    limits = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 3 * PARTS}
    trainer = fit(
        str(tmp_path), ensemble, before=[groups := Groups()], module=(module := Adds()), **limits
    )
    assert (
        groups.rates[module.added_after + 1][1] == pytest.approx(1e-3)
        and trainer.hdet.ensemble.engine.step == STEPS
    )
