"""English text that comes with Python: topics of the reference, docstrings of the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from examples.bytes.data import sample_batch

from ..problems import Batch, Problem
from ..problems.problem import mean_loss
from ..problems.transformer import corpus
from ..problems.transformer import losses as window_losses
from .kit import FAR, decaying

_DOCSTRING = re.compile(rb'"""(.{80,}?)"""', re.DOTALL)
CONTEXT, WINDOWS = 64, 8


@cache
def english() -> tuple[Tensor, Tensor]:
    """Training and validation text as uint8.

    Docstrings are in the part of their module; of the topics each tenth is in the validation.
    """
    train, validation = (
        [found.group(1) for found in _DOCSTRING.finditer(text.numpy().tobytes())]
        for text in (corpus().train, corpus().validation)
    )
    for place, name in enumerate(sorted(topics)):
        (train if place % 10 else validation).append(topics[name].encode())
    return _tensor(train), _tensor(validation)


def _tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


@cache
def held_out(text: Tensor, context: int = CONTEXT) -> list[Batch]:
    """512 windows."""
    return [sample_batch(text, 64, context, seed=0, stream="validation", index=i) for i in range(8)]


def on_english(
    name: str, build: Callable[[int], nn.Module], context: int = CONTEXT, decay: float = 0.01
) -> Problem:
    """The next byte of windows of ``context`` bytes."""

    def batch(seed: int, step: int) -> Batch:
        return sample_batch(english()[0], WINDOWS, context, seed=seed, stream="train", index=step)

    return Problem(
        name=name,
        steps=1500,
        batch_size=WINDOWS,
        build=build,
        groups=decaying(decay),
        batch=batch,
        spare=lambda seed, step, number: batch(seed, FAR + number),
        losses=window_losses,
        validate=lambda m: mean_loss(m, window_losses, held_out(english()[1], context)),
    )
