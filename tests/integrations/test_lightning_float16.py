"""Lightning's Trainer under float16, with a GradScaler, which a CPU has, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .frameworks import EVERY, FLOAT16, PARTS, STEPS, TRIED, check_skipped, needs, on_ranks, weights

needs("lightning")
import lightning.pytorch as pl

from .lightning_runs import Batch, HdetCallback, Net, fit


class Alone(pl.strategies.DDPStrategy):
    """Of ranks that share no gradients."""

    def configure_ddp(self) -> None:
        pass


class Overflows(Net):
    """Of the second rank alone, in the third step, where that is asked for."""

    def __init__(self, alone: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.alone, self.skipped, self.counted = alone, [], []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return (
            loss * float("inf")
            if self.alone and self.global_rank == 1 and batch_idx == 2 * PARTS
            else loss
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the callbacks'."""
        if (batch_idx + 1) % PARTS == 0:
            # The scaler is told of gradients that are not finite by a lower scale.
            scale, self.scale = (
                self.trainer.precision_plugin.scaler.get_scale(),
                getattr(self, "scale", 2.0**16),
            )
            self.skipped.append(scale < self.scale)
            self.scale = scale
            ensemble = (
                self.trainer.callbacks[1].ensemble
                if isinstance(self.trainer.callbacks[1], HdetCallback)
                else None
            )
            self.counted.append(0 if ensemble is None else ensemble.engine.step)


def _float16(folder: str, kind: str, alone: bool = False, **of: Any) -> Any:
    module = Overflows(alone, **of)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = fit(
        folder,
        FLOAT16[kind],
        module=module,
        plugins=[plugin],
        **({"strategy": Alone()} if alone else {}),
    )
    lines = [
        {key: value for key, value in line.items() if "hdet" not in key}
        for line in trainer.kept.lines
    ]
    lines = [line for line in lines if line.keys() - {"epoch"}]
    if kind in ("trial", "told"):
        assert trainer.hdet.ensemble.engine.controller.search.scaler is scaler
        return weights(module), trainer.hdet.ensemble.corrections["lr"]
    return (
        weights(module),
        module.skipped,
        [lines, trainer.seen.rates],
        module.counted,
    ), trainer.seen.later


@pytest.mark.parametrize("world", [1, 2])
def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(
    tmp_path: Path, world: int
) -> None:
    check_skipped(_float16, world, str(tmp_path))


def test_under_float16_a_trial_has_lightnings_scaler_and_its_clipping(tmp_path: Path) -> None:
    _, correction = _float16(str(tmp_path), "trial", lr=1e-4, steps=TRIED)
    assert correction >= 8
    (same, _), ((plain, *_), _) = (
        _float16(str(tmp_path), kind, lr=0.1, steps=TRIED) for kind in ("told", "plain")
    )
    assert torch.equal(same, plain)


@pytest.mark.parametrize("kind", ["spread", "outer"])
def test_under_float16_replicas_differ_within_a_cycle_and_are_equal_after_it(
    tmp_path: Path, kind: str
) -> None:
    ((last, skipped, _, counted), one), ((same, also, _, and_counted), two) = on_ranks(
        _float16, 2, str(tmp_path), kind, kind == "outer"
    )
    assert (
        counted == and_counted
        and counted[-1] > EVERY
        and torch.equal(last, same)
        and last.isfinite().all()
    )
    if kind == "outer":
        assert also[2] and not skipped[2] and counted == list(range(1, STEPS + 1))
    else:
        assert skipped == also and any(skipped[3:])
        assert [torch.equal(one[step], two[step]) for step in range(1, STEPS)] == [
            count % EVERY == 0 for count in counted[:-1]
        ]
