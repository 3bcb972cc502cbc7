"""Forward passes in the middle of a run, after which the model and every random state are exactly
as before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .buffers import BufferCopies, Contents, places


@contextmanager
def random_states_kept(model: nn.Module, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Afterwards the random states of torch (CPU, and the CUDA devices of the model), of
    Python's ``random``, of numpy, if it is loaded, and of ``generators`` of any of these are what
    they were."""
    kept = Contents([*generators])
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = numpy_random.get_state() if numpy_random else None
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        kept.put_back()
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module that there was is in its mode, training or eval, again."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        _restore(modes)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; afterwards module modes, buffers and random states
    (`random_states_kept`) are exactly as before.

    A module with a ``train`` of its own may change its parameters (adapters merge into their
    weights in eval mode): these are copied and restored, too.
    """
    modes = [(module, module.training) for module in model.modules()]
    # By name too: a module may put a new tensor in the place of a buffer.
    buffers, kept = list(places(model)), BufferCopies(model)
    kept.take()
    written = Contents([p for m, _ in modes if _trains_by_itself(m) for p in m.parameters()])
    try:
        with ExitStack() as stack:
            stack.enter_context(random_states_kept(model))
            stack.enter_context(torch.no_grad())
            stack.callback(_restore, modes)
            model.eval()
            yield
    finally:
        with torch.no_grad():
            written.put_back()
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            kept.put_back()


def _trains_by_itself(module: nn.Module) -> bool:
    return type(module).train is not nn.Module.train or "train" in vars(module)


def _restore(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Parents before children, whose mode may be another.

    One that cannot keeps nobody else from it.
    """
    failed: Exception | None = None
    for module, training in modes:
        if module.training != training:
            try:
                module.train(training)
            except Exception as error:  # noqa: BLE001 - raised when all others are what they were
                failed = failed or error
        module.training = training
    if failed is not None:
        raise failed
