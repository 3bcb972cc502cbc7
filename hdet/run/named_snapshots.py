"""Named snapshots of a run: parameters, and, if a plan asks for it, buffers and the optimizer's state, to be restored."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..converge import Masters
from ..core.plan import SnapshotOf
from ..kernels.spec.rounding import split
from ..measure.weight_line import local_masters, room_for, value_at
from ..replicas import Replicas
from ..tensors.buffers import BufferCopies
from ..tensors.dtensor import local_parts
from ..tensors.module_hooks import Hook
from .snapshot import Snapshot

__all__ = ["Snapshots"]


class Snapshots:
    """`Plan.snapshots`: each is taken before the first step of the first cycle that names it, and given up with the first that does not.

    Args:
        trained: the parameters of this process's (first) replica, in the order of the optimizer's groups, with their ``masters``.
        models: whose buffers, and parameters that this optimizer does not have, belong to the run.
        copied: the optimizer has copies of the models' parameters.
    """

    def __init__(
        self, trained: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer, models: Sequence[nn.Module], copied: bool
    ) -> None:
        self._weights = (list(trained), masters, optimizer)
        self._model, self._copied = models[0] if models else None, copied
        self._kept: dict[str, _Snapshot] = {}

    def begin_cycle(self, wanted: Mapping[str, SnapshotOf]) -> None:
        """Free what is not wanted any more, and prepare what is new."""
        for name in self._kept.keys() - wanted.keys():
            self._kept.pop(name).close()
        for name in wanted.keys() - self._kept.keys():
            if wanted[name].trained:
                self._kept[name] = _Trained(wanted[name], *self._weights, self._model)
            elif wanted[name].state:
                self._kept[name] = _WithState(wanted[name], *self._weights, self._model, self._copied)
            else:
                self._kept[name] = _Snapshot(wanted[name], *self._weights)

    def on_cycle_start(self) -> None:
        """Before the first step: take those that have not been."""
        for snapshot in self._kept.values():
            if not snapshot.weights:
                snapshot.take()

    def parameters(self, name: str) -> list[torch.Tensor]:
        """Their values in a snapshot, local shards; its memory, not a copy. Raises ValueError if there is none of that name."""
        return self._of(name).weights

    def restore(self, name: str) -> None:
        """Parameters of the (first) local replica, and what else the snapshot has. Raises ValueError if there is none of that name."""
        self._of(name).restore()

    def take(self, name: str) -> None:
        """What is there now into a snapshot that is trained. Raises ValueError if there is none of that name."""
        self._of(name).take()

    def check_alone(self, replicas: Replicas, device: torch.device) -> str | None:
        """A message if another optimizer has moved parameters of the model since a snapshot with state was taken, which is restored then. On
        all ranks alike: a shard may have moved on one of them only. One all_reduce."""
        name = next((name for snapshot in self._kept.values() if (name := snapshot.moved()) is not None), None)
        moved = torch.full((1,), float(name is not None), dtype=torch.float64, device=device)
        if not replicas.sum_rows(*[moved] * len(replicas.local)).any():
            return None
        for snapshot in self._kept.values():
            if isinstance(snapshot, _WithState):
                snapshot.restore()
        which = "a parameter of the controller's model on another rank" if name is None else f"the controller's model has {name!r}, which"
        return (
            f"{which} is not this Ensemble's optimizer's, and has moved in the sweep: a second optimizer over the same model would be swept with "
            "it, and its state not be restored. Put all parameters into one optimizer, as groups; or step the other one only when "
            "ensemble.sweeping is False. (All else has been restored to the first step.)"
        )

    def forget(self) -> None:
        """Other weights have been loaded: all are taken anew."""
        for snapshot in self._kept.values():
            snapshot.forget()

    def close(self) -> None:
        """The Ensemble is given up."""
        self.begin_cycle({})

    def _of(self, name: str) -> _Snapshot:
        found = self._kept.get(name)
        if found is None or not found.weights:
            raise ValueError(
                f"there is no snapshot {name!r}, only {sorted(self._kept)}: name it in Plan.snapshots of the cycle before its first step"
            )
        return found


class _Snapshot:
    """The parameters, from `take` to `close`."""

    def __init__(self, wanted: SnapshotOf, tensors: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer) -> None:
        self._tensors, self._masters, self._optimizer = tensors, masters, optimizer
        self._place, self._dtype = wanted.place, None if wanted.dtype is None else getattr(torch, wanted.dtype)
        self.weights: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """At the first step, before it has changed anything."""
        for tensor, master in zip(local_parts(self._tensors), local_masters(self._masters()), strict=True):
            room = room_for(tensor, self._dtype, self._place)
            room.copy_(value_at(tensor, master))
            self.weights.append(room)

    @torch.no_grad()
    def restore(self) -> None:
        """In place, and what is beyond a parameter's dtype in its master, or in the base of all replicas."""
        if getattr(self._optimizer, "storage", None) == "displacement":
            self._optimizer.put_values(self._tensors, self.weights)  # type: ignore[attr-defined]
            return
        for tensor, master, kept in zip(local_parts(self._tensors), local_masters(self._masters()), self.weights, strict=True):
            tensor.copy_(kept)
            if master is not None and master.dtype == torch.float32:
                master.copy_(kept)
            elif master is not None:
                for part, value in zip((tensor, master), split(kept.to(tensor.device, torch.float32)), strict=True):
                    part.copy_(value)

    def moved(self) -> str | None:
        """The name of a parameter that asks for gradients, is not this optimizer's, and is not what it was, on this rank."""
        return None

    def forget(self) -> None:
        """It is still to come, with the next first step."""
        self.weights = []

    def close(self) -> None:
        """It is not needed any more: its memory is free."""
        self.weights = []


class _Trained(_Snapshot):
    """Parameters, buffers and the optimizer's state with all weights that it holds; to be taken as often as one likes."""

    def __init__(
        self, wanted: SnapshotOf, tensors: Sequence[torch.Tensor], masters: Masters, optimizer: Optimizer, model: nn.Module | None
    ) -> None:
        super().__init__(wanted, tensors, masters, optimizer)
        self._all = Snapshot(tensors, optimizer, wanted.place, model)

    def take(self) -> None:
        self._all.take()
        self.weights = self._all.parameters

    def restore(self) -> None:
        self._all.restore()


class _WithState(_Snapshot):
    """And all else that a sweep changes, as it was at the first step.

    - The optimizer's state, with moments that were loaded; without masters, which follow their parameters.
    - The model's buffers. A forward pass changes them before the Ensemble sees anything of the step. So they are copied by a hook before the
      first one in training mode, and again after a `load_state_dict`; where no such pass is seen, at the first step.
    - Parameters of the model that this optimizer does not have. Frozen ones only if they are no larger than what is trained; else they are
      assumed not to move.

    Args:
        model: None: there is only the optimizer's state.
        copied: the optimizer has copies of the model's parameters, which follow them; parameters of others are then ignored.
    """

    def __init__(
        self,
        wanted: SnapshotOf,
        tensors: Sequence[torch.Tensor],
        masters: Masters,
        optimizer: Optimizer,
        model: nn.Module | None,
        copied: bool,
    ) -> None:
        super().__init__(wanted, tensors, masters, optimizer)
        self._model, self._copied = model, copied
        self._buffers = None if model is None else BufferCopies(model, wanted.place == "host")
        self._snapshot: Snapshot | None = None
        self._others: list[tuple[str, nn.Parameter]] = []
        self._left_out: list[tuple[str, nn.Parameter, int]] = []
        self._before_forward: list[RemovableHandle] = []
        self._after_load: list[RemovableHandle] = []
        self._traced = False
        self.forget()

    def forget(self) -> None:
        self.close()
        if self._model is None or not any(module._buffers for module in self._model.modules()):
            return
        again = Hook(self._look_again)
        self._after_load = [module.register_load_state_dict_post_hook(again) for module in self._hookable()]
        self._look_again()

    def _hookable(self) -> list[nn.Module]:
        """Scripted modules take no hooks."""
        assert self._model is not None
        return [module for module in self._model.modules() if not isinstance(module, torch.jit.ScriptModule)]

    def _look_again(self, *_: object) -> None:
        """Buffers have been loaded: they are copied before the next forward pass."""
        assert self._model is not None and self._buffers is not None
        self._buffers.forget()
        if not self._before_forward:
            hook = Hook(self._look, traced=self._look_while_tracing)
            # Also those that have buffers, because a loop may call parts of its model by themselves.
            hooked = [module for module in self._hookable() if module is self._model or module._buffers]
            self._before_forward = [module.register_forward_pre_hook(hook) for module in hooked]

    def _look(self, module: nn.Module, _: object) -> None:
        if module.training and self._buffers is not None:
            if self._after_load and not self._buffers.taken:
                self._buffers.take()
            self._release()

    def _look_while_tracing(self) -> None:
        self._traced = True
        if self._after_load and self._buffers is not None and not self._buffers.taken:
            self._buffers.take()

    def _release(self) -> None:
        """The hooks of a compiled model stay without effect: removing them would compile it again."""
        if not self._traced:
            _remove(self._before_forward)

    def take(self) -> None:
        super().take()
        own = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        others = [] if self._model is None or self._copied else [(n, p) for n, p in self._model.named_parameters() if id(p) not in own]
        resting = local_parts([p for _, p in others if not p.requires_grad])
        fits = sum(p.nbytes for p in resting) <= sum(p.nbytes for p in local_parts(list(own.values())))
        self._others = [(name, p) for name, p in others if p.requires_grad or fits]
        self._left_out = [] if fits else [(name, p, _version(p)) for name, p in others if not p.requires_grad]
        self._snapshot = Snapshot([p for _, p in self._others], self._optimizer, self._place, weights=False)
        self._snapshot.take()
        if self._buffers is not None and not self._buffers.taken:
            self._buffers.take()
        _remove(self._after_load)

    def restore(self) -> None:
        super().restore()
        assert self._snapshot is not None, "take comes first"
        self._snapshot.restore()
        written = next((name for name, p, version in self._left_out if _version(p) != version), None)
        if written is not None:
            warnings.warn(
                f"the frozen parameter {written!r} was written in the search, and is not taken back: frozen parameters are kept only where they are no "
                "more than what is trained. Begin to write it (a teacher's average, for instance) when ensemble.sweeping is False",
                stacklevel=6,
            )
        if self._buffers is not None:
            self._buffers.put_back()

    def moved(self) -> str | None:
        if self._snapshot is None:
            return None
        thawed = next((name for name, p, version in self._left_out if p.requires_grad and _version(p) != version), None)
        return thawed or next((name for i, (name, p) in enumerate(self._others) if p.requires_grad and self._snapshot.moved(i)), None)

    def close(self) -> None:
        super().close()
        self._snapshot, self._others, self._left_out = None, [], []
        if self._buffers is not None:
            self._buffers.forget()
        self._release()
        _remove(self._after_load)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _version(tensor: torch.Tensor) -> int:
    """Counts what is written to it, without a look at it."""
    return 0 if tensor.is_inference() else tensor._version
