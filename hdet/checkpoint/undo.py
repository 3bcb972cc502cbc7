"""What a load changes, put back if anything is raised: a refused checkpoint has changed nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from ..tensors.buffers import Contents, refill, tensors_in
from ..tensors.dtensor import local
from .run_state import state_methods
from .tensor_files import to_host


class Undo(ExitStack):
    """``with Undo() as undo:`` puts back on an error what was given to it inside, the last first.
    Copies of tensors are in the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}

    def on_error(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it then; what it raises is left out, so that all others are called."""

        def put_back(kind: Any, *_: Any) -> None:
            with suppress(Exception):
                if kind is not None:
                    function(*arguments)

        self.push(put_back)

    def keep_state(self, thing: Any) -> None:
        """Of something with `state_methods`: its own state, and its attributes as they are."""
        take, give = state_methods(thing)  # type: ignore[misc]
        attributes = getattr(thing, "__dict__", {})
        self.on_error(refill, attributes, attributes.copy())
        with torch.random.fork_rng(devices=[]):  # a data loader may begin an epoch for it
            state = take()
        on_host = {id(tensor): to_host(tensor) for tensor in tensors_in(state)}
        self.on_error(give, copy.deepcopy(state, on_host))

    def keep(self, value: Any, writes: bool = False) -> None:
        """The contents of dicts and lists, the attributes of what loads states, however they are
        nested, but for what has been kept. ``writes``: the values of tensors, too."""
        has_data = lambda one: state_methods(one) and not isinstance(one, nn.Module)
        contents = Contents(value, False, self._seen, has_data, copies=False)
        for write in contents.writes:
            self.on_error(write)
        for own in map(local, contents.tensors if writes else ()):
            self.on_error(own.detach().copy_, to_host(own))
