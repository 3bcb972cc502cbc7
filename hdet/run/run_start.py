"""What a run began with, and goes back to when its sweep is over: the optimizer's state, the model's buffers, parameters of others."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..tensors.buffers import BufferCopies
from ..tensors.dtensor import local_parts
from ..tensors.module_hooks import Hook
from .snapshot import Snapshot

__all__ = ["RunStart"]


def _version(tensor: torch.Tensor) -> int:
    """Counts what is written to it, without a look at it."""
    return 0 if tensor.is_inference() else tensor._version


class RunStart:
    """All that a sweep changes but the optimizer's own parameters (a snapshot has those), as it was at the first step.

    - The optimizer's state, with moments that were loaded; without masters, which follow their parameters.
    - The model's buffers. A training step's forward pass changes them before the Ensemble sees anything of the step, so they are kept by a
      hook before the first one in training mode, and again after a `load_state_dict`; where no such pass is seen, at the first step.
    - Parameters of the model that this optimizer does not have. Those that ask for no gradient only if they are no more than what is
      trained: a large frozen part is taken for what never moves.

    Args:
        model: None: there is only the optimizer's state.
        place: "device" or "host": where the copies live. Memory: as much as there is of all this at the first step, until `close`.
        copied: the optimizer has copies of the model's parameters, which follow them, and others' are not looked at.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, place: str, copied: bool = False) -> None:
        self._optimizer, self._model, self._place, self._copied = optimizer, model, place, copied
        self._buffers = None if model is None else BufferCopies(model, place == "host")
        self._snapshot: Snapshot | None = None
        self._others: list[tuple[str, nn.Parameter]] = []
        self._left_out: list[tuple[str, nn.Parameter, int]] = []
        self._before_forward: list[RemovableHandle] = []
        self._after_load: list[RemovableHandle] = []
        self._traced = False

    @property
    def taken(self) -> bool:
        return self._snapshot is not None

    def expect(self) -> None:
        """It is still to come, with the next first step."""
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
        """Buffers have been loaded: those before the next forward pass count."""
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
        """The hooks of a compiled model stay, and do nothing: without them it would be compiled again."""
        if not self._traced:
            _remove(self._before_forward)

    def take(self) -> None:
        """At the first step, before it has changed anything."""
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

    def put_back(self) -> None:
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
        """The name of a parameter that asks for gradients, is not this optimizer's, and is not what it was, on this rank."""
        if self._snapshot is None:
            return None
        thawed = next((name for name, p, version in self._left_out if p.requires_grad and _version(p) != version), None)
        return thawed or next((name for i, (name, p) in enumerate(self._others) if p.requires_grad and self._snapshot.moved(i)), None)

    def close(self) -> None:
        """It is not needed any more: its memory is free."""
        self._snapshot, self._others, self._left_out = None, [], []
        if self._buffers is not None:
            self._buffers.forget()
        self._release()
        _remove(self._after_load)

    def leave(self) -> None:
        """For good: the model has no hooks of ours."""
        self.close()
        _remove(self._before_forward)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
