"""English text that comes with Python: topics of the reference, docstrings of the library."""

from __future__ import annotations

import re
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

from examples.bytes.data import load_corpus, sample_batch

from ..problems import Batch

_DOCSTRING = re.compile(rb'"""(.{80,}?)"""', re.DOTALL)
HELD_OUT_PERCENT = 10
CONTEXT, WINDOWS = 64, 8


@cache
def english() -> tuple[Tensor, Tensor]:
    """Training and validation text as uint8.

    Docstrings are in the part of their module; of the topics each tenth is in the validation.
    """
    corpus = load_corpus()
    train, validation = (
        [found.group(1) for found in _DOCSTRING.finditer(text.numpy().tobytes())]
        for text in (corpus.train, corpus.validation)
    )
    for place, name in enumerate(sorted(topics)):
        (validation if place % (100 // HELD_OUT_PERCENT) == 0 else train).append(
            topics[name].encode()
        )
    return _tensor(train), _tensor(validation)


def _tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def windows(seed: int, step: int, context: int = CONTEXT) -> Batch:
    """`WINDOWS` windows of training text: inputs and the bytes that follow."""
    return sample_batch(english()[0], WINDOWS, context, seed=seed, stream="train", index=step)


@cache
def held_out(context: int = CONTEXT) -> list[Batch]:
    """512 windows that are not trained on."""
    return [
        sample_batch(english()[1], 64, context, seed=0, stream="validation", index=i)
        for i in range(8)
    ]
