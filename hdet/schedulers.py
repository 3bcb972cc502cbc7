"""OneCycleAutoLR: torch's OneCycleLR with replicas, as a drop-in for it and for the published class
of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from .controllers.softmax import SoftmaxController
from .converge.sync import Sync
from .core.controller import Controller
from .core.schema import ANYTHING, MAPPING, read
from .core.spread import check_spread
from .core.validate import whole
from .ensemble import Ensemble
from .knobs import LearningRate
from .knobs.cells import content, put
from .optim.snapshot import is_schedule_free
from .replicas import Replicas
from .schedule import plain
from .trial.auto import AutoLR

__all__ = ["OneCycleAutoLR"]


PUBLISHED_WARMUP = 100_000


class OneCycleAutoLR(OneCycleLR):
    """OneCycleLR whose peak is a starting point: replicas train at a spread of rates, and their
    losses correct it.

    The first arguments are torch's, the next the published ones, the rest ours:

    Args:
        auto_lr_warmup_steps: S_warm, steps before the controller may act. A search acts in the
            first steps: with it the published default counts as 0.
        ensemble_lr_spread_ratio: alpha in [0, 1). 0 is torch's OneCycleLR under DDP, bitwise.
        model_sync_interval: T, optimizer steps between averages of the replicas.
        rank, world_size: accepted for compatibility; must agree with the process group or with
            ``replicas`` (co-resident: 0 and 1).
        enable_auto_lr: use the paper's softmax controller on one knob per parameter group;
            ``auto_lr_warmup_steps`` must be below the run's length. Off: spread and averages still
            run.
        loss_scale, lr_of_lr, momentum_of_lr: sigma, lambda and beta of that controller.
        replicas: who takes part; default the world if torch.distributed is initialised; or a
            `CoresidentReplicas`.
        search: as in `Ensemble`. With it, or another controller than the published one, all
            parameter groups are one knob.
        controller: another controller; it is used whether or not ``enable_auto_lr`` is set.
        sync: as in `Ensemble`, but for ``every``, which is ``model_sync_interval``.
        settings: further ones of the `Ensemble`: divergence, seed, log, design.

    ``scheduler.ensemble`` is the `Ensemble`: observe micro-batches, converge and close by it.
    Corrections multiply the OneCycle schedule: with neutral losses the rates are OneCycleLR's own,
    bitwise. Between steps ``param_groups`` and ``get_last_lr()`` hold the corrected base rate,
    never a multiplied one.

    Example::

        scheduler = hdet.OneCycleAutoLR(
            optimizer, max_lr=1e-3, total_steps=2000, search=hdet.AutoLR(model)
        )
        loss_fn(model, batches[0]).backward()
        optimizer.step()
        scheduler.step(closure=lambda: losses_of(model, batches[0]))
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        auto_lr_warmup_steps: int = PUBLISHED_WARMUP,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        rank: int | None = None,
        world_size: int | None = None,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.1,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        *,
        replicas: Replicas | None = None,
        search: AutoLR | None = None,
        controller: Controller | None = None,
        sync: Sync | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
        if "knobs" in settings:
            raise TypeError(
                "OneCycleAutoLR has one knob, the learning rate: for others, and for values that "
                "you give, use hdet.Ensemble(optimizer, OneCycleLR(optimizer, ...), knobs=[...])"
            )
        if is_schedule_free(optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, whose rate takes no schedule: use "
                "hdet.Ensemble(optimizer, total_steps=..., search=hdet.AutoLR(model))"
            )
        with _unchanged_on_error(optimizer):
            check_spread(ensemble_lr_spread_ratio, "ensemble_lr_spread_ratio")
            whole(model_sync_interval, "model_sync_interval", of="steps")
            whole(auto_lr_warmup_steps, "auto_lr_warmup_steps", 0, of="steps")
            if min(max_lr if isinstance(max_lr, (list, tuple)) else [max_lr]) <= 0:
                raise ValueError(f"max_lr must be above 0, got {max_lr!r}")
            replicas = _resolve_replicas(replicas, rank, world_size)
            if controller is None and enable_auto_lr:
                controller = SoftmaxController(loss_scale, lr_of_lr, momentum_of_lr, decay=None)
            strategy: Any = anneal_strategy
            super().__init__(
                optimizer, max_lr, total_steps, epochs, steps_per_epoch, pct_start,
                strategy, cycle_momentum, base_momentum, max_momentum,
                div_factor, final_div_factor, three_phase, last_epoch,
            )  # fmt: skip
            is_published = search is None and _is_published(controller)
            groups = "each" if len(optimizer.param_groups) > 1 and is_published else None
            if search is not None and auto_lr_warmup_steps == PUBLISHED_WARMUP:
                auto_lr_warmup_steps = 0
            elif search is not None and auto_lr_warmup_steps:
                raise ValueError(
                    "AutoLR searches in the first steps: leave out "
                    f"auto_lr_warmup_steps={auto_lr_warmup_steps!r}"
                )
            self.ensemble = Ensemble(
                optimizer,
                _TorchPart(self),
                knobs=[LearningRate(ensemble_lr_spread_ratio, groups=groups)],
                replicas=replicas,
                sync=dataclasses.replace(sync or Sync(), every=model_sync_interval),
                warmup_steps=auto_lr_warmup_steps,
                search=search,
                controller=controller,
                **{"design": "permutation", **settings},  # as published
            )
            if search is None and controller is None:
                self.ensemble._records.tell_note(
                    "OneCycleAutoLR: enable_auto_lr is False, and there is no controller: nothing "
                    "moves the schedule"
                )

    def step(
        self, loss: torch.Tensor | float | None = None, closure: Callable[[], Any] | None = None
    ) -> None:
        """After optimizer.step().

        ``closure`` is for an `AutoLR`. Without a loss the controller learns nothing.

        Raises:
            ValueError: past total_steps, torch's own error.
        """
        if "ensemble" not in self.__dict__ or getattr(self, "_is_initial", False):
            super().step()  # torch's constructors take one step to set the first values
            return
        self.ensemble.step(loss, closure)
        self._take_last_lr()

    def _take_last_lr(self) -> None:
        rates = (group["lr"] for group in self.optimizer.param_groups)
        self._last_lr = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in rates]

    def state_dict(self) -> dict[str, Any]:
        """Torch's fields and, under ``"ensemble"``, ours: plain data, no communication, the same on
        every rank."""
        own = {**self.ensemble.state_dict(), "scheduler": {}}  # that part is beside it
        return {**self._torch_state(), "ensemble": own}

    def _torch_state(self) -> dict[str, Any]:
        state = super().state_dict()
        state.pop("ensemble", None)
        return plain(state)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a run; N may differ.

        Raises:
            ValueError: the state is not one of this class, is of another version or damaged;
                nothing is changed then.
        """
        checks = {"ensemble": MAPPING, "last_epoch": ANYTHING}
        own = read(state_dict, checks, "the scheduler's state")["ensemble"]
        torchs = {key: value for key, value in state_dict.items() if key != "ensemble"}
        self.ensemble.load_state_dict({**own, "scheduler": torchs})
        self._take_last_lr()


def _is_published(controller: Controller | None) -> bool:
    """Is every parameter group a knob? What compares replicas more closely could not tell so many
    apart."""
    parts = controller.parts.values() if isinstance(controller, Controller) else ()
    return controller is None or any(isinstance(x, SoftmaxController) for x in (controller, *parts))


class _TorchPart:
    """The OneCycleLR inside a OneCycleAutoLR, as the Ensemble's scheduler."""

    def __init__(self, owner: OneCycleAutoLR) -> None:
        self.owner, self.total_steps = owner, owner.total_steps

    @property
    def last_epoch(self) -> int:
        return self.owner.last_epoch

    def step(self) -> None:
        OneCycleLR.step(self.owner)

    def state_dict(self) -> dict[str, Any]:
        return self.owner._torch_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        OneCycleLR.load_state_dict(self.owner, state)


@contextmanager
def _unchanged_on_error(optimizer: Optimizer) -> Iterator[None]:
    """torch's constructor writes into the optimizer before everything is validated: take that back
    if something is refused."""
    before = [
        {key: (value, content(value)) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    step = {"step": optimizer.__dict__["step"]} if "step" in optimizer.__dict__ else {}
    try:
        yield
    except BaseException:
        for group, entries in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update({key: put(value, then) for key, (value, then) in entries.items()})
        optimizer.__dict__.pop("step", None)
        optimizer.__dict__.update(step)
        raise


def _resolve_replicas(
    replicas: Replicas | None, rank: int | None, world_size: int | None
) -> Replicas:
    """Raises ValueError if the published arguments contradict what is really there."""
    replicas = Replicas.default() if replicas is None else replicas
    each = len(replicas.local)  # replicas in a process
    has_group = dist.is_available() and dist.is_initialized()
    where = "the process group" if has_group else "without torch.distributed.init_process_group it"
    found = (replicas.local[0] // each, replicas.count // each)
    for name, given, actual in zip(("rank", "world_size"), (rank, world_size), found, strict=True):
        if given not in (None, actual):
            raise ValueError(
                f"{name} is {given}, but {where} is {actual}: leave it out, or initialise the "
                "process group before the scheduler is built"
            )
    return replicas
