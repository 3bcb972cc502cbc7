"""Has a model been given these examples before? Told by hashes of its inputs, without the data's help."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..tensors.buffers import tensors_in
from ..tensors.dtensor import is_sharded

__all__ = ["Seen"]

PICKED = 4096
"""Numbers of an example that are looked at, evenly spaced."""
FEWEST = {True: 2, False: 8}
"""Numbers that an example must have to be told from others: of floating point, and whole ones."""
_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen:
    """Hashes of examples, step by step: int64, equal for bitwise equal examples, and hardly ever for others. They stay on the device until `share` is
    asked for."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._steps: list[torch.Tensor] = []

    @contextmanager
    def looking_at(self, model: nn.Module) -> Iterator[None]:
        """Inside it what the model is given is one more step's examples. What has no first dimension of examples is passed over."""
        given: list[torch.Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (hashes := _hashes([*args, *kwargs.values()])) is not None:
                given.append(hashes)

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            if given:
                self._steps.append(torch.cat(given))

    def share(self, first: bool) -> tuple[float, float]:
        """(examples that have been seen before, of so many); then it forgets them. ``first``: seen in an earlier step of these, which are kept;
        else: seen in the steps that were kept. It waits for the device."""
        steps, self._steps = [hashes.unique() for hashes in self._steps], []  # a model may be given an example twice in a step
        if not steps:
            return 0.0, 0.0
        together = torch.cat(steps)
        if first:
            self._first = together.unique()
            return float(len(together) - len(self._first)), float(len(together))
        again = 0.0 if self._first is None else float(torch.isin(together, self._first).sum())
        return again, float(len(together))


@torch.no_grad()
def _hashes(given: Sequence[Any]) -> torch.Tensor | None:
    """(examples,) int64, of all tensors that have as many rows as the first one."""
    tensors = [
        tensor.detach()
        for tensor in tensors_in(given)
        if tensor.dim() and tensor.numel() and not tensor.is_complex() and not is_sharded(tensor)
    ]
    if not tensors:
        return None
    examples, known = len(tensors[0]), False
    hashes = torch.zeros(examples, dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        if len(tensor) != examples:
            continue
        rows = tensor.reshape(examples, -1)
        known = known or rows.shape[1] >= FEWEST[tensor.is_floating_point()]
        rows = rows[:, :: -(-rows.shape[1] // PICKED)].contiguous()
        words = rows.long() if rows.dtype == torch.bool else rows.view(_SAME_SIZE_INTEGER[rows.element_size()]).long()
        hashes = hashes + (words * (_weights(words.device)[: words.shape[1]] + 2 * number)).sum(1)
    return hashes if known else None


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(1 << 62), 1 << 62, (PICKED,), generator=generator) | 1).to(device)
