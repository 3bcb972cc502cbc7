"""Several replicas of one model on one device: K sets of parameters, one gradient, one set of
moments."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import Replicas


class CoresidentReplicas(Replicas):
    """``num_replicas`` replicas of an unmodified model in this process, for people with one GPU or
    none.

    Micro-batch k of a gradient-accumulation step runs at the weights of replica k; one fused step
    moves all of them, each at its own rate, and an `Ensemble` averages and controls them as it does
    across processes::

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
    Replica k > 0 has parameters of its own, which `use` puts into the modules without copying, tied
    ones wherever they occur. The gradients of all replicas are added up in the ``.grad`` of the
    model's own parameters, so clipping, scaling and `zero_grad` are those of plain gradient
    accumulation. Memory: K sets of parameters, one gradient, one set of moments. Compiled models
    are not compiled again.

    - Until the first optimizer step all replicas follow the model: weights loaded or initialised
      outside of `use` are everyone's.
    - Frozen parameters and buffers are shared. Running statistics (BatchNorm) are updated by every
      micro-batch, K times a step.
    - ``backward`` belongs inside of the same `use`: activation checkpointing (or whatever else runs
      modules in a backward pass) runs them with the weights that are in place then. Elsewhere that
      is a ValueError, as soon as a module with parameters of its own is called; where nothing runs
      again, gradients are right wherever ``backward`` is. (A reentrant checkpoint of the first
      layers does not know its replica: inside of another replica's `use` nothing is raised, and
      gradients are wrong. Pass ``use_reentrant=False``.)
    - Trained parameters that the optimizer given to the Ensemble does not have are shared, like
      frozen ones.
    - Clip, scale and zero gradients outside of `use`: inside, ``model.parameters()`` of replica k >
      0 have none of their own.
    - Move or cast the model before: the other replicas' parameters do not follow `model.to()`
      (refused by name).
    - The optimizer must be one of hdet's fused ones. Its state holds the other replicas, so a
      checkpoint of model and optimizer has all of them; load it after the Ensemble is made. A state
      without other replicas makes all of them equal to the model.

    Args:
        model: a module on its device, not wrapped for data parallelism; what is to be frozen is
            frozen before.
        num_replicas: K >= 2.

    Raises:
        TypeError, ValueError: anything else, by name: DDP and FSDP, DTensors, scripted modules,
            uninitialised parameters, gradient hooks on parameters, and modules that keep a
            parameter in a plain attribute, which `use` could not reach.
    """

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        if not isinstance(num_replicas, int) or isinstance(num_replicas, bool) or num_replicas < 2:
            raise ValueError(
                f"num_replicas must be a whole number >= 2, got {num_replicas!r}: one replica is "
                "the model itself"
            )
        _check_model(model)
        self.model, self.count, self.index = model, num_replicas, 0
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, name in names.items():
            _check_parameter(parameter, name)
        # Every place of a parameter: a tied one has several.
        self._places = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._frozen = {
            parameter: name for parameter, name in names.items() if not parameter.requires_grad
        }
        self._sets = {
            p: [p, *(_leaf(p) for _ in range(1, num_replicas))] for p in names if p.requires_grad
        }
        self._entered: list[list[int]] = []  # the `use`s that are open, each with its replica
        self._following = True  # the other replicas are to be copies of the model
        self._marks = self._versions()
        self._hooks: list[RemovableHandle] = []  # on the optimizer
        self._checks: list[RemovableHandle] = []  # on the modules
        self._watch()

    def __repr__(self) -> str:
        return f"CoresidentReplicas({type(self.model).__name__}, num_replicas={self.count})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "CoresidentReplicas cannot be copied or pickled: they are bound to the modules of one "
            "model. Make new ones of the copied model "
            "and load the optimizer's state, which holds the other replicas"
        )

    @contextmanager
    def use(self, replica: int) -> Iterator[None]:
        """Inside, the model runs at the weights of ``replica`` (0 ..

        K - 1). May be nested; the innermost counts.

        Raises:
            ValueError: there is no such replica; or a parameter that was frozen is not any more.
        """
        self._check_number(replica)
        self._check_frozen()
        self._check_kind(replica)
        if not self._entered:
            self.write_back()
        entry = [replica]
        self._entered.append(entry)
        self.in_use = True
        self._put(replica)
        try:
            yield
        finally:
            self._entered = [other for other in self._entered if other is not entry]
            self.in_use = bool(self._entered)
            self._put(self._entered[-1][0] if self._entered else 0)
            self._marks = (
                self._versions()
            )  # what was written in here was meant for this replica alone

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
        self._leaves = {
            id(own): k
            for copies in self._sets.values()
            if copies[1] is not copies[0]
            for k, own in enumerate(copies)
        }
        if not self._checks:
            hook = _Hook(self._check_run_again)
            hooked = [
                module
                for module in self.model.modules()
                if any(p in self._sets for p in module.parameters())
            ]
            self._checks = [module.register_forward_pre_hook(hook) for module in hooked]

    def _check_run_again(self, *_: Any) -> None:
        """A module is called: by a backward pass, which runs it a second time, and at another
        replica's weights than the first?"""
        if torch._C._current_graph_task_id() == -1:
            return
        replica = self._replica_of(torch._C._current_autograd_node())
        if self.index != replica if replica is not None else not self._entered:
            which = "a replica's" if replica is None else f"replica {replica}'s"
            raise ValueError(
                f"{which} backward pass runs a module again (activation checkpointing does), but "
                f"the weights in place are those of replica {self.index}: call backward inside the "
                "same `with replicas.use(k):` as the forward pass"
            )

    def _replica_of(self, start: Any) -> int | None:
        """Whose parameters are nearest in the graph from ``start`` on.

        None: it has none of ours, as in a reentrant checkpoint of the first layers.
        """
        seen, near = set(), [start]
        while near:
            for node in near:
                found = self._leaves.get(id(getattr(node, "variable", None)))
                if found is not None:
                    return found
            seen.update(near)
            near = [
                *{
                    far
                    for node in near
                    if node is not None
                    for far, _ in node.next_functions
                    if far is not None and far not in seen
                }
            ]
        return None

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
        if self._entered:
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

    def place(self, replica: int | None) -> int:
        if replica is not None:
            self._check_number(replica)
            return replica
        if not self._entered:
            raise ValueError(
                "which replica's loss is this? Call observe(loss) inside `with replicas.use(k):`, "
                "or observe(loss, replica=k)"
            )
        return self.index

    def sets(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The same parameters of each replica; what is shared (buffers, frozen ones) stands in all
        lists."""
        return [[self._sets[t][k] if t in self._sets else t for t in tensors] for k in self.local]  # type: ignore[index]

    def sum_rows(self, *rows: torch.Tensor) -> torch.Tensor:
        """K rows -> (K, width); nobody else is to be asked."""
        return torch.stack(rows)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises TypeError for an optimizer without fused steps of several replicas, ValueError for
        parameters of another model."""
        if not callable(getattr(optimizer, "set_replicas", None)):
            kind = type(optimizer)
            raise TypeError(
                f"optimizer is a {kind.__module__}.{kind.__qualname__}, which steps one set of "
                "parameters: co-resident replicas need "
                "hdet.FusedAdamW, FusedAdam, FusedSGD, FusedLion or FusedMuon"
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
        if (
            not isinstance(replica, int)
            or isinstance(replica, bool)
            or not 0 <= replica < self.count
        ):
            raise ValueError(f"replica must be one of 0 .. {self.count - 1}, got {replica!r}")

    def _check_kind(self, replica: int) -> None:
        for main, copies in self._sets.items():
            own = copies[replica]
            if (
                own.dtype != main.dtype or own.is_cuda != main.is_cuda
            ):  # a device would cost more to look at than to switch
                raise ValueError(
                    f"a parameter is {main.dtype} on {main.device} now, its copy for replica "
                    f"{replica} {own.dtype} on {own.device}: "
                    "move and cast the model before CoresidentReplicas(model) is made"
                )

    def _check_frozen(self) -> None:
        for parameter, name in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when CoresidentReplicas was made, so all "
                    "replicas share it: unfreeze it before"
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


class _Hook:
    """On a user's module: calls a method without holding its object.

    A copy or a pickle of the module has one that does nothing, and so has a compiled model."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = None if call is None else weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = None if self._call is None else self._call()
        if call is not None:
            call(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


# -- what is refused -------------------------------------------------------------------------------

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
        kinds = {
            kind.__name__ for kind in type(module).__mro__
        }  # by name: torch's sharding is slow to import
        if kinds & _WRAPPERS:
            raise ValueError(
                f"{what} is wrapped in {type(module).__name__}: co-resident replicas are one "
                "process's, pass the bare model"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is a scripted module, whose parameters cannot be exchanged: use "
                "torch.compile instead"
            )
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_flat_weights") and any(
                id(x) in owned for x in _members(value)
            ):
                raise ValueError(
                    f"{what} keeps a parameter in the plain attribute {attribute!r}, where "
                    "replicas cannot exchange it: look it up by its registered name in forward"
                )


def _members(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Tensors in a value, however nested.

    `seen`: what it lies in, as containers may hold themselves.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        for held in value.values() if isinstance(value, dict) else value:
            yield from _members(held, seen | {id(value)})


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"parameter {name!r} is not initialised: run the model once before")
    if hasattr(parameter, "to_local") and hasattr(parameter, "placements"):
        raise ValueError(
            f"parameter {name!r} is a DTensor: co-resident replicas are one process's, pass a "
            "model that is not sharded"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"parameter {name!r} has gradient hooks, which the other replicas' gradients would "
            "pass by: remove them"
        )
