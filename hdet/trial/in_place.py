"""What keeps others from seeing the copies of a run that train in its place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["InPlace"]


class InPlace:
    """Knows whether a copy of the run is in the place of the run.

    ``with in_place():`` goes around everything that trains or scores a copy. Meanwhile
    ``state_dict`` of model and optimizer raises RuntimeError in the same thread (a closure that
    saves), and waits in others. Python's signal handlers run when the run is back: a handler that
    saves finds the run, and Ctrl-C does not leave half a copy behind. A second signal of a kind is
    not held back.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._hooks = [
            model.register_state_dict_pre_hook(_Check(self, "model.state_dict()")),
            optimizer.register_state_dict_pre_hook(_Check(self, "optimizer.state_dict()")),
        ]

    def check(self, what: str) -> None:
        """Raises RuntimeError if this thread has put a copy in the run's place; waits where
        another thread has."""
        if self._owner == threading.get_ident():
            raise RuntimeError(
                f"{what} was called while a trial's copy is in the place of the run, from the "
                "closure or before_step: call it in the training loop, outside of both"
            )
        with self._lock:
            pass

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with _signals_held_back(), self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()


class _Check:
    """A hook. In copies of the model that it is on, in memory or in a file, it does nothing."""

    def __init__(self, in_place: InPlace | None = None, what: str = "") -> None:
        self._in_place, self._what = in_place, what

    def __call__(self, *args: Any) -> None:
        if self._in_place is not None:
            self._in_place.check(self._what)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Check, ()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Handlers are called afterwards. Only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: dict[int, FrameType | None] = {}
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers: dict[int, Any] = {n: handler for n, handler in before.items() if callable(handler)}

    def hold(number: int, frame: FrameType | None) -> None:
        if number in held:  # the second one: somebody means it
            handlers[number](number, frame)
        held[number] = frame

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in held.items():
            handlers[number](number, frame)
