"""Runs of Lightning's Trainer, small ones, with what is to be seen of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hdet

from .frameworks import PARTS, STEPS, needs, weights

needs("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor

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
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1 - step / self.steps
            )
        elif self.schedule == "constant":
            return optimizer
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return [optimizer], [
            {"scheduler": scheduler, "interval": "epoch" if self.schedule == "epoch" else "step"}
        ]


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
        for optimizer, scheduler in list(zip(optimizers, schedulers, strict=True))[
            : 1 + batch_idx % 2
        ]:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.SGD(net.parameters(), lr=lr)
            for net, lr in zip(self.nets, (3e-2, 1e-2), strict=True)
        ]
        return optimizers, [
            torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7) for optimizer in optimizers
        ]


class Seen(pl.Callback):
    """Weights and rates, by step, before anybody converges; weights that are validated."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.later: dict[int, torch.Tensor] = {}
        self.rates: dict[int, float] = {}
        self.validated: list[torch.Tensor] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.rates[trainer.global_step + 1] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self.weights.setdefault(trainer.global_step, weights(pl_module))
        self.later[trainer.global_step] = weights(
            pl_module
        )  # the first micro-batch of the next step

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
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=size
    )


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
    """``ensemble``: None without the callback; ``stop``: after so many steps. Adds what was seen
    to the trainer."""
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    module = Net() if module is None else module
    steps = getattr(module, "steps", STEPS)
    settings = {"strategy": "ddp" if world > 1 else "auto", **settings}
    if module.automatic_optimization:
        settings = {"accumulate_grad_batches": PARTS, "gradient_clip_val": 0.5, **settings}
    callback = None if ensemble is None else make(**ensemble)
    seen, kept = Seen(), Kept()
    callbacks = [
        *before,
        seen,
        *([callback] if callback else []),
        LearningRateMonitor("step"),
        *([saves] if saves else []),
        Stop(stop),
    ]
    settings = {"max_steps": steps, **settings}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        callbacks=callbacks,
        logger=kept,
        default_root_dir=folder,
        enable_checkpointing=saves is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    torch.manual_seed(1)
    trainer.fit(module, loader(0, steps, world, size), loader(1, 1, world), ckpt_path=resume)
    trainer.seen, trainer.kept, trainer.hdet = seen, kept, callback
    return trainer


def numbered(base: Any) -> Any:
    """Trains on the batch of its number: in the middle of an epoch Lightning goes on with the first
    ones of a loader without a state."""

    class Numbered(base):  # type: ignore[misc]
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            x = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank)
            )
            loss: torch.Tensor = super().training_step((x, x.sum(1, keepdim=True)), batch_idx)
            return loss

    module = Numbered()
    if base is Net:
        module.net[2] = nn.Identity()  # random states are nobody's business in Lightning
    return module
