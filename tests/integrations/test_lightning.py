"""Lightning's Trainer with hdet's callback, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet

from ..distributed import RankError
from .frameworks import (
    EVERY,
    FIRST,
    FLOAT16,
    LOOKED,
    MOVED,
    PARTS,
    SPREAD,
    STEPS,
    STILL,
    TRIED,
    Halved,
    Moved,
    check_looked_at,
    check_same_run,
    check_skipped,
    correction_in,
    equal,
    example,
    halved,
    listening,
    looked_at,
    needs,
    on_ranks,
    told,
    trial,
    weights,
)

needs("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

HdetCallback = hdet.integrations.lightning.HdetCallback
Batch = tuple[torch.Tensor, torch.Tensor]


def losses_of(module: Any, batch: Batch) -> torch.Tensor:
    return (module.net(batch[0]) - batch[1]).square().mean(1)


class Net(pl.LightningModule):
    """``schedule``: of which kind, stepped by Lightning."""

    def __init__(self, lr: float = 3e-2, steps: int = STEPS, schedule: str = "step") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
        self.lr, self.steps, self.schedule, self.calls = lr, steps, schedule, 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        loss = losses_of(self, batch).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation", losses_of(self, batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule == "lambda":
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        elif self.schedule == "constant":
            return optimizer
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch" if self.schedule == "epoch" else "step"}]


class Gan(pl.LightningModule):
    """Two optimizers, by hand; the second every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.nets = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        loss = sum((net(batch[0]) - batch[1]).square().mean() for net in self.nets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in list(zip(optimizers, schedulers, strict=True))[: 1 + batch_idx % 2]:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(net.parameters(), lr=lr) for net, lr in zip(self.nets, (3e-2, 1e-2), strict=True)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) for optimizer in optimizers]


class Seen(pl.Callback):
    """Weights and rates, by step, before anybody converges; weights that are validated."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.later: dict[int, torch.Tensor] = {}
        self.rates: dict[int, float] = {}
        self.validated: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rates[trainer.global_step + 1] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self.weights.setdefault(trainer.global_step, weights(pl_module))
        self.later[trainer.global_step] = weights(pl_module)  # the first micro-batch of the next step

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(weights(pl_module))


class Stop(pl.Callback):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.at


class Kept(pl.loggers.logger.DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.lines.append(dict(metrics))


def loader(seed: int, steps: int, world: int, size: int = 4) -> Any:
    x = torch.randn(size * PARTS * steps * world, 6, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size)


def fit(
    folder: str,
    ensemble: Any,
    *,
    module: Any = None,
    resume: str | None = None,
    saves: Any = None,
    make: Any = HdetCallback,
    stop: int | None = None,
    size: int = 4,
    before: Any = (),
    **settings: Any,
) -> Any:
    """``ensemble``: None without the callback; ``stop``: after so many steps. Adds what was seen to the trainer."""
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    module = Net() if module is None else module
    steps = getattr(module, "steps", STEPS)
    settings = {"strategy": "ddp" if world > 1 else "auto", **settings}
    if module.automatic_optimization:
        settings = {"accumulate_grad_batches": PARTS, "gradient_clip_val": 0.5, **settings}
    callback = None if ensemble is None else make(**ensemble)
    seen, kept = Seen(), Kept()
    callbacks = [*before, seen, *([callback] if callback else []), LearningRateMonitor("step"), *([saves] if saves else []), Stop(stop)]
    settings = {"max_steps": steps, **settings}
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, callbacks=callbacks, logger=kept,
        default_root_dir=folder, enable_checkpointing=saves is not None, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, loader(0, steps, world, size), loader(1, 1, world), ckpt_path=resume)
    trainer.seen, trainer.kept, trainer.hdet = seen, kept, callback
    return trainer


# -- the plain run -----------------------------------------------------------------------------------------------------------


def _plain(folder: str, ensemble: dict[str, Any] | None, kind: str) -> Any:
    module = Gan() if kind == "manual" else Net(schedule=kind)
    settings = {} if kind == "manual" else {"val_check_interval": 4, "precision": "bf16-mixed" if kind == "lambda" else "32-true"}
    trainer = fit(folder, ensemble, module=module, **settings)
    lines = [{key: value for key, value in line.items() if "hdet" not in key} for line in trainer.kept.lines]
    return weights(module), [line for line in lines if line.keys() - {"epoch"}], trainer.seen.rates


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["step", "lambda", "epoch", "manual"])
def test_spread_0_is_the_plain_run_bit_for_bit(tmp_path: Path, world: int, kind: str) -> None:
    plain = on_ranks(_plain, world, str(tmp_path), None, kind)
    ours = on_ranks(_plain, world, str(tmp_path), STILL, kind)
    check_same_run(plain, ours, 1)
    assert kind == "manual" or all(len(rates) == STEPS for *_, rates in ours)


def _looked_at(folder: str, ensemble: dict[str, Any] | None, lr: float) -> Any:
    trainer = fit(folder, ensemble, module=Net(lr, LOOKED))
    lines = [{key: value for key, value in line.items() if "hdet" not in key} for line in trainer.kept.lines]
    return (
        weights(trainer.lightning_module),
        [line for line in lines if line.keys() - {"epoch"}],
        trainer.hdet and looked_at(trainer.hdet.ensemble),
    )


@pytest.mark.parametrize("world", [1, 2])
def test_by_default_the_first_steps_are_looked_at_which_costs_nothing_and_leaves_no_trace(tmp_path: Path, world: int) -> None:
    check_looked_at(lambda of, lr: on_ranks(_looked_at, world, str(tmp_path), of, lr), 0.1, 1e-5)


@pytest.mark.parametrize("manual", [False, True])
def test_a_cycles_loss_is_the_mean_of_what_training_step_returns(tmp_path: Path, manual: bool) -> None:
    records: list[Any] = []
    losses: list[float] = []
    module: Any = Gan() if manual else Net()
    inner = module.training_step

    def training_step(batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = inner(batch, batch_idx)
        losses.append(loss.item())
        return loss

    module.training_step = training_step
    fit(str(tmp_path), {"sync": hdet.Sync(EVERY), "log": lambda record, step: records.append(record["losses"][0])}, module=module)
    first = EVERY * (1 if manual else PARTS)
    assert records[0] == pytest.approx(sum(losses[:first]) / first, rel=1e-5)


# -- replicas ----------------------------------------------------------------------------------------------------------------


def _spread(folder: str) -> Any:
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1, save_weights_only=True)
    trainer = fit(folder, {**SPREAD, "controller": Halved()}, val_check_interval=14, saves=saves)
    file = next(Path(folder).glob("*step=8*"))
    saved = torch.load(file, weights_only=True)["state_dict"]
    rates = [line["lr-SGD"] for line in trainer.kept.lines if "lr-SGD" in line]
    lines = [line for line in trainer.kept.lines if "hdet/values/lr" in line]
    ours = [[line[f"hdet/{key}/lr"] for line in lines] for key in ("values", "corrections", "multipliers")]
    return trainer.seen, torch.cat([p.flatten() for p in saved.values()]), weights(trainer.lightning_module), rates, ours


def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(tmp_path: Path) -> None:
    seen, saved, last, rates, ours = zip(*on_ranks(_spread, 2, str(tmp_path)), strict=True)
    # A callback that stands before ours sees what the optimizer has left; then replicas are averaged, of step 7 to be validated, of 8 to be saved.
    assert not any(equal([of.weights[step] for of in seen]) for step in range(1, STEPS + 1))
    assert [step for step in range(1, STEPS + 1) if equal([of.later[step] for of in seen])] == [5, 7, 8, 10]
    assert equal([of.validated[0] for of in seen]) and equal(list(last)) and equal(list(saved))
    torch.testing.assert_close(saved[0], sum(of.weights[8] for of in seen) / 2, rtol=0, atol=1e-7)
    schedule = list(_plain(str(tmp_path), None, "step")[2].values())
    for of, logged, (values, corrections, multipliers) in zip(seen, rates, ours, strict=True):
        expected = [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(schedule)]
        assert list(of.rates.values()) == pytest.approx(expected, rel=1e-6)
        assert list(dict.fromkeys(logged)) == pytest.approx(expected, rel=1e-6)  # two lines a step
        assert values[:-1] == pytest.approx(expected[1:], rel=1e-6) and corrections == [1.0] * (EVERY - 1) + [0.5] * (STEPS - EVERY + 1)
        assert sorted(set(multipliers)) == pytest.approx([0.7, 1.3])


# -- float16 -----------------------------------------------------------------------------------------------------------------


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
        return loss * float("inf") if self.alone and self.global_rank == 1 and batch_idx == 2 * PARTS else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the callbacks'."""
        if (batch_idx + 1) % PARTS == 0:
            # The scaler is told of gradients that are not finite by a lower scale.
            scale, self.scale = self.trainer.precision_plugin.scaler.get_scale(), getattr(self, "scale", 2.0**16)
            self.skipped.append(scale < self.scale)
            self.scale = scale
            ensemble = self.trainer.callbacks[1].ensemble if isinstance(self.trainer.callbacks[1], HdetCallback) else None
            self.counted.append(0 if ensemble is None else ensemble.engine.step)


def _float16(folder: str, kind: str, alone: bool = False, **of: Any) -> Any:
    module = Overflows(alone, **of)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = fit(folder, FLOAT16[kind], module=module, plugins=[plugin], **({"strategy": Alone()} if alone else {}))
    lines = [{key: value for key, value in line.items() if "hdet" not in key} for line in trainer.kept.lines]
    lines = [line for line in lines if line.keys() - {"epoch"}]
    if kind in ("trial", "told"):
        assert trainer.hdet.ensemble.engine.controller.search.scaler is scaler
        return weights(module), trainer.hdet.ensemble.corrections["lr"]
    return (weights(module), module.skipped, [lines, trainer.seen.rates], module.counted), trainer.seen.later


@pytest.mark.parametrize("world", [1, 2])
def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(tmp_path: Path, world: int) -> None:
    for (plain, _), (still, _) in zip(*(on_ranks(_float16, world, str(tmp_path), kind) for kind in ("plain", "still")), strict=True):
        check_skipped(plain, still)


def test_under_float16_a_trial_has_lightnings_scaler_and_its_clipping(tmp_path: Path) -> None:
    _, correction = _float16(str(tmp_path), "trial", lr=1e-4, steps=TRIED)
    assert correction >= 8
    (same, _), ((plain, *_), _) = (_float16(str(tmp_path), kind, lr=0.1, steps=TRIED) for kind in ("told", "plain"))
    assert torch.equal(same, plain)


@pytest.mark.parametrize("kind", ["spread", "outer"])
def test_under_float16_replicas_differ_within_a_cycle_and_are_equal_after_it(tmp_path: Path, kind: str) -> None:
    ((last, skipped, _, counted), one), ((same, also, _, and_counted), two) = on_ranks(_float16, 2, str(tmp_path), kind, kind == "outer")
    assert counted == and_counted and counted[-1] > EVERY and torch.equal(last, same) and last.isfinite().all()
    if kind == "outer":
        assert also[2] and not skipped[2] and counted == list(range(1, STEPS + 1))
    else:
        assert skipped == also and any(skipped[3:])
        assert [torch.equal(one[step], two[step]) for step in range(1, STEPS)] == [count % EVERY == 0 for count in counted[:-1]]


# -- checkpoints -------------------------------------------------------------------------------------------------------------


def numbered(base: Any) -> Any:
    """Trains on the batch of its number: in the middle of an epoch Lightning goes on with the first ones of a loader without a state."""

    class Numbered(base):  # type: ignore[misc]
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank))
            loss: torch.Tensor = super().training_step((x, x.sum(1, keepdim=True)), batch_idx)
            return loss

    module = Numbered()
    if base is Net:
        module.net[2] = nn.Identity()  # random states are nobody's business in Lightning
    return module


def _resumed(folder: str, at: int, base: Any) -> Any:
    def fitted(name: str, resume: str | None = None) -> Any:
        saves = ModelCheckpoint(f"{folder}/{name}", "{step}", every_n_train_steps=at, save_top_k=-1)
        return fit(folder, {**SPREAD, "controller": lambda module: Halved()}, module=numbered(base), saves=saves, resume=resume)

    whole = fitted("whole")
    resumed = fitted("resumed", f"{folder}/whole/step={at}.ckpt")
    found = [
        (
            weights(of.lightning_module),
            [(e.cycle, e.engine.step, e.corrections) for e in of.hdet.ensembles],
            list(of.seen.rates.items())[-2:],
        )
        for of in (whole, resumed)
    ]
    return found, len(resumed.seen.weights) < len(whole.seen.weights)


# Of two optimizers Lightning counts the steps together: 7 is the first one's fifth, 9 its sixth.
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("base", "at"), [(Net, EVERY), (Net, EVERY + 2), (Gan, 7), (Gan, 9)])
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(tmp_path: Path, world: int, at: int, base: Any) -> None:
    for [(whole, *state), (resumed, *same)], shorter in on_ranks(_resumed, world, str(tmp_path), at, base):
        assert torch.equal(whole, resumed) and state == same and shorter


# -- losses anew, AutoLR -----------------------------------------------------------------------------------------------------


def _auto(folder: str, lr: float, controller: Any, losses: bool) -> Any:
    module = Net(lr=lr, steps=TRIED, schedule="lambda")
    ensemble = {"controller": controller, "sync": hdet.Sync(EVERY), **({"losses": losses_of} if losses else {})}
    with listening("lightning.pytorch.utilities.rank_zero") as lines:
        given = ensemble if controller else None
        trainer = fit(folder, given, module=module, stop=FIRST, size=16)
    assert module.calls == FIRST * PARTS and "log" not in vars(module)
    logged = [line["loss"] for line in trainer.kept.lines if "loss" in line]
    correction = trainer.hdet.ensemble.corrections["lr"] if controller else 1.0
    return weights(module), correction, [line for line in lines if line.startswith("hdet")], logged


@pytest.mark.parametrize(("world", "losses"), [(1, False), (2, False), (1, True)])
def test_auto_lr_raises_a_rate_that_is_far_too_low_and_says_so_in_lightnings_log(tmp_path: Path, world: int, losses: bool) -> None:
    found = on_ranks(_auto, world, str(tmp_path), 1e-4, trial, losses)
    assert equal([w for w, *_ in found]) and all(correction >= 8 for _, correction, *_ in found)
    lines = found[0][2]
    assert lines[0].startswith("hdet, auto: a trial in the first 56 steps") and any("learning rate 0.0001 -> " in line for line in lines)


def test_moves_are_told_once_and_corrections_are_in_the_bar(tmp_path: Path) -> None:
    with listening("lightning.pytorch.utilities.rank_zero") as lines:
        module = Net(schedule="epoch")
        trainer = fit(str(tmp_path), {**SPREAD, "controller": Moved()}, module=module)
    assert [line for line in lines if line.startswith("hdet")] == [f"hdet, step 5: {MOVED.format(value=0.015)}"]
    assert "hdet/corrections/lr" in trainer.progress_bar_metrics
    assert "hdet/cycle" not in trainer.progress_bar_metrics


def test_auto_lr_refuses_a_scheduler_that_steps_by_a_metric(tmp_path: Path) -> None:
    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            [optimizer], _ = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"}}

    with pytest.raises(ValueError, match="AutoLR trains copies.*ReduceLROnPlateau has none.*use a schedule of steps"):
        fit(str(tmp_path), {"controller": hdet.AutoLR}, module=Plateau())
    assert fit(str(tmp_path), {**SPREAD, "controller": Halved()}, module=Plateau()).hdet.ensemble.corrections["lr"] == 0.5


@pytest.mark.parametrize("world", [1, 2])
def test_trials_leave_no_trace_in_the_run(tmp_path: Path, world: int) -> None:
    plain = on_ranks(_auto, world, str(tmp_path), 0.1, None, False)
    ours = on_ranks(_auto, world, str(tmp_path), 0.1, told, False)
    for (a, *_, logged), (b, *_, also) in zip(plain, ours, strict=True):
        assert torch.equal(a, b) and logged == also and len(logged) >= FIRST
    assert any("good rates for" in line for line in ours[0][2])


class LeavesOut(Net):
    """Some batches, and the rest of an epoch."""

    def __init__(self, nones: Any, ends: Any = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.nones, self.ends = nones, ends

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.nones else loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if (self.trainer.current_epoch, batch_idx) in self.ends else None


# A step of which one micro-batch is left out, one without any, and one of those that score.
@pytest.mark.parametrize("nones", [(6, 10, 11, 81), (10, 11, *range(70, 74))])
def test_batches_that_training_step_leaves_out_are_left_out_of_trials(tmp_path: Path, nones: Any) -> None:
    plain, ours = (fit(str(tmp_path), of, module=LeavesOut(nones, lr=0.1, steps=TRIED), stop=FIRST) for of in (None, {"controller": told}))
    found = ours.hdet.ensemble.engine.controller.search.interval
    assert torch.equal(*(weights(of.lightning_module) for of in (plain, ours))) and ours.global_step == FIRST
    assert max(len(arm.losses) for arm in found.trial.arms) == (28 if nones[0] == 6 else 26) and found.trial.has_learned
    free = fit(str(tmp_path), {}, module=LeavesOut(nones, lr=0.1, steps=TRIED), stop=FIRST)
    assert torch.equal(*(weights(of.lightning_module) for of in (plain, free))) and looked_at(free.hdet.ensemble)[:2] == (1.0, 0.0)


def test_a_step_that_is_not_finished_counts_in_no_other(tmp_path: Path) -> None:
    """The module skips the rest of an epoch; and a loader yields None in the place of a micro-batch."""
    seen: list[int] = []

    class Counts(HdetCallback):
        def compute_again(self, parts: Any) -> Any:
            seen.append(len(parts))
            return super().compute_again(parts)

    class Holes(LeavesOut):
        def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch | None:
            return None if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready in (20, 21) else batch

    def run(ensemble: Any) -> Any:
        module = Holes((), ((0, 7), (1, 13)), lr=0.1, steps=TRIED)
        return fit(str(tmp_path), ensemble, module=module, stop=FIRST, make=Counts, limit_train_batches=60)

    plain, ours = run(None), run({"controller": told})
    assert torch.equal(*(weights(of.lightning_module) for of in (plain, ours))) and set(seen) == {PARTS}
    assert ours.hdet.ensemble.engine.step == ours.global_step == plain.global_step == FIRST
    assert run({"knobs": [hdet.LearningRate(0)]}).global_step == FIRST


@pytest.mark.parametrize(("batches", "parts", "epochs", "steps"), [(7, 2, 3, -1), (7, 3, 3, 8), (5, 8, 4, -1)])
def test_the_runs_length_is_the_steps_that_lightning_makes(tmp_path: Path, batches: int, parts: int, epochs: int, steps: int) -> None:
    of = {"limit_train_batches": batches, "accumulate_grad_batches": parts, "max_epochs": epochs, "max_steps": steps}
    trainer = fit(str(tmp_path), {}, **of)
    ensemble = trainer.hdet.ensemble
    assert ensemble.run.clock.total_steps == ensemble.engine.step == trainer.global_step > 0


def test_of_several_optimizers_each_has_its_part_of_lightnings_steps(tmp_path: Path) -> None:
    class Both(Gan):
        """Both in each batch."""

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, 1)

    trainer = fit(str(tmp_path), {}, module=Both())
    assert trainer.global_step == STEPS
    for ensemble in trainer.hdet.ensembles:
        assert ensemble.run.clock.total_steps == ensemble.engine.step == STEPS / 2 and ensemble.engine.controller.budget == 0


def _anew(folder: str) -> Any:
    """The closure of the last step, of rate 0 and without dropout, and what the step itself has had."""
    module = Net(lr=0.0, steps=1)
    module.net[2] = nn.Identity()
    found: dict[str, Any] = {}

    class Closed(HdetCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.setdefault("batches", []).append((batch, batch_idx))
            found["loss"] = found.get("loss", 0.0) + outputs["loss"]
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            if batch_idx == PARTS - 1:
                found["gradient"] = torch.cat([p.grad.flatten() for p in pl_module.parameters()]).clone()
                pl_module.zero_grad()
                found["anew"] = self.compute_again(found["batches"])
                self.ensemble.engine.controller.before_step()
                found["again"] = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
                with torch.no_grad():
                    found["scored"] = self.compute_again(found["batches"])

    fit(folder, {"controller": hdet.AutoLR}, module=module, make=Closed)
    return found, module.calls


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_gradients_are_computed_anew_as_lightning_has_made_them(tmp_path: Path, world: int) -> None:
    for found, calls in on_ranks(_anew, world, str(tmp_path)):
        assert torch.equal(found["loss"], found["anew"]) and torch.equal(found["loss"], found["scored"]) and calls == PARTS
        assert torch.equal(found["gradient"], found["again"]) and float(found["gradient"].norm()) <= 0.5 + 1e-6


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["deepspeed", "manual", "several", "unknown", "one for several"])
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, case: str) -> None:
    if case == "unknown":
        with pytest.raises(TypeError, match="no setting 'controler' here"):
            HdetCallback(controler=None)
        with pytest.raises(TypeError, match="positional argument"):
            HdetCallback(hdet.AutoLR)  # would be losses=, and no controller
        return
    messages = {
        "deepspeed": "DeepSpeed's, which keeps one copy of the optimizer's state for all ranks",
        "manual": "optimizes by hand cannot: pass losses=",
        "several": "one optimizer, and there are 2",
        "one for several": "several optimizers, each with a controller of its own: pass a function",
    }
    module: Any = Gan() if case in ("several", "one for several") else Net()
    settings: dict[str, Any] = {"controller": Halved() if case == "one for several" else hdet.AutoLR}
    if case == "manual":
        module.automatic_optimization = False
    strategy = type("DeepSpeedStrategy", (pl.strategies.SingleDeviceStrategy,), {})(device="cpu") if case == "deepspeed" else "auto"
    before = weights(module)
    with pytest.raises(ValueError, match=messages[case]):
        fit(str(tmp_path), settings, module=module, strategy=strategy)
    assert torch.equal(before, weights(module))


def test_the_example_raises_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    example("lightning_module").main(100)
    assert correction_in(capsys.readouterr().out) >= 2


# -- other callbacks -------------------------------------------------------------------------------


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
def test_averages_that_other_callbacks_keep_are_the_replicas_mean_where_others_look(tmp_path: Path, kind: str) -> None:
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
def test_a_group_that_is_added_in_mid_run_is_driven_by_an_ensemble_that_goes_on(tmp_path: Path, world: int) -> None:
    ours = {**SPREAD, "controller": halved}
    plain, same, moved = (
        on_ranks(_unfrozen, world, str(tmp_path / name), of) for name, of in (("plain", None), ("still", STILL), ("ours", ours))
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
def test_a_group_that_a_hook_of_the_module_adds_starts_at_the_rate_it_gives(tmp_path: Path, hook: str) -> None:
    class Adds(Transfer):
        added_after = None

    def add(module: Any, *args: Any) -> None:
        if module.current_epoch == 2 and module.added_after is None:
            module.added_after = module.global_step
            module.optimizers().add_param_group({"params": module.backbone.parameters(), "lr": 1e-3})

    setattr(Adds, hook, add)
    ensemble = {**SPREAD, "controller": Halved()}
    limits = {"max_epochs": 4, "max_steps": -1, "limit_train_batches": 3 * PARTS}
    trainer = fit(str(tmp_path), ensemble, before=[groups := Groups()], module=(module := Adds()), **limits)
    assert groups.rates[module.added_after + 1][1] == pytest.approx(1e-3) and trainer.hdet.ensemble.engine.step == STEPS


# -- FSDP2 -------------------------------------------------------------------------------------------------------------------


class Sharded(Net):
    """Every pair of ranks is a replica, over which its model is sharded; with ``rows`` 1 all ranks are one."""

    def __init__(self, rows: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows = rows

    def configure_model(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "mesh"):
            self.mesh = init_device_mesh("cpu", (self.rows, 4 // self.rows), mesh_dim_names=("dp_replicate", "dp_shard"))
            fully_shard(self.net, mesh=self.mesh if self.rows > 1 else self.mesh["dp_shard"])


def _sharded(folder: str, rows: int, ensemble: dict[str, Any] | None) -> Any:
    """[step]: this rank's shards, before and after; and those that a checkpoint of step 8 holds."""
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, save_distributed_checkpoint=False)
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1)
    trainer = fit(folder, ensemble, module=Sharded(rows), strategy=strategy, saves=saves, val_check_interval=1.0)
    saved = torch.load(Path(folder, "step=8.ckpt"), weights_only=True)["state_dict"]
    return trainer.seen.weights, torch.cat([p.flatten() for p in saved.values()]), weights(trainer.lightning_module)


def replicas(module: Any) -> hdet.Replicas:
    return hdet.Replicas.from_mesh(module.mesh)


def test_hsdp_has_replicas_of_shards_and_a_whole_checkpoint_holds_their_mean(tmp_path: Path) -> None:
    plain = on_ranks(_sharded, 4, str(tmp_path / "plain"), 2, None)
    still = on_ranks(_sharded, 4, str(tmp_path / "still"), 2, {"knobs": [hdet.LearningRate(0)], "replicas": replicas})
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(plain, still, strict=True))
    seen, saved, last = zip(*on_ranks(_sharded, 4, str(tmp_path / "spread"), 2, {**SPREAD, "replicas": replicas}), strict=True)
    for a, b in ((0, 2), (1, 3)):  # the same shard
        assert not any(torch.equal(seen[a][step], seen[b][step]) for step in range(1, STEPS + 1))
        assert torch.equal(last[a], last[b])
    mean = [(seen[a][8] + seen[b][8]) / 2 for a, b in ((0, 2), (1, 3))]
    torch.testing.assert_close(saved[0].sort().values, torch.cat(mean).sort().values, rtol=0, atol=1e-7)


def test_plain_fsdp_is_one_replica_which_explores_nothing_and_is_enough_for_trials(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ranks 0-3 are one replica, by what they share, so there is nothing to explore with"):
        on_ranks(_sharded, 4, str(tmp_path / "spread"), 1, SPREAD)
    plain = on_ranks(_sharded, 4, str(tmp_path / "plain"), 1, None)
    auto = on_ranks(_sharded, 4, str(tmp_path / "auto"), 1, {"controller": hdet.AutoLR})  # too short a run for it to move anything
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(plain, auto, strict=True))


class NumberedShards(Sharded):
    """Trains on the batch of its number and its rank, so that a loop by hand can do the same."""

    def __init__(self, lr: float) -> None:
        super().__init__(2, lr=lr, steps=FIRST)
        self.net[2] = nn.Identity()  # random states are not the same in Lightning

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / TRIED), "interval": "step"}]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.numbered(batch_idx), batch_idx)

    def numbered(self, number: int) -> Batch:
        rank = torch.distributed.get_rank()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        return x, x.sum(1, keepdim=True)


SEARCHED = {"knobs": [hdet.LearningRate(0)], "sync": hdet.Sync(EVERY), "total_steps": TRIED}


def _hsdp(folder: str, lr: float, controller: Any) -> Any:
    module = NumberedShards(lr)
    ensemble = None if controller is None else {**SEARCHED, "controller": controller, "replicas": replicas}
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    trainer = fit(folder, ensemble, module=module, strategy=strategy)
    # Before the last validation, after which the module stays gathered.
    return trainer.seen.later[FIRST], 1.0 if controller is None else trainer.hdet.ensemble.corrections["lr"]


def _hsdp_by_hand(lr: float, controller: Any) -> Any:
    module = NumberedShards(lr)
    module.log = lambda *args: None
    module.configure_model()
    [optimizer], [scheduler] = module.configure_optimizers()
    ensemble = hdet.Ensemble(optimizer, scheduler["scheduler"], **SEARCHED, controller=controller(module), replicas=replicas(module))

    def losses(step: int) -> torch.Tensor:
        total = torch.zeros(())
        for number in range(PARTS * step, PARTS * (step + 1)):
            loss = module.training_step((), number) / PARTS
            if torch.is_grad_enabled():
                loss.backward()  # as in Lightning, which lets FSDP2 reduce the gradients of each micro-batch
            total += loss.detach()
        if torch.is_grad_enabled():
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        return total

    for step in range(FIRST):
        optimizer.zero_grad()
        loss = losses(step)
        optimizer.step()
        ensemble.step(loss, closure=lambda step=step: losses(step))
    ensemble.converge()
    return weights(module), ensemble.corrections["lr"]


def test_in_hsdp_auto_lr_finds_to_the_bit_what_it_finds_in_a_loop_by_hand(tmp_path: Path) -> None:
    by_hand, ours = on_ranks(_hsdp_by_hand, 4, 1e-4, trial), on_ranks(_hsdp, 4, str(tmp_path), 1e-4, trial)
    for (a, correction), (b, same) in zip(by_hand, ours, strict=True):
        assert torch.equal(a, b) and correction == same >= 8
    assert torch.equal(ours[0][0], ours[2][0]) and torch.equal(ours[1][0], ours[3][0])


def test_in_hsdp_trials_leave_no_trace_in_the_run(tmp_path: Path) -> None:
    plain, looked = on_ranks(_hsdp, 4, str(tmp_path), 3e-2, None), on_ranks(_hsdp, 4, str(tmp_path), 3e-2, told)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, looked, strict=True))
