"""RunState: model, optimizer, Ensemble and what else a run has; and the names of all that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from .plain_data import encode

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class RunState:
    """All that a run needs to go on; what `save` writes and `load` takes over.

    Args:
        model: the module, wrapped or not (DDP, FSDP2, torch.compile); of a pipeline this rank's
            stages in one module.
        ensemble: the `Ensemble` that drives its optimizer.
        extra: what else the run needs, by keys. Values with state_dict and load_state_dict (a
            stateful data loader, a torch.amp.GradScaler) and torch.Generators take their state over
            when it is loaded; plain data and tensors are replaced. Each rank has its own. With
            another number of replicas, replica r gets that of replica r modulo the saved number.

    Raises:
        TypeError: ``ensemble`` is no Ensemble, or ``extra`` no dict.
        ValueError: the optimizer steps a parameter that is not in ``model``; or a value of
            ``extra``, which is named, cannot be saved.

    Example::

        extra = {"generator": generator, "tokens": 0}
        state = hdet.checkpoint.RunState(model, ensemble, extra)
        step = hdet.checkpoint.load(folder, state, missing=0)
    """

    def __init__(
        self, model: nn.Module, ensemble: Ensemble, extra: dict[Any, Any] | None = None
    ) -> None:
        if not isinstance(ensemble, Ensemble):
            raise TypeError(
                f"ensemble must be an hdet.Ensemble, got {type(ensemble).__name__}: of a "
                "scheduler of hdet's pass its .ensemble"
            )
        if not (extra is None or isinstance(extra, dict)):
            raise TypeError(
                f"extra must be a dict, got {type(extra).__name__}: put what has a state into one"
            )
        self.model, self.ensemble, self.extra = model, ensemble, extra
        self.optimizer = ensemble.optimizer
        Inventory(self)
        for key, value in (extra or {}).items():
            if state_methods(value) is None:  # a state is not asked for: a loader may start workers
                encode(value, f"extra[{key!r}]", {})


def state_methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """How to take a value's own state and to give it back; None for plain data."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    take, give = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return (take, give) if callable(take) and callable(give) else None


class Inventory:
    """What a run holds at this moment, by names without the parts that wrappers add.

    Attributes:
        tensors: live tensors of the model, each once, under the first of its names.
        modules: extra states of its modules that are no tensors.
        names: by a name in the model's state_dict, that in ``tensors`` or ``modules``.
        tied: by a further name of a tensor, that in ``tensors``.
        groups: names of the optimizer's parameters, by parameter group.
        averaged: the optimizer's parameters by name, in the order of the average.
        own_buffers: names of buffers that the Ensemble does not average: each rank has its own.
    """

    def __init__(self, run: RunState) -> None:
        run.ensemble.check_at_rest("state_dict")
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.tied: dict[str, str] = {}
        name_of: dict[int, str] = {}
        for raw, value in run.model.state_dict(keep_vars=True).items():
            name = clean = _clean_name(run.model, raw)
            if not isinstance(value, torch.Tensor):
                self.modules[name] = value
            else:
                name = name_of.setdefault(id(value), clean)
                self.tensors[name] = value
                if name != clean:
                    self.tied[clean] = name
            self.names[raw] = name
        groups = [[id(p) for p in group["params"]] for group in run.optimizer.param_groups]
        stepped = set(chain(*groups))
        if not name_of.keys() >= stepped:
            raise ValueError(
                "the optimizer has parameters that are not in model: pass the module that holds "
                "all of them"
            )
        self.groups = [[name_of[i] for i in ids] for ids in groups]
        averaged = {id(tensor): tensor for tensor in run.ensemble.parameters}
        self.averaged = {name_of[i]: p for i, p in averaged.items() if i in stepped}
        others = {name: t for name, t in self.tensors.items() if id(t) not in averaged}
        self.own_buffers = {n for n, t in others.items() if not isinstance(t, nn.Parameter)}
        self._shares_moments = run.ensemble.shares_moments

    def is_shared(self, tensor: str) -> bool:
        """Do all replicas hold the stored tensor of that name alike after a converge?"""
        part, _, name = tensor.partition(".")
        if part == "optimizer":
            return self._shares_moments
        return part == "average" or (part == "model" and name not in self.own_buffers)


def _clean_name(model: nn.Module, raw: str) -> str:
    parts, module = [], model
    for part in raw.split("."):
        is_ddp = part == "module" and isinstance(module, nn.parallel.DistributedDataParallel)
        if not (is_ddp or part in _WRAPPERS):
            parts.append(part)
        module = getattr(module, part, None)  # type: ignore[assignment]
    return ".".join(parts)
