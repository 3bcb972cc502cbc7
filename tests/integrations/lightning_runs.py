"""Runs of Lightning's Trainer, small ones, with what is to be seen of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hdet
from hdet.testing.adapters import STEPS

from .contract import Trained
from .frameworks import PARTS, listening, needs, weights

needs("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

HdetCallback = hdet.integrations.lightning.HdetCallback
Batch = tuple[torch.Tensor, torch.Tensor]


def losses_of(module: Any, batch: Batch) -> torch.Tensor:
    return (module.net(batch[0]) - batch[1]).square().mean(1)


def numbered(size: int, number: int) -> Batch:
    """Of this rank: in the middle of an epoch Lightning goes on with the first batches of a loader
    without a state, so a module has its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10 * number + rank)
    x = torch.randn(size, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


class Net(pl.LightningModule):
    """``schedule``: of which kind, stepped by Lightning. ``size``: of its batches."""

    def __init__(
        self, lr: float = 3e-2, steps: int = STEPS, schedule: str = "step", size: int = 4
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Random states are nobody's business in Lightning, which does not restore them.
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 1))
        self.lr, self.steps, self.schedule, self.size, self.calls = lr, steps, schedule, size, 0
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.calls += 1
        loss = losses_of(self, numbered(self.size, batch_idx)).mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("validation", losses_of(self, batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.schedule == "constant":
            return optimizer
        schedulers = torch.optim.lr_scheduler
        scheduler: Any = schedulers.CosineAnnealingLR(optimizer, T_max=self.steps)
        if self.schedule == "lambda":
            scheduler = schedulers.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
        if self.schedule == "plateau":
            scheduler = schedulers.ReduceLROnPlateau(optimizer)
        interval = "step" if self.schedule in ("step", "lambda") else "epoch"
        made = {"scheduler": scheduler, "interval": interval, "monitor": "validation"}
        return {"optimizer": optimizer, "lr_scheduler": made}


class Gan(Net):
    """Two optimizers, by hand; the second every other time."""

    def __init__(self, lr: float = 3e-2, steps: int = STEPS, both: bool = False) -> None:
        super().__init__(lr, steps)
        self.automatic_optimization, self.both = False, both
        self.net = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = numbered(self.size, batch_idx)
        loss = sum((net(x) - y).square().mean() for net in self.net)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        both = list(zip(self.optimizers(), self.lr_schedulers(), strict=True))
        for optimizer, scheduler in both if self.both or batch_idx % 2 else both[:1]:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            scheduler.step()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(net.parameters(), lr=lr)
            for net, lr in zip(self.net, (self.lr, self.lr / 3), strict=True)
        ]
        steps = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) for optimizer in optimizers]
        return optimizers, steps


class Seen(pl.Callback):
    """What is to be seen after each step, and before it; and the weights that are validated."""

    def __init__(self, until: int) -> None:
        self.until, self.seen = until, Trained(torch.zeros(0))
        self.groups: dict[int, list[float]] = {}
        """[step]: the rates of all groups."""

    def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.groups[trainer.global_step] = rates

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        step = trainer.global_step
        if step in (self.start, *self.seen.weights):  # the first micro-batch of the next step
            return
        self.seen.weights[step] = weights(pl_module)
        trainer.should_stop = trainer.should_stop or step == self.until
        ensemble = trainer.hdet and trainer.hdet.ensemble
        self.seen.counted.append(ensemble.steps_done if ensemble else 0)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.evaluated.append(weights(pl_module))


class Kept(pl.loggers.logger.DummyLogger):
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.lines.append(dict(metrics))


def loader(steps: int, world: int) -> Any:
    x = torch.randn(4 * steps * world, 6, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=4)


def fit(
    folder: str,
    ensemble: Any,
    module: Any,
    *,
    until: int = 0,
    save: int = 0,
    resume: int = 0,
    before: Any = (),
    make: Any = HdetCallback,
    weights_only: bool = False,
    **settings: Any,
) -> Any:
    """``ensemble``: None without the callback. Adds what was seen to the trainer."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    callback = None if ensemble is None else make(**ensemble)
    seen, kept = Seen(until), Kept()
    callbacks = [*before, seen, LearningRateMonitor("step"), *([callback] if callback else [])]
    if save:
        callbacks.append(
            ModelCheckpoint(
                folder, "{step}", every_n_train_steps=save, save_top_k=-1,
                save_weights_only=weights_only, enable_version_counter=False,
            )
        )  # fmt: skip
    if module.automatic_optimization:
        settings = {"accumulate_grad_batches": PARTS, "gradient_clip_val": 0.5, **settings}
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, callbacks=callbacks, logger=kept,
        default_root_dir=folder, enable_checkpointing=bool(save), enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, **{
            "max_steps": module.steps, "strategy": "ddp" if world > 1 else "auto", **settings,
        },
    )  # fmt: skip
    trainer.hdet, trainer.kept, trainer.callback = callback, kept, seen
    path = f"{folder}/step={resume}.ckpt" if resume else None
    trainer.fit(module, loader(PARTS * module.steps, world), loader(1, world), ckpt_path=path)
    seen.seen.last, seen.seen.losses = weights(module), module.losses
    return trainer


def train(
    folder: str,
    ensemble: Any,
    *,
    module: Any = Net,
    lr: float = 3e-2,
    steps: int = STEPS,
    evaluate: int = 0,
    save: int = 0,
    of_module: Any = (),
    **settings: Any,
) -> Trained:
    made = module(lr=lr, steps=steps, **dict(of_module))
    if evaluate:
        settings |= {"val_check_interval": PARTS * evaluate, "weights_only": True}
    with listening("lightning.pytorch.utilities.rank_zero", "hdet") as lines:
        trainer = fit(folder, ensemble, made, save=save, **settings)
    assert "log" not in vars(made)
    seen, log, file = trainer.callback.seen, trainer.kept.lines, Path(folder, f"step={save}.ckpt")
    if save and file.exists() and not settings.get("resume"):
        saved = torch.load(file, weights_only=True)["state_dict"]
        seen.saved = torch.cat([p.flatten() for p in saved.values()])
    seen.told, seen.evaluated = lines, seen.evaluated[:1]
    seen.rates = [rates[0] for rates in trainer.callback.groups.values()]
    names = ("loss", "lr-SGD", "validation")
    seen.lines = [[line[key] for key in names if key in line] for line in log]
    seen.lines = [line for line in seen.lines if line]
    seen.metrics = [
        {key: line[key] for key in line if "hdet" in key} for line in log if "hdet/cycle" in line
    ]
    return seen.see([] if trainer.hdet is None else trainer.hdet.ensembles)
