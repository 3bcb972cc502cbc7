"""A look at a model that leaves no trace: how probe and line evaluate in the middle of a run."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; afterwards module modes, buffers and every random state are exactly as before.

    Covers torch (CPU and CUDA), Python's ``random`` and, if it is loaded, numpy's global state.
    """
    modes = [(module, module.training) for module in model.modules()]
    # By name too: a module may put a new tensor in the place of a buffer.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    python_state, numpy_state = random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(torch.no_grad())
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)
