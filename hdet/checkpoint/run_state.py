"""RunState: model, optimizer, Ensemble and what else a run has, as JSON and tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..ensemble import Ensemble
from ..optim.state import REPLICA_KEYS
from ..tensors.dtensor import is_sharded, like
from .inventory import Inventory, optimizer_parameters
from .plain_data import check_extra, encode, take_extra


class RunState:
    """All that a run needs to go on; what `save` writes and `load` takes over.

    Args:
        model: the module, wrapped or not (DDP, FSDP2, torch.compile); of a pipeline this rank's
            stages in one module.
        ensemble: the `Ensemble` that drives its optimizer.
        extra: a dict of what else the run needs, or one object with state_dict and load_state_dict.
            In a dict, such objects (a stateful data loader, a torch.amp.GradScaler) and
            torch.Generators take their state over when it is loaded; plain data and tensors are
            replaced. Each rank has its own. With another number of replicas, replica r gets that
            of replica r modulo the saved number.

    Raises:
        TypeError: another kind of argument.
        ValueError: the optimizer steps a parameter that is not in ``model``; or a value of
            ``extra``, which is named, cannot be saved.

    Example:
        >>> state = checkpoint.RunState(model, ensemble, {"generator": generator, "tokens": 0})
        >>> step = checkpoint.load("run", state, missing=0)
    """

    def __init__(self, model: nn.Module, ensemble: Ensemble, extra: Any = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(ensemble, Ensemble):
            has_one = isinstance(getattr(ensemble, "ensemble", None), Ensemble)
            hint = ": pass its .ensemble" if has_one else ""
            raise TypeError(
                f"ensemble must be an hdet.Ensemble, got {type(ensemble).__name__}{hint}"
            )
        check_extra(extra)
        self.model, self.ensemble, self.extra = model, ensemble, extra
        self.optimizer = ensemble.optimizer
        self.check_outside_use()
        known = {id(p) for p in model.parameters()}
        for i, p in enumerate(optimizer_parameters(self.optimizer)):
            if id(p) not in known:
                raise ValueError(
                    f"parameter {i} of the optimizer is not in model: pass the module that holds "
                    "all of them"
                )

    def check_outside_use(self) -> None:
        self.ensemble._check_outside_use(
            "state_dict", "a checkpoint is of all replicas: call it after"
        )

    @property
    def place(self) -> int:
        """Of this process in the table of replicas, row by row; a later run knows it by that."""
        replicas = self.ensemble.replicas
        if replicas.world_group is None:  # also where replicas share it
            return 0
        return replicas.index * replicas.members + replicas.member

    def parameter_names(self) -> list[str]:
        """Of the optimizer's parameters, in its order."""
        names = Inventory(self.model).name_of
        return [names[id(p)] for p in optimizer_parameters(self.optimizer)]

    def averaged_parameters(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by name, in the order of the average."""
        names = Inventory(self.model).name_of
        own = {id(p) for p in optimizer_parameters(self.optimizer)}
        return {names[id(p)]: p for p in self.ensemble.parameters if id(p) in own}

    def encode(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The state of this rank by part, as JSON, and the live tensors that it names.

        Called after a converge; communicates nothing.

        Raises:
            ValueError: ``extra`` or the optimizer's state holds what cannot be given back.
        """
        self.check_outside_use()
        inventory, tensors = Inventory(self.model), dict[str, torch.Tensor]()
        parts: dict[str, Any] = {"model": inventory.tensors, "modules": inventory.others}
        parts["optimizer"] = self._optimizer_part()
        kept = self.ensemble.weights.average.state()
        if kept:
            params = self.averaged_parameters().items()
            parts["average"] = {n: like(t, p) for (n, p), t in zip(params, kept, strict=True)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of replicas that have parted: these are averaged
            parts["ensemble"] = self.ensemble.state_dict()
        if self.extra is not None:
            parts["extra"] = take_extra(self.extra)
        encoded = {part: encode(value, part, tensors) for part, value in parts.items()}
        for name, tensor in tensors.items():
            if name.startswith("extra") and is_sharded(tensor):
                raise ValueError(
                    f"{name} is a DTensor, and extra is each rank's own: keep its shard"
                )
        return encoded, tensors

    def _optimizer_part(self) -> dict[str, Any]:
        saved, names = self.optimizer.state_dict(), self.parameter_names()
        state, others = {}, {}
        for key, entries in saved["state"].items():
            if type(key) is not int or not 0 <= key < len(names):
                others[key] = entries  # not a parameter's
                continue
            # Further replicas on this device are equal now: one is enough.
            own = {k: v for k, v in entries.items() if v is not None and k not in REPLICA_KEYS}
            if own:
                state[names[key]] = own
        groups = [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]]
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        return {"state": state, "others": others, "groups": groups, "rest": rest}

    def own_buffers(self) -> set[str]:
        """Names of the model's buffers that the Ensemble does not average: each rank's own."""
        averaged = {id(t) for t in self.ensemble.parameters}
        tensors = Inventory(self.model).tensors.items()
        return {n for n, t in tensors if not isinstance(t, nn.Parameter) and id(t) not in averaged}

    def agreeing_names(self, names: Iterable[str]) -> set[str]:
        """Those tensors of `encode` that all replicas hold alike after a converge.

        Each rank's own are some buffers, ``extra``, and under local gradients the optimizer's
        state.
        """
        own, is_shared = self.own_buffers(), self.ensemble.sync.gradients != "local"
        alike = {"model": True, "average": True, "optimizer": is_shared}
        agreeing = {name for name in names if alike.get(name.partition(".")[0], False)}
        return agreeing - {f"model.{name}" for name in own}
