"""A loop with accelerate's Accelerator and hdet beside it."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet

from .frameworks import (
    EVERY,
    FIRST,
    FLOAT16,
    MOVED,
    PARTS,
    SPREAD,
    STEPS,
    STILL,
    Halved,
    Moved,
    accelerate_reset,
    check_same_run,
    check_skipped,
    correction_in,
    equal,
    example,
    needs,
    on_ranks,
    weights,
)

needs("accelerate")
import accelerate


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 400) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.x[i].sum(0, keepdim=True)


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


class Loop:
    """A user's script; ``ensemble``: settings, None for the plain one."""

    def __init__(
        self,
        ensemble: dict[str, Any] | None,
        *,
        prepared: bool = True,
        mixed: str = "no",
        alone: bool = False,
        steps: int = STEPS,
        lr: float = 3e-2,
        one_cycle: bool = False,
        size: int = 4,
    ) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=PARTS, mixed_precision=mixed
        )
        if (
            mixed == "fp16"
        ):  # a CPU computes in float32 then, without a word; this is what accelerate makes on a GPU
            assert self.accelerator.scaler is None
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(
                "cpu", init_scale=2.0**16, growth_interval=3
            )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        each = (
            self.accelerator.num_processes if prepared else 1
        )  # a prepared scheduler is stepped so often
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps * each)
        if one_cycle:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=lr, total_steps=steps * each
            )
        loader = torch.utils.data.DataLoader(
            Numbers(size * PARTS * (steps + 2) * self.accelerator.num_processes), batch_size=size
        )
        self.optimizer, self.loader = self.accelerator.prepare(optimizer, loader)
        self.model = (
            model if alone else self.accelerator.prepare(model)
        )  # gradients are local where there is no DDP
        self.scheduler = self.accelerator.prepare(scheduler) if prepared else scheduler
        self.ensemble: Any = None
        if ensemble is not None:
            settings = dict(ensemble)
            auto = settings.pop("auto", None)
            free = settings.pop("free", False)
            if auto is not None or free:
                settings["controller"] = hdet.AutoLR(self.model, budget=auto, before_step=self.clip)
            made = hdet.Ensemble(
                self.optimizer.optimizer, self.scheduler, total_steps=steps, **settings
            )
            own = () if auto is None else (self.model, losses_of)
            self.ensemble = hdet.integrations.accelerate.prepare(self.accelerator, made, *own)
        self.done = 0
        self.weights: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.skipped: list[bool] = []
        self.counted: list[int] = []
        self.overflows = -1
        """The step whose gradients do."""

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)

    def train(self, until: int) -> Loop:
        batches = iter(accelerate.skip_first_batches(self.loader, self.done * PARTS))
        while self.done < until:
            batch = next(batches)
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss = losses_of(self.model, batch).mean()
                self.accelerator.backward(
                    loss * float("inf") if self.done == self.overflows else loss
                )
                if self.accelerator.sync_gradients:
                    self.clip()
                    self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                if self.ensemble is not None:
                    self.ensemble.step(loss, None if self.ensemble.losses is None else batch)
                elif (
                    isinstance(self.scheduler, accelerate.scheduler.AcceleratedScheduler)
                    or self.accelerator.sync_gradients
                    and not self.accelerator.optimizer_step_was_skipped
                ):
                    self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.accelerator.sync_gradients:
                self.weights.append(weights(self.model))
                self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                self.counted.append(0 if self.ensemble is None else self.ensemble.engine.step)
                self.done += 1
        return self


def _plain(ensemble: dict[str, Any] | None, settings: dict[str, Any]) -> Any:
    loop = Loop(ensemble, **settings).train(STEPS)
    return loop.weights[-1], loop.rates, loop.losses


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "settings", [{"prepared": True}, {"prepared": False, "mixed": "bf16"}], ids=["prepared", "bf16"]
)
def test_spread_0_is_the_plain_run_bit_for_bit(world: int, settings: dict[str, Any]) -> None:
    plain = on_ranks(_plain, world, None, settings)
    ours = on_ranks(_plain, world, STILL, settings)
    check_same_run(plain, ours)
    assert plain[0][1][-1] < 1e-3


def test_a_cycles_loss_is_the_mean_of_the_loops() -> None:
    records: list[Any] = []
    with accelerate_reset():
        losses = (
            Loop(
                {
                    "sync": hdet.Sync(EVERY),
                    "log": lambda record, step: records.append(record["losses"][0]),
                }
            )
            .train(EVERY)
            .losses
        )
    assert (
        records == pytest.approx([sum(losses) / len(losses)], rel=1e-5)
        and len(losses) == EVERY * PARTS
    )


def _spread(folder: str) -> Any:
    loop = Loop({**SPREAD, "controller": Halved()}).train(7)
    loop.accelerator.save_state(folder)
    saved = weights(loop.model)
    loop.train(STEPS)
    return loop.weights, saved, loop.rates, loop.ensemble.cycle


def test_replicas_differ_within_a_cycle_and_are_equal_where_a_state_is_saved(
    tmp_path: Path,
) -> None:
    traces, saved, rates, cycles = zip(*on_ranks(_spread, 2, str(tmp_path)), strict=True)
    assert [equal(list(step)) for step in zip(*traces, strict=True)] == [
        step in (5, 10, 12) for step in range(1, 13)
    ]
    assert equal(list(saved)) and not torch.equal(saved[0], traces[0][6]) and cycles == (3, 3)
    file = {
        name: torch.load(path, weights_only=True)
        for name, path in [("model", tmp_path / "pytorch_model.bin")]
        if path.exists()
    }
    if not file:
        from safetensors.torch import load_file

        file = {"model": load_file(tmp_path / "model.safetensors")}
    assert torch.equal(
        torch.cat([p.flatten() for p in file["model"].values()]).sort().values,
        saved[0].sort().values,
    )
    schedule = _plain(None, {})[1]
    for of in rates:
        assert of == pytest.approx(
            [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(schedule)], rel=1e-9
        )


def _resumed(folder: str, at: int, one_cycle: bool) -> Any:
    settings = {**SPREAD, "controller": Halved()}
    whole = Loop(settings, one_cycle=one_cycle).train(at)
    whole.accelerator.save_state(folder)
    whole.train(STEPS)
    accelerate.state.AcceleratorState._reset_state()
    resumed = Loop(settings, one_cycle=one_cycle)
    resumed.accelerator.load_state(folder)
    resumed.done = at
    resumed.train(STEPS)
    return whole.weights[-1], resumed.weights[-1], whole.rates[at:], resumed.rates


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("at", "one_cycle"), [(EVERY, False), (EVERY + 2, False), (EVERY + 2, True)]
)
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
    tmp_path: Path, world: int, at: int, one_cycle: bool
) -> None:
    """A prepared OneCycleLR has its total_steps in its state alone."""
    for whole, resumed, rates_whole, rates_resumed in on_ranks(
        _resumed, world, str(tmp_path), at, one_cycle
    ):
        assert (
            torch.equal(whole, resumed)
            and rates_whole == rates_resumed
            and len(rates_whole) == STEPS - at
        )


# -- AutoLR ----------------------------------------------------------------------------------------


def _auto(lr: float, ensemble: dict[str, Any] | None, mixed: str = "no", until: int = FIRST) -> Any:
    loop = Loop(ensemble, steps=250, lr=lr, mixed=mixed, size=16).train(until)
    auto = None if ensemble is None else loop.ensemble.engine.controller
    return (
        loop.weights[-1],
        0 if auto is None else loop.ensemble.corrections["lr"],
        auto and auto.interval,
        auto and auto.cost,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_auto_lr_with_accumulation_raises_a_rate_that_is_far_too_low_and_leaves_a_good_one(
    world: int,
) -> None:
    low, good, plain = (
        on_ranks(_auto, world, lr, ensemble)
        for lr, ensemble in ((1e-4, {"auto": 0.9}), (0.1, {"auto": 0.9}), (0.1, None))
    )
    assert equal([w for w, *_ in low]) and all(correction >= 8 for _, correction, *_ in low)
    assert all(
        correction == 1 and torch.equal(w, of)
        for (w, correction, *_), (of, *_) in zip(good, plain, strict=True)
    )


def test_without_losses_only_the_runs_own_steps_are_looked_at() -> None:
    [(ours, correction, found, cost)], [(plain, *_)] = (
        on_ranks(_auto, 1, 0.1, {"free": True}),
        on_ranks(_auto, 1, 0.1, None),
    )
    assert (
        torch.equal(ours, plain)
        and correction == 1
        and cost == 0
        and [arm.losses for arm in found.trial.arms] == [()]
    )


def test_under_float16_a_trial_has_the_accelerators_scaler_and_the_loops_clipping() -> None:
    [(raised, correction, found, _)] = on_ranks(
        _auto, 1, 1e-4, {"auto": 0.9}, "fp16", 2 * FIRST
    )  # many steps are skipped
    assert correction >= 8 and found.trial.arms[0].losses and raised.isfinite().all()
    [(ours, correction, *_)], [(plain, *_)] = (
        on_ranks(_auto, 1, 0.1, of, "fp16", 2 * FIRST) for of in ({"auto": 0.9}, None)
    )
    assert correction == 1 and torch.equal(ours, plain)


def _anew() -> Any:
    """The closure of a step with a rate of 0, and what the step itself has had."""
    loop = Loop({"auto": 0.9}, lr=0.0)
    batches = [batch for batch, _ in zip(loop.loader, range(PARTS), strict=False)]
    loop.train(1)
    model = loop.model
    model.zero_grad()
    for i, batch in enumerate(batches):
        with loop.accelerator.no_sync(model) if i == 0 else contextlib.nullcontext():
            loop.accelerator.backward(losses_of(model, batch).mean())
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    model.zero_grad()
    loss = loop.ensemble.compute_again(batches)
    return (
        expected,
        torch.cat([p.grad.flatten() for p in model.parameters()]),
        float(loss),
        sum(loop.losses) / PARTS,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_gradients_are_those_of_all_micro_batches(world: int) -> None:
    for expected, gradient, loss, of_step in on_ranks(_anew, world):
        assert torch.equal(expected, gradient) and loss == pytest.approx(of_step, rel=1e-6)


# -- a scaler, logs, refusals ----------------------------------------------------------------------


def _float16(kind: str, prepared: bool) -> Any:
    is_local = kind == "outer"
    loop = Loop(FLOAT16[kind], prepared=prepared, mixed="fp16", alone=is_local)
    if is_local and loop.accelerator.process_index == 1:
        loop.overflows = 2  # of one replica alone
    loop.train(STEPS)
    if loop.ensemble is not None:
        loop.ensemble.converge()
    return loop, weights(loop.model)


def _float16_run(kind: str, prepared: bool) -> Any:
    loop, last = _float16(kind, prepared)
    return (last, loop.skipped, [loop.rates, loop.losses], loop.counted), loop.weights


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "torch's"])
def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(
    world: int, prepared: bool
) -> None:
    check_skipped(partial(_float16_run, prepared=prepared), world)


def test_under_float16_replicas_differ_within_a_cycle_and_are_equal_after_it() -> None:
    ((last, skipped, _, counted), one), ((same, also, _, and_counted), two) = on_ranks(
        _float16_run, 2, "spread", True
    )
    assert skipped == also and counted == and_counted and any(skipped[3:]) and counted[-1] > EVERY
    assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [
        count % EVERY == 0 for count in counted
    ]
    assert torch.equal(last, same) and last.isfinite().all()


def test_under_float16_a_step_that_one_of_several_local_replicas_skips_counts_for_all() -> None:
    ((_, skipped, _, counted), one), ((_, also, _, and_counted), two) = on_ranks(
        _float16_run, 2, "outer", False
    )
    assert also[2] and not skipped[2] and counted == and_counted == list(range(1, STEPS + 1))
    assert [
        step + 1 for step, (a, b) in enumerate(zip(one, two, strict=True)) if torch.equal(a, b)
    ] == [1, 5, 10, 12]  # 1: both


def _prepared_outer() -> str:
    with pytest.raises(ValueError) as refused:
        _float16("outer", True)
    return str(refused.value)


def test_under_float16_local_replicas_need_a_scheduler_that_does_not_stand_still() -> None:
    for message in on_ranks(_prepared_outer, 2):
        assert "schedules would drift apart. Give the Ensemble torch's scheduler" in message


def test_cycles_go_to_the_accelerators_trackers_and_notes_to_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "accelerate.hdet")
    found: list[Any] = []
    with accelerate_reset():
        own: list[int] = []
        loop = Loop(
            {**SPREAD, "controller": Halved(), "log": lambda record, step: own.append(step)}
        )
        tracker = {
            "name": "own",
            "log": lambda self, values, step=None, **_: found.append((step, values)),
        }
        loop.accelerator.trackers = [type("Tracker", (), tracker)()]
        loop.train(STEPS)
    assert [step for step, _ in found] == own == [5, 10, 12] and [
        values["hdet/corrections/lr"] for _, values in found
    ] == [0.5] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] hdet, halved: halves once",
        "[RANK 0] hdet, step 5: lr: halved",
    ]


def test_moves_are_told_in_accelerates_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "accelerate.hdet")
    with accelerate_reset():
        loop = Loop({**SPREAD, "controller": Moved()}).train(STEPS)
        moved = MOVED.format(value=0.5 * Loop(None).train(EVERY + 1).rates[-1])
    assert [record.getMessage() for record in caplog.records] == [f"[RANK 0] hdet, step 5: {moved}"]
    assert loop.ensemble.corrections["lr"] == 0.5


def _stepped_twice(prepared: bool) -> str:
    """The old scheduler.step() is left in the loop."""
    loop = Loop(STILL, prepared=prepared)
    inner = loop.ensemble.step

    def step(*args: Any) -> None:
        inner(*args)
        loop.scheduler.step()

    loop.ensemble.step = step
    with pytest.raises(ValueError) as refused:
        loop.train(STEPS // 2)
    return str(refused.value)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_scheduler_that_the_loop_steps_as_well_is_refused(prepared: bool) -> None:
    for message in on_ranks(_stepped_twice, 1, prepared):
        assert "somebody else has written it" in message and "stepped by nobody else" in message


def _saved_on_two(folder: str, prepared: bool) -> None:
    loop = Loop(STILL, prepared=prepared).train(6)
    loop.accelerator.save_state(folder)


def test_another_number_of_processes_and_a_prepared_scheduler_are_warned_of(tmp_path: Path) -> None:
    for prepared in (True, False):
        folder = str(tmp_path / f"{prepared}")
        on_ranks(_saved_on_two, 2, folder, prepared)
        with accelerate_reset(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loop = Loop(STILL, prepared=prepared)
            loop.accelerator.load_state(folder)
        told = [
            str(one.message)
            for one in caught
            if "saved on 2 processes, and this run has 1" in str(one.message)
        ]
        torchs = loop.scheduler.scheduler if prepared else loop.scheduler
        assert (len(told), torchs.last_epoch, loop.ensemble.engine.step) == (
            (1, 12, 6) if prepared else (0, 6, 6)
        )


def test_what_cannot_work_is_refused_by_name() -> None:
    prepare = hdet.integrations.accelerate.prepare
    with accelerate_reset():
        loop = Loop(None)
        inner = loop.optimizer.optimizer
        with pytest.raises(TypeError, match="must be an hdet.Ensemble, got Loop"):
            prepare(loop.accelerator, loop)
        with pytest.raises(
            ValueError,
            match=(
                "AcceleratedOptimizer is accelerate's wrapper.*pass the torch optimizer inside, "
                "its .optimizer"
            ),
        ):
            hdet.Ensemble(loop.optimizer, total_steps=STEPS)
        bare = hdet.Ensemble(inner, total_steps=9000, controller=hdet.AutoLR(loop.model))
        with pytest.raises(TypeError, match="closure must be a function, got list"):
            bare.step(1.0, [torch.ones(1)])
        bare.close()
        strange = hdet.Ensemble(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
        with pytest.raises(
            ValueError,
            match="has not prepared the Ensemble's optimizer: call accelerator.prepare before",
        ):
            prepare(loop.accelerator, strange)
        auto = hdet.Ensemble(inner, total_steps=9000, controller=hdet.AutoLR(loop.model))
        with pytest.raises(
            TypeError,
            match="losses of a model: pass prepare\\(accelerator, ensemble, model, losses\\)",
        ):
            prepare(loop.accelerator, auto, losses=losses_of)
        with pytest.raises(TypeError, match="call step\\(loss, batch\\)"):
            prepare(loop.accelerator, auto, loop.model, losses_of).step(1.0)


def test_the_example_raises_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with accelerate_reset():
        example("accelerate_loop").main(200)
    assert correction_in(capsys.readouterr().out) >= 2
