"""A loop with accelerate's Accelerator and hdet beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.testing.adapters import SPREAD, STEPS, STILL, Halved

from .contract import Float16, Trained
from .frameworks import (
    FIRST,
    OUTER,
    PARTS,
    accelerate_reset,
    closures,
    computed_again,
    gradients,
    listening,
    needs,
    on_ranks,
    weights,
)

needs("accelerate")
import accelerate

prepare = hdet.integrations.accelerate.prepare


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
        float16: bool = False,
        alone: bool = False,
        steps: int = STEPS,
        lr: float = 3e-2,
        size: int = 4,
    ) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=PARTS,
            mixed_precision="fp16" if float16 else mixed,
        )
        if float16:  # a CPU computes in float32 then, without a word; accelerate does so on a GPU
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(
                "cpu", init_scale=2.0**16, growth_interval=3
            )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        world = self.accelerator.num_processes
        # A prepared scheduler is stepped once for each process, and has its total_steps in its
        # state alone.
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=steps * (world if prepared else 1), pct_start=0.01
        )
        x = torch.randn(size * PARTS * steps * world, 6, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        loader = torch.utils.data.DataLoader(data, batch_size=size)
        self.optimizer, self.loader = self.accelerator.prepare(optimizer, loader)
        # Gradients are local where there is no DDP.
        self.model = model if alone else self.accelerator.prepare(model)
        self.scheduler = self.accelerator.prepare(scheduler) if prepared else scheduler
        self.ensemble: Any = None
        if ensemble is not None:
            settings = dict(ensemble) or {"search": partial(hdet.AutoLR, budget=0)}
            for name in settings.keys() & {"search", "controller"}:
                if callable(settings[name]):
                    settings[name] = settings[name](self.model)
            if (search := settings.get("search")) is not None:
                search.before_step = self.clip
            made = hdet.Ensemble(
                self.optimizer.optimizer, self.scheduler, total_steps=steps, **settings
            )
            own = (self.model, losses_of) if search is not None and search.budget != 0 else ()
            self.ensemble = prepare(self.accelerator, made, *own)
        self.done, self.overflows = 0, -1
        """Steps; and the one whose gradients do."""
        self.gradient = torch.zeros(0)
        self.seen = Trained(torch.zeros(0))

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)

    def train(self, until: int, save: int = 0, evaluate: int = 0, folder: str = "") -> Trained:
        batches = iter(accelerate.skip_first_batches(self.loader, self.done * PARTS))
        seen, accelerator = self.seen, self.accelerator
        while self.done < until:
            batch = next(batches)
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    loss = losses_of(self.model, batch).mean()
                accelerator.backward(loss * float("inf") if self.done == self.overflows else loss)
                if accelerator.sync_gradients:
                    self.clip()
                    self.gradient = gradients(self.model)
                    seen.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.step(loss, batch)
                self.optimizer.zero_grad()
            seen.losses.append(loss.item())
            if not accelerator.sync_gradients:
                continue
            self.done += 1
            seen.lines.append([seen.rates[-1], seen.losses[-PARTS:]])
            seen.weights[self.done] = weights(self.model)
            seen.skipped.append(accelerator.optimizer_step_was_skipped)
            if self.ensemble is not None:
                seen.counted.append(self.ensemble.steps_done)
                seen.metrics.append(self.ensemble.metrics())
            if self.done == evaluate:
                if self.ensemble is not None:
                    self.ensemble.converge()
                seen.evaluated.append(weights(self.model))
            if save and self.done % save == 0:
                accelerator.save_state(f"{folder}/{self.done}")
        if self.ensemble is not None:
            self.ensemble.converge()
        seen.last = weights(self.model)
        return seen

    def step(self, loss: torch.Tensor, batch: Any) -> None:
        accelerator = self.accelerator
        if self.ensemble is not None:
            self.ensemble.step(loss, None if self.ensemble.losses_of is None else batch)
        elif isinstance(self.scheduler, accelerate.scheduler.AcceleratedScheduler) or (
            accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
        ):
            self.scheduler.step()


def train(
    folder: str,
    ensemble: Any,
    *,
    until: int = 0,
    save: int = 0,
    resume: int = 0,
    evaluate: int = 0,
    overflows: int = -1,
    **settings: Any,
) -> Trained:
    with listening("accelerate.hdet", "[RANK 0] ") as lines:
        loop = Loop(ensemble, **settings)
        if loop.accelerator.process_index == 1:
            loop.overflows = overflows
        if resume:
            loop.accelerator.load_state(f"{folder}/{resume}")
            loop.done = resume
        seen = loop.train(until or settings.get("steps", STEPS), save, evaluate, folder)
    seen.told = [line.removeprefix("[RANK 0] ") for line in lines]
    if save and Path(folder, f"{save}/model.safetensors").exists():
        from safetensors.torch import load_file

        file = load_file(f"{folder}/{save}/model.safetensors")
        seen.saved = torch.cat([p.flatten() for p in file.values()])
    return seen.see([] if loop.ensemble is None else loop.ensemble.ensembles)


def again(folder: str) -> Any:
    loop = Loop({"search": hdet.AutoLR}, lr=0.0, steps=1)
    with closures() as kept:
        seen = loop.train(1)
    loop.model.zero_grad()
    found = computed_again(loop.ensemble, loop.model, kept[-1])
    return [loss / PARTS for loss in seen.losses], loop.gradient, found


class TestContract(Float16):
    train, again = staticmethod(train), staticmethod(again)
    plain = ((1, {}), (2, {}), (2, {"prepared": False, "mixed": "bf16"}))
    good, low = 0.1, 1e-5
    trial_settings = (("size", 16),)

    # accelerate asks for a state of each object that is registered.
    test_checkpoints_of_a_plain_run_go_on_here_and_ours_there = None  # type: ignore[assignment]


def test_without_losses_no_trial_is_made(tmp_path: Path) -> None:
    with accelerate_reset():
        loop = Loop(None, steps=9000)
        auto = hdet.AutoLR(loop.model, budget=0.9)
        made = hdet.Ensemble(
            loop.optimizer.optimizer, loop.scheduler, total_steps=9000, search=auto
        )
        loop.ensemble = prepare(loop.accelerator, made)
        loop.train(FIRST)
    assert auto.cost == 0 and [arm.losses for arm in auto.interval.trial.arms] == [()]


def test_under_float16_a_step_that_one_of_several_local_replicas_skips_counts_for_all(
    tmp_path: Path,
) -> None:
    local = partial(train, float16=True, prepared=False, alone=True, overflows=2)
    one, two = on_ranks(local, 2, str(tmp_path), OUTER)
    assert two.skipped[2] and not one.skipped[2]
    assert one.counted == two.counted == list(range(1, STEPS + 1))
    equal = [step for step in one.weights if torch.equal(one.weights[step], two.weights[step])]
    assert equal == [1, 5, 10, 12]  # 1: both


def test_cycles_go_to_the_accelerators_trackers_and_notes_to_its_log(tmp_path: Path) -> None:
    found: list[Any] = []
    own: list[int] = []
    with accelerate_reset(), listening("accelerate.hdet") as lines:
        loop = Loop(
            {**SPREAD, "controller": Halved(), "log": lambda record, step: own.append(step)}
        )
        log = lambda self, values, step=None, **_: found.append((step, values))
        loop.accelerator.trackers = [type("Tracker", (), {"name": "own", "log": log})()]
        loop.train(STEPS)
    assert [step for step, _ in found] == own == [5, 10, 12]
    assert [values["hdet/corrections/lr"] for _, values in found] == [0.5] * 3
    said = ["hdet, halved: halves once", "hdet, step 5: lr: halved"]
    assert lines == [f"[RANK 0] {line}" for line in said]


def _stepped_twice(prepared: bool) -> str:
    """The old scheduler.step() is left in the loop."""
    loop = Loop(STILL, prepared=prepared)
    inner = loop.ensemble.step
    loop.ensemble.step = lambda *args: (inner(*args), loop.scheduler.step())
    with pytest.raises(ValueError) as refused:
        loop.train(STEPS // 2)
    return str(refused.value)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_scheduler_that_the_loop_steps_as_well_is_refused(prepared: bool) -> None:
    [message] = on_ranks(_stepped_twice, 1, prepared)
    assert "somebody else has written it" in message and "Remove scheduler.step()" in message


def test_what_cannot_work_is_refused_by_name() -> None:
    with accelerate_reset():
        loop = Loop(None)
        inner = loop.optimizer.optimizer
        with pytest.raises(ValueError, match="accelerate's wrapper.*the torch optimizer inside"):
            hdet.Ensemble(loop.optimizer, total_steps=STEPS)
        strange = hdet.Ensemble(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
        with pytest.raises(ValueError, match="has not prepared.*: call accelerator.prepare before"):
            prepare(loop.accelerator, strange)
        auto = hdet.Ensemble(inner, total_steps=9000, search=hdet.AutoLR(loop.model))
        with pytest.raises(TypeError, match=r"call step\(loss, batch\)"):
            prepare(loop.accelerator, auto, loop.model, losses_of).step(1.0)
    with accelerate_reset():
        loop = Loop(None, float16=True)
        made = hdet.Ensemble(
            loop.optimizer.optimizer, total_steps=9000,
            search=hdet.AutoLR(loop.model, spread_arms=True),
            sync=hdet.Sync(gradients="local", moments="keep"),
        )  # fmt: skip
        with pytest.raises(ValueError, match="no GradScaler"):
            prepare(loop.accelerator, made)
