"""Lightning's Trainer with hdet's callback, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet

from .frameworks import (
    EVERY,
    FIRST,
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
    correction_in,
    equal,
    example,
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
from lightning.pytorch.callbacks import ModelCheckpoint

from .lightning_runs import Batch, Gan, HdetCallback, Net, fit, losses_of, numbered

# -- the plain run ---------------------------------------------------------------------------------


def _plain(folder: str, ensemble: dict[str, Any] | None, kind: str) -> Any:
    module = Gan() if kind == "manual" else Net(schedule=kind)
    settings = (
        {}
        if kind == "manual"
        else {"val_check_interval": 4, "precision": "bf16-mixed" if kind == "lambda" else "32-true"}
    )
    trainer = fit(folder, ensemble, module=module, **settings)
    lines = [
        {key: value for key, value in line.items() if "hdet" not in key}
        for line in trainer.kept.lines
    ]
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
    lines = [
        {key: value for key, value in line.items() if "hdet" not in key}
        for line in trainer.kept.lines
    ]
    return (
        weights(trainer.lightning_module),
        [line for line in lines if line.keys() - {"epoch"}],
        trainer.hdet and looked_at(trainer.hdet.ensemble),
    )


@pytest.mark.parametrize("world", [1, 2])
def test_by_default_the_first_steps_are_looked_at_which_costs_nothing_and_leaves_no_trace(
    tmp_path: Path, world: int
) -> None:
    check_looked_at(lambda of, lr: on_ranks(_looked_at, world, str(tmp_path), of, lr), 0.1, 1e-5)


@pytest.mark.parametrize("manual", [False, True])
def test_a_cycles_loss_is_the_mean_of_what_training_step_returns(
    tmp_path: Path, manual: bool
) -> None:
    records: list[Any] = []
    losses: list[float] = []
    module: Any = Gan() if manual else Net()
    inner = module.training_step

    def training_step(batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = inner(batch, batch_idx)
        losses.append(loss.item())
        return loss

    module.training_step = training_step
    fit(
        str(tmp_path),
        {"sync": hdet.Sync(EVERY), "log": lambda record, step: records.append(record["losses"][0])},
        module=module,
    )
    first = EVERY * (1 if manual else PARTS)
    assert records[0] == pytest.approx(sum(losses[:first]) / first, rel=1e-5)


# -- replicas --------------------------------------------------------------------------------------


def _spread(folder: str) -> Any:
    saves = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=8, save_top_k=-1, save_weights_only=True
    )
    trainer = fit(folder, {**SPREAD, "controller": Halved()}, val_check_interval=14, saves=saves)
    file = next(Path(folder).glob("*step=8*"))
    saved = torch.load(file, weights_only=True)["state_dict"]
    rates = [line["lr-SGD"] for line in trainer.kept.lines if "lr-SGD" in line]
    lines = [line for line in trainer.kept.lines if "hdet/values/lr" in line]
    ours = [
        [line[f"hdet/{key}/lr"] for line in lines]
        for key in ("values", "corrections", "multipliers")
    ]
    return (
        trainer.seen,
        torch.cat([p.flatten() for p in saved.values()]),
        weights(trainer.lightning_module),
        rates,
        ours,
    )


def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(tmp_path: Path) -> None:
    seen, saved, last, rates, ours = zip(*on_ranks(_spread, 2, str(tmp_path)), strict=True)
    # A callback that stands before ours sees what the optimizer has left; then replicas are
    # averaged, of step 7 to be validated, of 8 to be saved.
    assert [step for step in range(1, STEPS + 1) if equal([of.weights[step] for of in seen])] == []
    assert [step for step in range(1, STEPS + 1) if equal([of.later[step] for of in seen])] == [
        5,
        7,
        8,
        10,
    ]
    assert equal([of.validated[0] for of in seen]) and equal(list(last)) and equal(list(saved))
    torch.testing.assert_close(saved[0], sum(of.weights[8] for of in seen) / 2, rtol=0, atol=1e-7)
    schedule = list(_plain(str(tmp_path), None, "step")[2].values())
    for of, logged, (values, corrections, multipliers) in zip(seen, rates, ours, strict=True):
        expected = [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(schedule)]
        assert list(of.rates.values()) == pytest.approx(expected, rel=1e-6)
        assert list(dict.fromkeys(logged)) == pytest.approx(expected, rel=1e-6)  # two lines a step
        assert values[:-1] == pytest.approx(expected[1:], rel=1e-6) and corrections == [1.0] * (
            EVERY - 1
        ) + [0.5] * (STEPS - EVERY + 1)
        assert sorted(set(multipliers)) == pytest.approx([0.7, 1.3])


# -- checkpoints -----------------------------------------------------------------------------------


def _resumed(folder: str, at: int, base: Any) -> Any:
    def fitted(name: str, resume: str | None = None) -> Any:
        saves = ModelCheckpoint(f"{folder}/{name}", "{step}", every_n_train_steps=at, save_top_k=-1)
        return fit(
            folder,
            {**SPREAD, "controller": lambda module: Halved()},
            module=numbered(base),
            saves=saves,
            resume=resume,
        )

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
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
    tmp_path: Path, world: int, at: int, base: Any
) -> None:
    for [(whole, *state), (resumed, *same)], shorter in on_ranks(
        _resumed, world, str(tmp_path), at, base
    ):
        assert torch.equal(whole, resumed) and state == same and shorter


# -- losses anew, AutoLR ---------------------------------------------------------------------------


def _auto(folder: str, lr: float, controller: Any, losses: bool) -> Any:
    module = Net(lr=lr, steps=TRIED, schedule="lambda")
    ensemble = {
        "controller": controller,
        "sync": hdet.Sync(EVERY),
        **({"losses": losses_of} if losses else {}),
    }
    with listening("lightning.pytorch.utilities.rank_zero") as lines:
        given = ensemble if controller else None
        trainer = fit(folder, given, module=module, stop=FIRST, size=16)
    assert module.calls == FIRST * PARTS and "log" not in vars(module)
    logged = [line["loss"] for line in trainer.kept.lines if "loss" in line]
    correction = trainer.hdet.ensemble.corrections["lr"] if controller else 1.0
    return weights(module), correction, [line for line in lines if line.startswith("hdet")], logged


@pytest.mark.parametrize(("world", "losses"), [(1, False), (2, False), (1, True)])
def test_auto_lr_raises_a_rate_that_is_far_too_low_and_says_so_in_lightnings_log(
    tmp_path: Path, world: int, losses: bool
) -> None:
    found = on_ranks(_auto, world, str(tmp_path), 1e-4, trial, losses)
    assert equal([w for w, *_ in found]) and all(correction >= 8 for _, correction, *_ in found)
    lines = found[0][2]
    assert lines[0].startswith("hdet, auto: a trial in the first 56 steps") and any(
        "learning rate 0.0001 -> " in line for line in lines
    )


def test_moves_are_told_once_and_corrections_are_in_the_bar(tmp_path: Path) -> None:
    with listening("lightning.pytorch.utilities.rank_zero") as lines:
        module = Net(schedule="epoch")
        trainer = fit(str(tmp_path), {**SPREAD, "controller": Moved()}, module=module)
    assert [line for line in lines if line.startswith("hdet")] == [
        f"hdet, step 5: {MOVED.format(value=0.015)}"
    ]
    assert "hdet/corrections/lr" in trainer.progress_bar_metrics
    assert "hdet/cycle" not in trainer.progress_bar_metrics


def test_auto_lr_refuses_a_scheduler_that_steps_by_a_metric(tmp_path: Path) -> None:
    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            [optimizer], _ = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"},
            }

    with pytest.raises(
        ValueError,
        match="AutoLR trains copies.*ReduceLROnPlateau has none.*use a schedule of steps",
    ):
        fit(str(tmp_path), {"controller": hdet.AutoLR}, module=Plateau())
    assert (
        fit(
            str(tmp_path), {**SPREAD, "controller": Halved()}, module=Plateau()
        ).hdet.ensemble.corrections["lr"]
        == 0.5
    )


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
def test_batches_that_training_step_leaves_out_are_left_out_of_trials(
    tmp_path: Path, nones: Any
) -> None:
    plain, ours = (
        fit(str(tmp_path), of, module=LeavesOut(nones, lr=0.1, steps=TRIED), stop=FIRST)
        for of in (None, {"controller": told})
    )
    found = ours.hdet.ensemble.engine.controller.search.interval
    assert (
        torch.equal(*(weights(of.lightning_module) for of in (plain, ours)))
        and ours.global_step == FIRST
    )
    assert (
        max(len(arm.losses) for arm in found.trial.arms) == (28 if nones[0] == 6 else 26)
        and found.trial.has_learned
    )
    free = fit(str(tmp_path), {}, module=LeavesOut(nones, lr=0.1, steps=TRIED), stop=FIRST)
    assert torch.equal(*(weights(of.lightning_module) for of in (plain, free))) and looked_at(
        free.hdet.ensemble
    )[:2] == (1.0, 0.0)


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
            return (
                None
                if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready in (20, 21)
                else batch
            )

    def run(ensemble: Any) -> Any:
        module = Holes((), ((0, 7), (1, 13)), lr=0.1, steps=TRIED)
        return fit(
            str(tmp_path), ensemble, module=module, stop=FIRST, make=Counts, limit_train_batches=60
        )

    plain, ours = run(None), run({"controller": told})
    assert torch.equal(*(weights(of.lightning_module) for of in (plain, ours))) and set(seen) == {
        PARTS
    }
    assert ours.hdet.ensemble.engine.step == ours.global_step == plain.global_step == FIRST
    assert run({"knobs": [hdet.LearningRate(0)]}).global_step == FIRST


@pytest.mark.parametrize(
    ("batches", "parts", "epochs", "steps"), [(7, 2, 3, -1), (7, 3, 3, 8), (5, 8, 4, -1)]
)
def test_the_runs_length_is_the_steps_that_lightning_makes(
    tmp_path: Path, batches: int, parts: int, epochs: int, steps: int
) -> None:
    of = {
        "limit_train_batches": batches,
        "accumulate_grad_batches": parts,
        "max_epochs": epochs,
        "max_steps": steps,
    }
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
        assert (
            ensemble.run.clock.total_steps == ensemble.engine.step == STEPS / 2
            and ensemble.engine.controller.budget == 0
        )


def _anew(folder: str) -> Any:
    """The closure of the last step, of rate 0 and without dropout, and what the step itself has
    had."""
    module = Net(lr=0.0, steps=1)
    module.net[2] = nn.Identity()
    found: dict[str, Any] = {}

    class Closed(HdetCallback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            found.setdefault("batches", []).append((batch, batch_idx))
            found["loss"] = found.get("loss", 0.0) + outputs["loss"]
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            if batch_idx == PARTS - 1:
                found["gradient"] = torch.cat(
                    [p.grad.flatten() for p in pl_module.parameters()]
                ).clone()
                pl_module.zero_grad()
                found["anew"] = self.compute_again(found["batches"])
                self.ensemble.engine.controller.before_step()
                found["again"] = torch.cat([p.grad.flatten() for p in pl_module.parameters()])
                with torch.no_grad():
                    found["scored"] = self.compute_again(found["batches"])

    fit(folder, {"controller": hdet.AutoLR}, module=module, make=Closed)
    return found, module.calls


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_gradients_are_computed_anew_as_lightning_has_made_them(
    tmp_path: Path, world: int
) -> None:
    for found, calls in on_ranks(_anew, world, str(tmp_path)):
        assert (
            torch.equal(found["loss"], found["anew"])
            and torch.equal(found["loss"], found["scored"])
            and calls == PARTS
        )
        assert (
            torch.equal(found["gradient"], found["again"])
            and float(found["gradient"].norm()) <= 0.5 + 1e-6
        )


# -- refusals --------------------------------------------------------------------------------------


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
    settings: dict[str, Any] = {
        "controller": Halved() if case == "one for several" else hdet.AutoLR
    }
    if case == "manual":
        module.automatic_optimization = False
    strategy = (
        type("DeepSpeedStrategy", (pl.strategies.SingleDeviceStrategy,), {})(device="cpu")
        if case == "deepspeed"
        else "auto"
    )
    before = weights(module)
    with pytest.raises(ValueError, match=messages[case]):
        fit(str(tmp_path), settings, module=module, strategy=strategy)
    assert torch.equal(before, weights(module))


def test_the_example_raises_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    example("lightning_module").main(100)
    assert correction_in(capsys.readouterr().out) >= 2
