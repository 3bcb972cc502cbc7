"""What keeps others from seeing the copies of a run that train in its place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..optim.snapshot import attach_hook

__all__ = ["InPlace"]


class InPlace:
    """Knows whether a copy of the run is in the place of the run.

    ``with in_place.hold():`` goes around everything that trains or scores a copy. Meanwhile
    ``state_dict`` of what is `watch`ed (model and optimizer) raises RuntimeError
    in the same thread (a closure that saves), and waits in others. Python's signal handlers run
    when the run is back: a handler that saves finds the run, and Ctrl-C does not leave half a copy
    behind. A second signal of a kind is not held back.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._hooks: list[Callable[[], object]] = []  # remove them

    def watch(self, owners: Iterable[Any]) -> None:
        """Let this be a hook of their ``state_dict``, until `close`."""
        hooked = [owner for owner in owners if not isinstance(owner, torch.jit.ScriptModule)]
        self._hooks = [attach_hook(one.register_state_dict_pre_hook, self) for one in hooked]

    def __call__(self, owner: object, *_: Any) -> None:
        self.check(f"{'model' if isinstance(owner, nn.Module) else 'optimizer'}.state_dict()")

    def __reduce__(self) -> tuple[Any, ...]:
        return InPlace, ()  # on a copy of the model, in memory or in a file, it does nothing

    def check(self, what: str) -> None:
        """Raises RuntimeError if this thread has put a copy in the run's place; waits where
        another thread has."""
        if self._thread == threading.get_ident():
            raise RuntimeError(
                f"{what} was called while a trial's copy is in the place of the run, from the "
                "closure or before_step: call it in the training loop, outside of both"
            )
        with self._lock:
            pass

    @contextmanager
    def held_off(self, what: str) -> Iterator[None]:
        """Inside, no copy comes into the run's place. Raises and waits as `check`."""
        with self._lock:
            self.check(what)
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        with _signals_held_back(), self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    def close(self) -> None:
        """Takes the hooks off."""
        for remove in self._hooks:
            remove()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Handlers are called afterwards. Only the main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers: dict[int, Any] = {n: handler for n, handler in before.items() if callable(handler)}
    held: dict[int, FrameType | None] = {}

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
        with ExitStack() as calls:  # one that raises keeps no other from its call
            for number, frame in reversed(held.items()):
                calls.callback(handlers[number], number, frame)
