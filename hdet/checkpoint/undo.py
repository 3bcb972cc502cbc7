"""What a load changes, put back if anything is raised: a refused checkpoint has changed nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..optim.fused import FusedOptimizer
from ..tensors.buffers import tensors_in
from ..tensors.dtensor import local
from .run_state import state_methods
from .tensor_files import to_host


class Undo(ExitStack):
    """``with Undo() as undo:`` puts back on an error what was given to it inside, the last first.
    Copies of tensors are in the host's memory.

    Args:
        apart: tensors that `keep` leaves alone.
    """

    def __init__(self, apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {id(tensor): tensor for tensor in apart}

    def on_error(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it then; what it raises is left out, so that all others are called."""

        def put_back(kind: Any, *_: Any) -> None:
            if kind is not None:
                with suppress(Exception):
                    function(*arguments)

        self.push(put_back)

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Of a DTensor this rank's shard."""
        self._keep_values(tensor)
        local(tensor.detach()).copy_(values)

    def keep_state(self, thing: Any) -> None:
        """Of something with `state_methods`: its own state, and its attributes as they are."""
        take, give = state_methods(thing)  # type: ignore[misc]
        self.keep_contents(getattr(thing, "__dict__", {}))
        with torch.random.fork_rng(devices=[]):  # a data loader may begin an epoch for it
            state = take()
        on_host = {id(tensor): to_host(tensor) for tensor in tensors_in(state)}
        self.on_error(give, copy.deepcopy(state, on_host))

    def keep_contents(self, container: Any) -> None:
        """Of a dict or a list."""
        content = dict(container) if isinstance(container, dict) else list(container)
        self.on_error(_refill, container, content)

    def keep(self, value: Any, writes: bool = False) -> None:
        """The contents of dicts and lists, the attributes of what loads states, however they are
        nested. ``writes``: the values of tensors, too. torch's optimizers and hdet's make new ones
        when they load, but for co-resident replicas; those of others may not."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if writes:
                self._keep_values(value)
        elif isinstance(value, dict):
            self.keep_contents(value)
            for held in value.values():
                self.keep(held, writes)
        elif isinstance(value, (list, tuple)):
            if isinstance(value, list):
                self.keep_contents(value)
            for held in value:
                self.keep(held, writes)
        elif (
            hasattr(value, "__dict__") and state_methods(value) and not isinstance(value, nn.Module)
        ):
            load = getattr(type(value), "load_state_dict", None)
            is_fused = load is FusedOptimizer.load_state_dict and value.num_replicas == 1
            self.keep(vars(value), writes or not (is_fused or load is Optimizer.load_state_dict))

    def _keep_values(self, tensor: torch.Tensor) -> None:
        own = local(tensor.detach())
        self.on_error(own.copy_, to_host(own))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(content)
