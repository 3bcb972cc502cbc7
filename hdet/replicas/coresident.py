"""Several replicas of one model on one device: K sets of parameters, one gradient, one set of
moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.validate import whole
from ..tensors.buffers import tensors_in
from . import Replicas
from .rerun import RerunCheck


class CoresidentReplicas(Replicas):
    """``num_replicas`` replicas of an unmodified model in this process, for people with one GPU or
    none: micro-batch k of a gradient-accumulation step runs at the weights of replica k, and one
    fused step moves all of them, each at its own rate::

        optimizer = hdet.FusedAdamW(model.parameters(), lr=3e-4)
        replicas = hdet.CoresidentReplicas(model, num_replicas=4)
        ensemble = hdet.Ensemble(optimizer, scheduler, replicas=replicas)
        for batches in loader:  # four micro-batches
            for k, batch in enumerate(batches):
                with replicas.use(k):
                    loss = loss_fn(model, batch)
                    ensemble.observe(loss)
                    (loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step()

    Replica 0 is the model itself: its parameters, names, state_dict and what `use` leaves behind.
    Replica k > 0 has parameters of its own, which `use` puts into the modules without copying.
    The gradients of all are added up in the ``.grad`` of the model's own parameters. Memory: K sets
    of parameters, one gradient, one set of moments.

    - Until the first optimizer step all replicas follow the model: weights loaded or initialised
      outside of `use` are everyone's.
    - Frozen parameters, those that the optimizer does not have, and buffers are shared.
    - ``backward`` belongs inside of the same `use`, because activation checkpointing runs modules
      again with the weights that are in place then; elsewhere that is a ValueError. A reentrant
      checkpoint of the first layers does not know its replica: pass ``use_reentrant=False``.
    - Clip, scale and zero gradients outside of `use`. Move or cast the model before.
    - The optimizer's state holds the other replicas; load it after the Ensemble is made. A state
      without them makes all equal to the model.

    Args:
        model: a module on its device, not wrapped for data parallelism; what is to be frozen is
            frozen before.
        num_replicas: K >= 2.

    Raises:
        TypeError, ValueError: anything else, by name: DDP and FSDP, DTensors, gradient hooks on
            parameters, and modules that keep a parameter in a plain attribute, which `use` could
            not reach.
    """

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        whole(num_replicas, "num_replicas", 2, why="one replica is the model itself")
        _check_model(model)
        self.model, self.count, self.index = model, num_replicas, 0
        # Every place of a parameter: a tied one has several.
        self._places = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._frozen = {p: name for name, p in model.named_parameters() if not p.requires_grad}
        self._sets = {
            p: [p, *(_leaf(p) for _ in range(1, num_replicas))]
            for p in model.parameters()
            if p.requires_grad
        }
        self._following = True  # the other replicas are to be copies of the model
        self._marks = self._versions()
        self._hooks: list[RemovableHandle] = []  # on the optimizer; `_watch` puts some on modules
        self._watch()

    def __repr__(self) -> str:
        return f"CoresidentReplicas({type(self.model).__name__}, num_replicas={self.count})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "CoresidentReplicas cannot be copied or pickled: make new ones of the copied model, "
            "and load the optimizer's state, which holds the other replicas"
        )

    @contextmanager
    def use(self, replica: int) -> Iterator[None]:
        """Inside, the model runs at the weights of ``replica`` (0 .. K - 1). May be nested; the
        innermost counts.

        Raises:
            ValueError: there is no such replica; a parameter that was frozen no longer is; or
                the model was moved or cast.
        """
        self._check_number(replica)
        self._check_unchanged()
        if not self.in_use:
            self.write_back()
        before = self.index, self.in_use
        self.in_use = True
        self._put(replica)
        try:
            yield
        finally:
            index, self.in_use = before
            self._put(index)
            # What was written in here was meant for this replica alone.
            self._marks = self._versions()

    def _put(self, replica: int) -> None:
        if replica == self.index:
            return
        for parameters, name, main in self._places:
            own = self._sets[main][replica]
            if own.requires_grad is not main.requires_grad:  # frozen since
                own.requires_grad_(main.requires_grad)
            parameters[name] = own
        self.index = replica

    def _watch(self) -> None:
        """Modules with parameters that replicas have of their own are looked at when they run."""
        apart = [copies for copies in self._sets.values() if copies[1] is not copies[0]]
        check = RerunCheck(self, {id(own): k for copies in apart for k, own in enumerate(copies)})
        self._checks = [
            module.register_forward_pre_hook(check)
            for module in self.model.modules()
            if any(p in self._sets for p in module.parameters())
        ]

    # -- before the first step ---------------------------------------------------------------------

    def _versions(self) -> list[int]:
        return [main._version for main in self._sets] if self._following else []

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the model's weights to the other replicas if somebody has written them since."""
        if self._following and self._versions() != self._marks:
            for main, *others in self._sets.values():
                for other in others:
                    other.copy_(main)
            self._marks = self._versions()

    def _part(self, *_: Any) -> None:
        """The optimizer is about to step: from now on replicas differ."""
        if self.in_use:
            raise ValueError(
                "optimizer.step() was called inside `with replicas.use(k):`; it steps all "
                "replicas, call it after"
            )
        self.write_back()
        self._following = False

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._parted_state = any("replica_params" in values for values in state["state"].values())

    def _loaded(self, optimizer: Optimizer) -> None:
        """A state that holds the other replicas has brought their weights; one that does not makes
        them equal to the model."""
        self._following = not self._parted_state
        self._marks = []

    # -- what an Ensemble asks ---------------------------------------------------------------------

    @property
    def local(self) -> Sequence[int]:
        return range(self.count)

    def slot(self, replica: int | None) -> int:
        if replica is not None:
            self._check_number(replica)
            return replica
        if not self.in_use:
            raise ValueError(
                "which replica's loss is this? Call observe(loss) inside `with replicas.use(k):`, "
                "or observe(loss, replica=k)"
            )
        return self.index

    def sets(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The same parameters of each replica; what is shared (buffers, frozen ones) stands in all
        lists."""
        return [[self._copies(tensor)[k] for tensor in tensors] for k in self.local]

    def sum_rows(self, *rows: torch.Tensor, purpose: str) -> torch.Tensor:
        """K rows -> (K, width); nobody else is to be asked."""
        return torch.stack(rows)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises TypeError for an optimizer without fused steps of several replicas, ValueError for
        parameters of another model."""
        if not callable(getattr(optimizer, "set_replicas", None)):
            kind = type(optimizer)
            raise TypeError(
                f"optimizer is a {kind.__module__}.{kind.__qualname__}, which steps one set of "
                "parameters: co-resident replicas need one of hdet's fused optimizers, such as "
                "hdet.FusedAdamW"
            )
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in self._sets and parameter not in self._frozen:
                    raise ValueError(
                        f"parameter {i} of group {g} is not in the model given to "
                        "CoresidentReplicas: pass the module that holds all of them"
                    )

    def attach(self, optimizer: Any) -> None:
        """Let ``optimizer`` step all replicas; an `Ensemble` does this.

        Raises as `check_optimizer`.
        """
        self.check_optimizer(optimizer)
        self.detach()
        self._share(optimizer)
        self.write_back()
        optimizer.set_replicas(self.count, self._copies)
        self._hooks = [
            optimizer.register_step_pre_hook(self._part),
            optimizer.register_state_dict_pre_hook(lambda _: self.write_back()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def _share(self, optimizer: Any) -> None:
        """What this optimizer does not step would stay behind in the other replicas, whoever else
        steps it."""
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        for main, copies in self._sets.items():
            if main not in stepped:
                copies[1:] = [main] * (self.count - 1)
            elif copies[1] is main:  # shared under another optimizer
                copies[1:] = [_leaf(main) for _ in copies[1:]]
        self._watch()

    def detach(self) -> None:
        """Takes the hooks off the optimizer, which goes on stepping all replicas, and off the
        modules."""
        for hook in (*self._hooks, *self._checks):
            hook.remove()
        self._hooks, self._checks = [], []

    def _copies(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        return self._sets.get(parameter) or [parameter] * self.count  # type: ignore[call-overload]

    def _check_number(self, replica: Any) -> None:
        if type(replica) is not int or not 0 <= replica < self.count:
            raise ValueError(f"replica must be one of 0 .. {self.count - 1}, got {replica!r}")

    def _check_unchanged(self) -> None:
        for parameter, name in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when CoresidentReplicas was made, so all "
                    "replicas share it: unfreeze it before"
                )
        main, *others = next(iter(self._sets.values()))
        if (main.dtype, main.device) != (others[0].dtype, others[0].device):
            raise ValueError(
                f"the model is {main.dtype} on {main.device} now, the other replicas are "
                f"{others[0].dtype} on {others[0].device}: move and cast the model before "
                "CoresidentReplicas(model) is made"
            )


def _leaf(main: nn.Parameter) -> nn.Parameter:
    """A parameter of another replica: a copy whose gradients go to ``main``."""
    leaf: nn.Parameter = copy.deepcopy(main)
    leaf.__dict__.update(vars(main))  # marks that libraries leave on parameters
    leaf.grad = None

    @torch.no_grad()
    def hand_over(leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if main.grad is None:
            main.grad = gradient
        elif gradient is not None:
            main.grad.add_(gradient)

    leaf.register_post_accumulate_grad_hook(hand_over)
    return leaf


# -- what is refused -------------------------------------------------------------------------------

# By name: torch's sharding is slow to import.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    owned = {id(p) for p in model.parameters() if p.requires_grad}
    if not owned:
        raise ValueError(
            f"model {type(model).__name__} has no parameter that is trained: unfreeze what "
            "replicas are to explore before"
        )
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else f"model {type(model).__name__}"
        if {kind.__name__ for kind in type(module).__mro__} & _WRAPPERS:
            raise ValueError(
                f"{what} is wrapped in {type(module).__name__}: co-resident replicas are one "
                "process's, pass the bare model"
            )
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_flat_weights") and any(
                id(tensor) in owned for tensor in tensors_in(value)
            ):
                raise ValueError(
                    f"{what} keeps a parameter in the plain attribute {attribute!r}, where "
                    "replicas cannot exchange it: look it up by its registered name in forward"
                )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"parameter {name!r} is a DTensor: co-resident replicas are one process's, pass a "
                "model that is not sharded"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has gradient hooks, which the other replicas' gradients would "
                "pass by: remove them"
            )
