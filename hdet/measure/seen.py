"""Has a model been given these examples before? Told by hashes of its inputs, without the data's help."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensors.buffers import tensors_in
from ..tensors.dtensor import is_sharded

__all__ = ["Seen", "part_of_data"]

PICKED = 4096
"""Numbers of an example that are looked at, evenly spaced."""
FEWEST = {True: 2, False: 8}
"""Numbers that an example must have to be told from others: of floating point, and whole ones. One of fewer, such as a user and a thing, may come by chance
with another label."""
CLEARLY = 3.0
"""Standard errors by which more of these have to be seen again than by chance."""
LEAST = 16
"""Steps of a first trial, at least; a run that is resumed has none."""
_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seen:
    """Hashes of examples, step by step: int64, equal for bitwise equal examples, and hardly ever for others. They stay on the device until `share` is
    asked for. ``least``: steps of which examples are kept, at least."""

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._early: list[torch.Tensor] = []
        """By step: examples of the first ones, while they are too few."""
        self._first: torch.Tensor | None = None
        """Those that are kept."""
        self._window, self._count = 0, 0.0
        """Of so many steps, and so many of them."""
        self._chance: float | None = None
        """The part of later ones that is among them by chance, where examples are of few numbers; None: they are told from others."""
        self._steps: list[list[list[_Rows | None]]] = []
        """[step][call][input]; None: it has no rows."""

    @contextmanager
    def looking_at(self, model: nn.Module, training: bool = False) -> Iterator[None]:
        """Inside it what the model is given is one more step's examples; ``training``: only what it is given with gradients on. What has no first dimension
        of examples is passed over, and so is a model that was compiled in place (``model.compile()``): each hook would compile it again."""
        if getattr(model, "_compiled_call_impl", None) is not None:
            yield
            return
        looking = _Looking(training)
        hook = model.register_forward_pre_hook(looking, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._steps.append(looking.calls)

    def forget(self) -> None:
        """The steps since `share` are to be done again; those that were kept stay."""
        self._steps = []

    def share(self) -> tuple[float, float, float, float]:
        """(examples that have been seen before, of so many, how many would have been by chance, and the square of that number's error), all but the second
        over the number of steps that are kept; then it forgets them. Numbers of several ranks, or times, may be added up. At first: twice those that were
        seen in an earlier step of these, which are kept; afterwards: seen in the steps that were kept. It waits for the device."""
        every, self._steps = self._steps, []
        constant = _constant([call for calls in every for call in calls])
        found = [[rows for call in calls if (rows := _together(call, constant)) is not None] for calls in every]
        # A model may be given an example twice in a step.
        steps = [torch.cat([rows.hashes for rows in calls]).unique() for calls in found if calls]
        if not steps:
            return 0.0, 0.0, 0.0, 0.0
        enough = all(rows.enough for calls in found for rows in calls)
        if self._first is None:
            self._early += steps
            return self._keep(enough) if len(self._early) >= self._least else (0.0, 0.0, 0.0, 0.0)
        if enough != (self._chance is None):
            return 0.0, 0.0, 0.0, 0.0
        together = torch.cat(steps)
        examples, again = float(len(together)), float(torch.isin(together, self._first).sum())
        chance = examples * (self._chance or 0.0)
        return again / self._window, examples, chance / self._window, chance * (1 + examples / self._count) / self._window**2

    def _keep(self, enough: bool) -> tuple[float, float, float, float]:
        """As `share`, of the first steps."""
        together, self._window = torch.cat(self._early), len(self._early)
        self._first, counts = together.unique(return_counts=True)
        self._early, self._count = [], float(len(together))
        if enough:
            # Of two examples that were among these steps' one came again with half the probability with which a later one is among them.
            return 2.0 * (self._count - len(counts)) / self._window, self._count, 0.0, 0.0
        self._chance = float(counts[counts > 1].sum()) / self._count * self._window / (self._window - 1)
        return 0.0, 0.0, 0.0, 0.0


def part_of_data(again: float, examples: float, chance: float, error: float) -> float:
    """That a step takes, by what `Seen.share` gives: if the steps that are kept took a part p of it, a later example was among them with this
    probability."""
    more = again - chance
    return more / examples if more > CLEARLY * math.sqrt(error) else 0.0


class _Looking:
    """A hook before a forward pass. Copies of a model that is looked at, in memory or in a file, have none that does anything."""

    def __init__(self, training: bool) -> None:
        self._training = training
        self.calls: list[list[_Rows | None]] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or not self._training):
            self.calls.append([_hashes(one) for one in tensors_in([args, kwargs])])

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Any:
    return _pass_over


def _pass_over(module: nn.Module, args: Any, kwargs: Any) -> None:
    pass


class _Rows(NamedTuple):
    """Of an input, or of several together."""

    hashes: torch.Tensor
    """(examples,) int64"""
    numbers: int
    """Of an example."""
    enough: bool
    """Are examples told from others by them?"""


def _constant(calls: Sequence[Sequence[_Rows | None]]) -> set[int]:
    """The inputs that are the same in each call, such as a mask, positions or the edges of a graph: they are no examples. All of them may be, where the
    whole set is given in each step; then they are."""
    inputs = range(max(map(len, calls), default=0))
    same = {n for n in inputs if len(calls) > 1 and all(n < len(call) and _equal(call[n], calls[0][n]) for call in calls)}
    return set() if len(same) == len(inputs) else same


def _equal(one: _Rows | None, other: _Rows | None) -> bool:
    return (one is None) == (other is None) and (one is None or other is None or torch.equal(one.hashes, other.hashes))


def _together(call: Sequence[_Rows | None], constant: set[int]) -> _Rows | None:
    """Of the inputs that have as many rows as most of them; those of few numbers count only where no input has enough, and not one number alone."""
    told = [rows for n, rows in enumerate(call) if rows is not None and n not in constant]
    told = [rows for rows in told if rows.enough] or told
    if not told:
        return None
    lengths = [len(rows.hashes) for rows in told]
    told = [rows for rows in told if len(rows.hashes) == max(lengths, key=lengths.count)]
    # Each by a weight of its own: two inputs that have changed places are another example.
    weights = _weights(told[0].hashes.device)
    hashes = torch.stack([rows.hashes * weights[n] for n, rows in enumerate(told)]).sum(0)
    numbers = sum(rows.numbers for rows in told)
    return _Rows(hashes, numbers, told[0].enough) if numbers > 1 else None


@torch.no_grad()
def _hashes(given: torch.Tensor) -> _Rows | None:
    tensor = given.detach()
    if (
        tensor.layout != torch.strided
        or tensor.is_nested
        or not tensor.dim()
        or not tensor.numel()
        or tensor.is_complex()
        or is_sharded(tensor)
    ):
        return None
    rows = tensor.reshape(len(tensor), -1)
    numbers = rows.shape[1]
    rows = rows[:, :: -(-rows.shape[1] // PICKED)].contiguous()
    words = rows.long() if rows.dtype == torch.bool else rows.view(_SAME_SIZE_INTEGER[rows.element_size()]).long()
    hashes = (words * _weights(words.device)[: words.shape[1]]).sum(1)
    return _Rows(hashes, numbers, numbers >= FEWEST[tensor.is_floating_point()])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(1 << 62), 1 << 62, (PICKED,), generator=generator) | 1).to(device)
