"""Whether all ranks are in the same run, and have gradients of the kind that was said: else
averages would be nonsense."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import __version__ as version
from ..converge import digest as digest_of_tensors
from ..core.controller import Controller
from ..core.engine import STATE_VERSION, Engine
from ..replicas import Replicas
from ..replicas.agreement import digest
from ..schedule import Schedule
from ..tensors.dtensor import local_parts

__all__ = ["Agreement"]


@dataclass(eq=False)
class Agreement:
    """Checked once, at the first step, and again after a state was loaded."""

    engine: Engine
    parameters: Sequence[torch.Tensor]
    optimizer: Optimizer
    schedule: Schedule
    replicas: Replicas
    modules: Sequence[nn.Module]
    """They know names of parameters."""
    settings: Mapping[str, object]
    """Further ones by the names that users know; compared by their repr."""
    reached: bool = False
    _values: torch.Tensor | None = None  # of the parameters, before the first step

    def reset(self) -> None:
        """A state was loaded: what other ranks have loaded is not known here."""
        self.reached, self._values = False, None

    def look(self) -> None:
        """Before the first step: after it replicas may differ."""
        if not self.reached and self._values is None and self.replicas.world_group is not None:
            tensors = local_parts(self.parameters)
            self._values = torch.stack(
                [digest_of_tensors([t]).to(tensors[0].device) for t in tensors]
            )

    def check(self, device: torch.device) -> None:
        """One all_gather. Raises on all ranks alike if they differ."""
        self.look()
        scheduler = self.schedule.scheduler
        state = {} if scheduler is None else _comparable(scheduler.state_dict())
        state.pop(
            "lr_lambdas",
            None,
            # somebody's objects, which may know their rank; what they give is compared at each
            # cycle's end
        )
        # Lists are by parameter group, of which a pipeline's stages may have different ones.
        lists = {key: value for key, value in state.items() if isinstance(value, (list, dict))}
        single = (
            _kind(scheduler),
            [(key, value) for key, value in state.items() if key not in lists],
        )
        orders = (
            {}
            if self._values is None
            else {"the order of the parameters (digest of their values)": _in_order(self._values)}
        )
        self.replicas.require_agreement(
            self._common(single), self._by_member(lists), device, orders
        )
        self.reached, self._values = True, None

    def _common(self, scheduler: object) -> dict[str, int]:
        """What must be the same on all ranks, by names that users know."""
        clock, controller = self.engine.clock, self.engine.controller
        return {
            "the version of hdet (digest)": digest(version),
            "the version of the state": STATE_VERSION,
            "seed": self.engine.seed % (1 << 52),
            "every (sync_interval)": clock.sync_interval,
            "warmup_steps": clock.warmup_steps,
            "total_steps": -1 if clock.total_steps is None else clock.total_steps,
            **{name: value for name, value in self.settings.items() if isinstance(value, int)},
            **{
                f"{name} (digest)": digest(value)
                for name, value in self.settings.items()
                if not isinstance(value, int)
            },
            "the knobs (digest)": digest(
                [(knob.name, knob.spread, knob.scale) for knob in self.engine.knobs]
            ),
            "the controller and its settings (digest)": digest(
                None if controller is None else (controller.name, _settings(controller))
            ),
            "the state (digest)": digest(self.engine.state_dict()),
            "the scheduler's class and settings (digest)": digest(scheduler),
        }

    def _by_member(self, of_scheduler: object) -> dict[str, int]:
        """The same, among peers."""
        optimizer = self.optimizer
        # What other libraries' optimizers count in their groups may differ: the first step was
        # taken at rates of its own.
        known = _kind(optimizer).startswith(("torch.optim.", "hdet."))
        groups = [
            {
                key: value
                for key, value in group.items()
                if key not in _OF_THE_MACHINE and (known or key in _USUAL)
            }
            for group in optimizer.param_groups
        ]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        fused = [getattr(optimizer, name, None) for name in _OF_FUSED]
        values = {
            "the parameters' shapes and dtypes": [
                (tuple(p.shape), str(p.dtype)) for p in local_parts(self.parameters)
            ],
            "the names of the parameters": _names(self.parameters, optimizer, self.modules),
            "the scheduled rates": [
                (knob.name, [float(value) for value in knob.scheduled])
                for knob in self.schedule.knobs
            ],
            "the scheduler's settings by parameter group": of_scheduler,
            "the optimizer's class and settings": (
                _kind(optimizer),
                sizes,
                _comparable(groups),
                _comparable(fused),
            ),
        }
        return {f"{name} (digest)": digest(value) for name, value in values.items()}


_OF_THE_MACHINE = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Of a parameter group, what changes nothing in its results; and names, which are compared by
themselves."""
_USUAL = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "nesterov",
    "decoupled_weight_decay",
    "maximize",
)
_OF_FUSED = ("master_weights", "moment_dtype", "stochastic_rounding", "max_grad_norm", "decay_at")
"""Settings that hdet's optimizers do not keep in their groups."""


def _in_order(digests: torch.Tensor) -> tuple[int, int]:
    """(digest of what there is, digest of what there is in this order), of a row for each tensor.

    Reads them from their device.
    """
    rows = [digest(row) for row in digests.tolist()]
    return digest(sorted(rows)), digest(rows)


def _names(
    parameters: Sequence[torch.Tensor], optimizer: Optimizer, modules: Sequence[nn.Module]
) -> list[str | None]:
    """Of parameters and buffers, where a model or the optimizer knows them."""
    known: dict[int, str] = {}
    for group in optimizer.param_groups:
        known.update(
            (id(p), name)
            for p, name in zip(group["params"], group.get("param_names") or (), strict=False)
        )
    for module in modules:
        known.update(
            (id(tensor), name)
            for named in (module.named_parameters(), module.named_buffers())
            for name, tensor in named
        )
    return [known.get(id(p)) for p in parameters]


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _comparable(value: Any) -> Any:
    """Plain data; of everything else the class, because a repr may hold an address."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {
            str(key): _comparable(item)
            for key, item in sorted(value.items(), key=lambda item: str(item[0]))
        }
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return (
        value
        if isinstance(value, (bool, int, float, str, type(None), torch.dtype))
        else _kind(value)
    )


def check_gradients(
    replicas: Replicas, norm: torch.Tensor | None, gradients: str, device: torch.device
) -> None:
    """Raises ValueError if gradients are to be shared, and differ; warns if they are to be local,
    and are the same on all replicas. ``norm``: of this rank's in the first step; None: it has left
    that out, and nothing is said, nor of norms that are not finite or 0. One all_reduce,
    unless this process is alone."""
    if replicas.world_group is None:
        return
    square = (
        torch.full((1,), math.nan, dtype=torch.float64) if norm is None else norm.reshape(1) ** 2
    )
    norms = [math.sqrt(x) for x in replicas.sum_rows(square.to(device)).flatten().tolist()]
    if len(norms) < 2 or not all(math.isfinite(x) and x > 0 for x in norms):
        return
    if gradients == "shared" and max(norms) > 1.001 * min(norms):
        listed = ", ".join(f"{x:.6g}" for x in norms[:8])
        raise ValueError(
            "gradients='shared', but the first step's gradients differ between replicas (norms "
            f"{listed}): wrap the model in "
            "DistributedDataParallel or all-reduce them, or pass gradients='local'"
        )
    if gradients == "local" and len(set(norms)) == 1:
        warnings.warn(
            "gradients='local', but the first step's gradients are the same on all replicas: under "
            "DistributedDataParallel run the "
            "backward pass inside no_sync(), and give each replica batches of its own",
            stacklevel=4,
        )


def _settings(controller: Any) -> list[tuple[str, Any]]:
    """The plain attributes of a controller and of its rule; what it keeps for itself may depend on
    the step, which scalers skip rank by rank."""
    plain = [
        (name, value)
        for name, value in sorted(vars(controller).items())
        if not name.startswith("_") and (is_dataclass(value) or _is_plain(value))
    ]
    parts = [
        value for name, value in sorted(vars(controller).items()) if isinstance(value, Controller)
    ]
    return plain + [setting for part in parts for setting in _settings(part)]


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str, type(None))) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )
