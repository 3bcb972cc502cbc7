"""Whether all ranks are in the same run, and have gradients of the kind that was said: else
averages would be nonsense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import __version__ as version
from ..converge import digest as digest_of_tensors
from ..core.controller import Controller
from ..core.validate import warn
from ..optim.schedule_free import COUNTED
from ..optim.snapshot import inner_optimizer
from ..replicas.agreement import compare, digest
from ..tensors.dtensor import local_parts
from ..trial.auto import AutoLR
from .mistakes import refuse_join
from .setup import Setup

__all__ = ["Agreement"]

_OF_SYNC = ("every", "converge", "gradients", "moments", "begin", "bucket_bytes")
_OF_THE_MACHINE = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Of a parameter group, what changes nothing in its results, or is compared by itself."""
_USUAL = (
    "lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "decoupled_weight_decay",
    "maximize",
)  # fmt: skip
_MAY_DIFFER = ("seed", "backend")
"""Of the arguments of hdet's optimizers: how a step rounds, and what computes it."""
_NUMBER_OR_TEXT = (int, float, str, type(None))


class Agreement:
    """A plain description of the run, compared entry by entry at the first step, and again after a
    state was loaded."""

    def __init__(self, run: Setup) -> None:
        self._run, self._models = run, run.models
        self.reached = False
        self.gradients = run.sync.gradients
        """What they are to be."""
        self._are_changed = any(knob.meaning.on_gradients for knob in run.knobs)  # by knobs
        self.knows_gradients = self._are_changed
        """Is their kind known?"""
        self._device = local_parts(run.tensors[:1])[0].device
        self._values: torch.Tensor | None = None  # of the parameters, before the first step

    def reset(self) -> None:
        """A state was loaded: what other ranks have loaded is not known here."""
        self.reached, self._values = False, None

    def expect(self, gradients: str) -> bool:
        """From the next step on. True if this is another kind, which that step then checks."""
        is_other = gradients != self.gradients
        if is_other:
            self.gradients, self.knows_gradients = gradients, self._are_changed
        return is_other

    def look(self) -> None:
        """Before the first step: after it replicas may differ."""
        if not self.reached and self._values is None and self._run.replicas.world_group is not None:
            tensors = local_parts(self._run.tensors)
            self._values = torch.stack(
                [digest_of_tensors([t]).to(tensors[0].device) for t in tensors]
            )

    def check(self) -> None:
        """Raises `ReplicaDisagreement` on all ranks alike if they differ, ValueError inside of
        DDP's join()."""
        group, member = self._run.replicas.world_group, self._run.replicas.member
        if group is not None:
            refuse_join(self._run.trained)
            self.look()
            assert self._values is not None
            rows = [digest(row) for row in self._values.tolist()]
            entries = {
                **{name: ((), value) for name, value in _plain(self._of_everyone()).items()},
                **{name: (member, value) for name, value in _plain(self._of_peers()).items()},
                # initial values may differ: only the same ones in another order are a mistake
                "the order of the parameters": ((member, sorted(rows)), digest(rows)),
            }
            compare(entries, group, self._device)
        self.reached, self._values = True, None

    def check_gradients(self, norm: torch.Tensor | None) -> None:
        """Raises ValueError if gradients are to be shared, and differ; warns if they are to be
        local, and are the same on all replicas. ``norm``: of this rank's in the first step;
        None: it has left that out, and nothing is said, nor of norms that are not finite or 0. One
        all_reduce, unless this process is alone."""
        replicas, gradients = self._run.replicas, self.gradients
        if replicas.world_group is None:
            return
        norm = torch.tensor(math.nan, dtype=torch.float64) if norm is None else norm
        square = norm.reshape(1).to(self._device) ** 2
        rows = replicas.sum_rows(square, purpose="the first step's gradients")
        norms = [math.sqrt(x) for x in rows.flatten().tolist()]
        if len(norms) < 2 or not all(math.isfinite(x) and x > 0 for x in norms):
            return
        kind = "gradients='shared'"
        if self._run.sync.begin:
            kind = "gradients are shared until begin, without no_sync()"
        if gradients == "shared" and max(norms) > 1.001 * min(norms):
            listed = ", ".join(f"{x:.6g}" for x in norms[:8])
            raise ValueError(
                f"{kind}, but the first step's gradients differ between replicas (norms "
                f"{listed}): wrap the model in "
                "DistributedDataParallel or all-reduce them, or pass gradients='local'"
            )
        if gradients == "local" and len(set(norms)) == 1:
            warn(
                "gradients='local', but the first step's gradients are the same on all replicas: "
                "under DistributedDataParallel run the backward pass inside no_sync(), and give "
                "each replica batches of its own"
            )

    def _of_everyone(self) -> dict[str, Any]:
        """What must be the same on all ranks, by names that users know."""
        engine = self._run.engine
        clock = engine.clock
        return {
            "the version of hdet": version,
            "the ranks of the replicas": self._run.replicas.ranks,
            "seed": engine.seed,
            "design": engine.design,
            "warmup_steps": clock.warmup_steps,
            "total_steps": clock.total_steps,
            "sync": {name: getattr(self._run.sync, name) for name in _OF_SYNC},
            "divergence": self._run.divergence,
            "knobs": {knob.name: knob for knob in engine.knobs},
            "search": self._of_search(),
            "controller": engine.controller,
            "state": {**engine.state_dict(), "is_searching": None},  # follows from the search's
            "corrections": self._run.schedule.corrections(),
            "scheduler": self._of_scheduler(of_groups=False),
            "whether its peak is known": not self._run.schedule.doubt,
        }

    def _of_search(self) -> dict[str, Any] | None:
        """Its arguments, but of functions and objects whether they are given."""
        search = self._run.search
        if search is None:
            return None
        given = {name: getattr(search, name) for name in signature(AutoLR).parameters}
        given["scaler"] = search.scaler_in_use
        del given["on_restart"]  # averages of weights may be kept by one rank alone
        return {
            name: value if isinstance(value, _NUMBER_OR_TEXT) else "given"
            for name, value in given.items()
        } | {
            "name": search.name,
            "is_searching": self._run.engine.is_searching,
            "what it has measured": search.state_dict(),
        }

    def _of_peers(self) -> dict[str, Any]:
        """What must be the same on ranks that hold the same part of the model."""
        optimizer = self._run.optimizer
        # What other libraries' optimizers count in their groups may differ: the first step was
        # taken at rates of its own.
        known = _kind(optimizer).startswith(("torch.optim.", "hdet."))
        groups = [
            {
                "number of parameters": len(group["params"]),
                **{
                    key: value
                    for key, value in group.items()
                    # a scaler may have skipped the first step of a schedule-free one on some ranks
                    if key not in (*_OF_THE_MACHINE, *COUNTED) and (known or key in _USUAL)
                },
            }
            for group in optimizer.param_groups
        ]
        names = _names(optimizer, self._models)
        return {
            "parameters": [
                {"name": names.get(id(p)), "shape": part.shape, "dtype": part.dtype}
                for p, part in zip(self._run.tensors, local_parts(self._run.tensors), strict=True)
            ],
            "scheduled values": {
                knob.name: [float(value) for value in knob.scheduled]
                for knob in self._run.schedule.knobs
            },
            "scheduler of the parameter groups": self._of_scheduler(of_groups=True),
            "optimizer": {
                "class": _kind(optimizer),
                "groups": groups,
                **_outside_of_groups(optimizer),
            },
        }

    def _of_scheduler(self, of_groups: bool) -> dict[str, Any]:
        """Its class and settings; or its lists, which are by parameter group, of which the stages
        of a pipeline may have different ones."""
        scheduler = self._run.schedule.scheduler
        state = {} if scheduler is None else scheduler.state_dict()
        of_kind = {
            key: value
            for key, value in state.items()
            if isinstance(value, (list, tuple, Mapping)) is of_groups
            # Somebody's objects, which may know their rank. What they give is compared each cycle.
            and key != "lr_lambdas"
        }
        return of_kind if of_groups else {"class": _kind(scheduler), **of_kind}


def _names(optimizer: Optimizer, modules: Sequence[nn.Module]) -> dict[int, str]:
    """Of parameters and buffers, by id, where a model or the optimizer knows them."""
    known: dict[int, str] = {}
    for group in optimizer.param_groups:
        names = group.get("param_names") or ()
        known.update((id(p), name) for p, name in zip(group["params"], names, strict=False))
    for module in modules:
        for named in (module.named_parameters(), module.named_buffers()):
            known.update((id(tensor), name) for name, tensor in named)
    return known


def _outside_of_groups(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments of an optimizer of hdet's, whatever they are, that it keeps as attributes."""
    inner = inner_optimizer(optimizer)
    names = [
        name
        for kind in type(inner).__mro__
        if kind.__module__.startswith("hdet.optim.")  # and not what somebody makes of it
        for name in signature(kind).parameters
    ]
    return {
        name: getattr(inner, name)
        for name in names
        if hasattr(inner, name) and name not in _MAY_DIFFER
    }


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _plain(value: Any) -> Any:
    """Nested dicts and lists of numbers and text; of everything else the class, because a repr may
    hold an address. Of a controller the settings, and those of controllers in it: what it keeps for
    itself may depend on the step, which scalers skip rank by rank."""
    if isinstance(value, Controller):
        kinds = (*_NUMBER_OR_TEXT, tuple)
        own = {
            name: held
            for name, held in vars(value).items()
            if isinstance(held, Controller)
            or (name[0] != "_" and (is_dataclass(held) or isinstance(held, kinds)))
        }
        return _plain({"name": value.name, **own})
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if is_dataclass(value):
        settings = {field.name: getattr(value, field.name) for field in fields(value)}
        return _plain({"class": _kind(value), **settings})
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (key != "class", str(key)))
        return {str(key): _plain(value[key]) for key in keys}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return value if isinstance(value, _NUMBER_OR_TEXT) else _kind(value)
