"""Text: windows of bytes; English that comes with Python, topics of the reference and docstrings of
the library."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

from ..problems import Batch
from ..problems.transformer import corpus, held_out, windows
from .kit import FAR, Examples

_DOCSTRING = re.compile(rb'"""(.{80,}?)"""', re.DOTALL)
CONTEXT, WINDOWS = 64, 8


@cache
def english() -> tuple[Tensor, Tensor]:
    """Training and validation text as uint8.

    Docstrings are in the part of their module; of the topics each tenth is in the validation.
    """
    train, validation = (
        [found.group(1) for found in _DOCSTRING.finditer(text.numpy().tobytes())]
        for text in python()
    )
    for place, name in enumerate(sorted(topics)):
        (train if place % 10 else validation).append(topics[name].encode())
    return _tensor(train), _tensor(validation)


def _tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def python() -> tuple[Tensor, Tensor]:
    """Training and validation text: the library's sources."""
    return corpus().train, corpus().validation


def bytes_of(
    texts: Callable[[], tuple[Tensor, Tensor]], context: int = CONTEXT, spare: str = "train"
) -> Examples:
    """Windows of ``context`` bytes, and the bytes that follow each; ``spare``: the stream of those
    that no step trains on."""

    def batch(index: int, seed: int, stream: str = "train") -> Batch:
        return windows(texts()[0], WINDOWS, context, seed, stream, index)

    return Examples(
        lambda seed, step: batch(step, seed),
        lambda seed, step, number: batch(number + FAR * (spare == "train"), seed, spare),
        lambda: held_out(texts()[1], context),
    )
