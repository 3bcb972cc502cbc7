"""Lightning's Trainer with hdet's callback."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.testing.adapters import EVERY, SPREAD, STEPS, STILL, Halved, find_equal_steps

from ..distributed import RankError
from .contract import Float16, Trained
from .frameworks import (
    FIRST,
    LOOKED,
    PARTS,
    TRIED,
    closures,
    computed_again,
    equal,
    gradients,
    halved,
    needs,
    on_ranks,
    told,
    trial,
    weights,
)

needs("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from .lightning_runs import Batch, Gan, HdetCallback, Net, fit, losses_of
from .lightning_runs import train as train_module


class Scaled(Net):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale, self.skipped = 2.0**16, []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % PARTS == 0:
            # The scaler is told of gradients that are not finite by a lower scale.
            scale, before = self.trainer.precision_plugin.scaler.get_scale(), self.scale
            self.skipped.append(scale < before)
            self.scale = scale


def train(folder: str, ensemble: Any, *, float16: bool = False, **settings: Any) -> Trained:
    if not float16:
        return train_module(folder, ensemble, **settings)
    made: list[Scaled] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)

    def module(**of: Any) -> Scaled:
        made.append(Scaled(**of))
        return made[0]

    seen = train_module(folder, ensemble, module=module, plugins=[plugin], **settings)
    seen.skipped = made[0].skipped
    return seen


class Again(pl.Callback):
    """Computes the step's losses again, once."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept, self.found = kept, ()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        if not self.kept:
            return
        calls, gradient = pl_module.calls, gradients(pl_module)
        pl_module.zero_grad()
        again = computed_again(trainer.hdet, pl_module, self.kept[-1])
        self.found = [loss / PARTS for loss in pl_module.losses[:PARTS]], gradient, again
        assert pl_module.calls == calls  # what is no buffer is put back


def again(folder: str) -> Any:
    with closures() as kept:
        callback = Again(kept)
        fit(folder, STILL, Net(lr=0.0, steps=1), before=[callback])
    return callback.found


class TestContract(Float16):
    train, again = staticmethod(train), staticmethod(again)
    plain = (
        (1, {}), (2, {"precision": "bf16-mixed", "of_module": {"schedule": "lambda"}}),
        (2, {"of_module": {"schedule": "epoch"}}),
    )  # fmt: skip
    good, low = 0.1, 1e-5
    trial_settings = (("of_module", {"size": 16, "schedule": "lambda"}),)


# -- optimization by hand --------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_by_hand_spread_0_is_the_plain_run_bit_for_bit(tmp_path: Path, world: int) -> None:
    runs = [on_ranks(partial(train, module=Gan), world, str(tmp_path), of) for of in (None, STILL)]
    for plain, ours in zip(*runs, strict=True):
        assert torch.equal(plain.last, ours.last) and plain.lines == ours.lines
        assert plain.rates == ours.rates and len(ours.state) == 2


# Of two optimizers Lightning counts the steps together: 7 is the first one's fifth, 9 its sixth.
@pytest.mark.parametrize("at", [7, 9])
def test_by_hand_it_resumes_bit_for_bit(tmp_path: Path, at: int) -> None:
    ensemble = {**SPREAD, "controller": halved}
    whole, resumed = (
        on_ranks(partial(train, module=Gan, save=at, resume=of), 2, str(tmp_path), ensemble)
        for of in (0, at)
    )
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a.last, b.last) and a.state == b.state
        assert len(b.weights) < len(a.weights)


def test_of_several_optimizers_each_has_its_part_of_lightnings_steps(tmp_path: Path) -> None:
    trainer = fit(str(tmp_path), {}, Gan(both=True))
    assert trainer.global_step == STEPS
    for ensemble in trainer.hdet.ensembles:
        assert ensemble.run.clock.total_steps == ensemble.steps_done == STEPS / 2
        assert ensemble.search.budget == 0


@pytest.mark.parametrize(
    ("batches", "parts", "epochs", "steps"),
    [(7, 2, 3, -1), (7, 3, 3, 8), (5, 8, 4, -1), (6, {0: 1, 2: 3}, 4, -1), (6, {0: 1, 2: 3}, 4, 9)],
)
def test_the_runs_length_is_the_steps_that_lightning_makes(
    tmp_path: Path, batches: int, parts: Any, epochs: int, steps: int
) -> None:
    changes = [GradientAccumulationScheduler(parts)] if isinstance(parts, dict) else []
    trainer = fit(
        str(tmp_path), {}, Net(), limit_train_batches=batches, max_epochs=epochs, max_steps=steps,
        accumulate_grad_batches=1 if changes else parts, before=changes,
    )  # fmt: skip
    ensemble = trainer.hdet.ensemble
    assert ensemble.run.clock.total_steps == ensemble.steps_done == trainer.global_step > 0


# -- batches ---------------------------------------------------------------------------------------


class LeavesOut(Net):
    """Some batches, and the rest of an epoch."""

    def __init__(self, nones: Any = (), ends: Any = ()) -> None:
        super().__init__(lr=0.1, steps=TRIED, size=16)
        self.nones, self.ends = nones, ends

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.nones else loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if (self.trainer.current_epoch, batch_idx) in self.ends else None


# A step of which one micro-batch is left out, one without any, and one of those that score.
@pytest.mark.parametrize("nones", [(6, 10, 11, 81), (10, 11, *range(70, 74))])
def test_batches_that_training_step_leaves_out_are_left_out_of_trials(
    tmp_path: Path, nones: Any
) -> None:
    plain, ours, free = (
        fit(str(tmp_path), of, LeavesOut(nones), until=FIRST) for of in (None, {"search": told}, {})
    )
    assert equal([weights(of.lightning_module) for of in (plain, ours, free)])
    found = ours.hdet.ensemble.search.interval.trial
    assert max(len(arm.losses) for arm in found.arms) == (28 if nones[0] == 6 else 26)
    assert found.has_learned and ours.global_step == FIRST
    assert free.hdet.ensemble.corrections["lr"] == 1


def test_a_step_that_is_not_finished_counts_in_no_other(tmp_path: Path) -> None:
    """The module skips the rest of an epoch; and a loader yields None in the place of a
    micro-batch."""
    seen: list[int] = []

    class Counts(HdetCallback):
        def compute_again(self, parts: Any) -> Any:
            seen.append(len(parts))
            return super().compute_again(parts)

    class Holes(LeavesOut):
        def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch | None:
            ready = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            return None if ready in (20, 21) else batch

    def run(ensemble: Any) -> Any:
        module, settings = Holes((), ((0, 7), (1, 13))), {"limit_train_batches": 60}
        return fit(str(tmp_path), ensemble, module, until=FIRST, make=Counts, **settings)

    plain, ours = run(None), run({"search": told})
    assert equal([weights(of.lightning_module) for of in (plain, ours)]) and set(seen) == {PARTS}
    assert ours.hdet.ensemble.steps_done == ours.global_step == plain.global_step == FIRST


def test_losses_may_be_a_function_of_the_users(tmp_path: Path) -> None:
    asked: list[Any] = []

    def losses(module: Any, batch: Any) -> torch.Tensor:
        asked.append(batch)
        return losses_of(module, batch)

    module = LeavesOut()
    ensemble = {"search": trial, "losses_of": losses}
    trainer = fit(str(tmp_path), ensemble, module, until=FIRST)
    assert len(asked) > FIRST * PARTS and module.calls == FIRST * PARTS
    assert trainer.hdet.ensemble.search.interval is not None


def test_a_scheduler_that_steps_by_a_metric_is_corrected_and_in_the_bar(tmp_path: Path) -> None:
    ensemble = {**SPREAD, "controller": Halved()}
    trainer = fit(str(tmp_path), ensemble, Net(schedule="plateau"))
    assert trainer.hdet.ensemble.corrections["lr"] == 0.5
    assert "hdet/corrections/lr" in trainer.progress_bar_metrics
    assert "hdet/cycle" not in trainer.progress_bar_metrics


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    module = Net()
    module.automatic_optimization, before = False, weights(module)
    with pytest.raises(ValueError, match="optimizes by hand cannot: pass losses_of="):
        fit(str(tmp_path), {"search": hdet.AutoLR}, module)
    assert torch.equal(before, weights(module))
    with pytest.raises(TypeError, match="positional argument"):
        HdetCallback(hdet.AutoLR)  # would be losses_of=, and no controller


# -- beside Lightning's own callbacks ----------------------------------------------------------

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


def test_nothing_is_averaged_before_training_begins_also_in_a_second_fit(tmp_path: Path) -> None:
    callback, found = HdetCallback(**STILL), []
    looks = pl.Callback()
    looks.on_validation_start = lambda trainer, _: found.append(  # type: ignore[method-assign]
        (trainer.sanity_checking, callback.ensemble is None)
    )
    for _ in range(2):
        fit(str(tmp_path), STILL, Net(steps=1), before=[looks], make=lambda **_: callback)
    assert found == 2 * [(True, True), (False, False)]


def test_an_average_begins_again_where_the_run_does(tmp_path: Path) -> None:
    average = pl.callbacks.EMAWeightAveraging(decay=0.9)
    module, ensemble = Net(1e6, LOOKED, "constant"), {"search": partial(hdet.AutoLR, budget=0)}
    trainer = fit(str(tmp_path), ensemble, module, before=[average], gradient_clip_val=None)
    assert trainer.hdet.ensemble.corrections["lr"] < 1 and weights(module).isfinite().all()


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
    assert trainer.hdet.ensemble.steps_done == STEPS


# -- replicas of shards (FSDP2) ------------------------------------------------------------------


class Sharded(Net):
    """Every pair of ranks is a replica, over which its model is sharded; with ``rows`` 1 all ranks
    are one. ``length``: of the schedule."""

    def __init__(self, rows: int = 2, length: int = TRIED, **settings: Any) -> None:
        super().__init__(schedule="lambda", **settings)
        self.rows, self.length = rows, length

    def configure_model(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "mesh"):
            shape = (self.rows, 4 // self.rows)
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
            fully_shard(self.net, mesh=self.mesh if self.rows > 1 else self.mesh["dp_shard"])

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["scheduler"].lr_lambdas = [lambda step: 1 - step / self.length]
        return made


def replicas(module: Any) -> hdet.Replicas:
    return hdet.Replicas.from_mesh(module.mesh)


def sharded(folder: str, ensemble: Any, rows: int = 2, **settings: Any) -> Any:
    strategy = pl.strategies.ModelParallelStrategy(
        data_parallel_size=4, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    module = partial(Sharded, rows)
    return train_module(folder, ensemble, module=module, strategy=strategy, **settings)


def test_hsdp_has_replicas_of_shards_and_a_whole_checkpoint_holds_their_mean(
    tmp_path: Path,
) -> None:
    still = {"knobs": [hdet.LearningRate(0)], "replicas": replicas}
    plain, same, spread = (
        on_ranks(partial(sharded, save=8), 4, str(tmp_path / name), ensemble)
        for name, ensemble in (
            ("plain", None), ("still", still), ("spread", {**SPREAD, "replicas": replicas})
        )
    )  # fmt: skip
    assert all(torch.equal(a.last, b.last) for a, b in zip(plain, same, strict=True))
    mean = []
    for a, b in ((spread[0], spread[2]), (spread[1], spread[3])):  # the same shard
        assert find_equal_steps(a, b) == [5, 10, 12] and torch.equal(a.last, b.last)
        mean.append((a.weights[8] + b.weights[8]) / 2)
    saved, expected = spread[0].saved.sort().values, torch.cat(mean).sort().values
    torch.testing.assert_close(saved, expected, rtol=0, atol=1e-7)


def test_plain_fsdp_is_one_replica_which_explores_nothing_and_is_enough_for_trials(
    tmp_path: Path,
) -> None:
    run = partial(sharded, rows=1)
    with pytest.raises(RankError, match="ranks 0-3 are one replica, .* nothing to explore with"):
        on_ranks(run, 4, str(tmp_path), SPREAD)
    plain, auto = (on_ranks(run, 4, str(tmp_path), of) for of in (None, {"search": told}))
    assert all(torch.equal(a.last, b.last) for a, b in zip(plain, auto, strict=True))
