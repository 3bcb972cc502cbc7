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
        self._window = 0
        """Of how many steps those are."""
        self._steps: list[list[list[torch.Tensor | None]]] = []
        """[step][call][input]: the hashes of its rows; None: of too few numbers to tell rows apart."""

    @contextmanager
    def looking_at(self, model: nn.Module, training: bool = False) -> Iterator[None]:
        """Inside it what the model is given is one more step's examples; ``training``: only what it is given with gradients on. What has no first dimension
        of examples is passed over, and so is a model that was compiled in place (``model.compile()``): each hook would compile it again."""
        if getattr(model, "_compiled_call_impl", None) is not None:
            yield
            return
        calls: list[list[torch.Tensor | None]] = []

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled() or not training:
                calls.append([_hashes(one) for one in tensors_in([args, kwargs])])

        hook = model.register_forward_pre_hook(called, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._steps.append(calls)

    def forget(self) -> None:
        """The steps since `share` are to be done again; those that were kept stay."""
        self._steps = []

    def share(self) -> tuple[float, float]:
        """(examples that have been seen before, of so many); then it forgets them. The first time: twice those that were seen in an earlier step of
        these, which are kept; afterwards: seen in the steps that were kept. It waits for the device."""
        every, self._steps = self._steps, []
        constant = _constant([call for calls in every for call in calls])
        found = [[hashes for call in calls if (hashes := _together(call, constant)) is not None] for calls in every]
        steps = [torch.cat(hashes).unique() for hashes in found if hashes]  # a model may be given an example twice in a step
        if not steps:
            return 0.0, 0.0
        together = torch.cat(steps)
        if self._first is None:
            self._first, self._window = together.unique(), len(every)
            # Of two examples that were among these steps' one came again with half the probability with which a later one is among them.
            return 2.0 * (len(together) - len(self._first)), float(len(together))
        return float(torch.isin(together, self._first).sum()), float(len(together))

    def part(self, again: float, examples: float) -> float:
        """Of the data that a step takes: if the steps that are kept took a part p of it, a later example was among them with this probability."""
        return again / examples / self._window if examples else 0.0


def _constant(calls: Sequence[Sequence[torch.Tensor | None]]) -> set[int]:
    """The inputs that are the same in each call, such as a mask, positions or the edges of a graph: they are no examples. All of them may be, where the
    whole set is given in each step; then they are."""
    inputs = range(max(map(len, calls), default=0))
    same = {n for n in inputs if len(calls) > 1 and all(n < len(call) and _equal(call[n], calls[0][n]) for call in calls)}
    return set() if len(same) == len(inputs) else same


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return (one is None) == (other is None) and (one is None or other is None or torch.equal(one, other))


def _together(call: Sequence[torch.Tensor | None], constant: set[int]) -> torch.Tensor | None:
    """(examples,) int64, of the inputs that have as many rows as most of them."""
    told = [hashes for n, hashes in enumerate(call) if hashes is not None and n not in constant]
    if not told:
        return None
    lengths = [len(hashes) for hashes in told]
    rows = max(lengths, key=lengths.count)
    # Each by an odd number of its own: two inputs that have changed places are another example.
    parts = [hashes * (2 * n + 1) for n, hashes in enumerate(told) if len(hashes) == rows]
    return torch.stack(parts).sum(0)


@torch.no_grad()
def _hashes(given: torch.Tensor) -> torch.Tensor | None:
    """(rows,) int64."""
    tensor = given.detach()
    if not tensor.dim() or not tensor.numel() or tensor.is_complex() or is_sharded(tensor):
        return None
    rows = tensor.reshape(len(tensor), -1)
    if rows.shape[1] < FEWEST[tensor.is_floating_point()]:
        return None
    rows = rows[:, :: -(-rows.shape[1] // PICKED)].contiguous()
    words = rows.long() if rows.dtype == torch.bool else rows.view(_SAME_SIZE_INTEGER[rows.element_size()]).long()
    return (words * _weights(words.device)[: words.shape[1]]).sum(1)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(1 << 62), 1 << 62, (PICKED,), generator=generator) | 1).to(device)
