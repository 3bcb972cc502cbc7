"""How far training moves the weights: |change| / |first weights| of each matrix, from samples.

It needs no copy of the model and no closure, waits for no device, and works on whatever part of a
matrix a rank holds (FSDP, tensor parallel): each rank measures its own parts, and the median is
taken over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..tensors.dtensor import local_parts

__all__ = ["Displacement", "Moved", "are_pretrained"]

SIDE = 64
"""A sample of a matrix: the values at so many evenly spaced rows and columns."""
PRETRAINED = 3.5
"""Standard errors, in the mean over matrices, by which rows or columns of weights that are trained
differ more in size than random numbers would. Fresh models have -0.5 to 3.1, models that were
trained 3.9 to 2000."""
LOWEST, BINS, PER_OCTAVE = -24, 256, 8
"""Ratios are counted in bins from 2^LOWEST on, which ranks can add up."""

Tensors = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Moved:
    """What `Displacement.read` gives, the same on every rank."""

    median: float | None
    """Over all matrices; None if there are none, infinity where weights are not finite."""
    roughness: float
    """Of the first weights, for `are_pretrained`."""


def are_pretrained(moved: Moved) -> bool:
    """Were the first weights trained already? Then rows and columns differ in size."""
    return moved.roughness > PRETRAINED


class Displacement:
    """Of the weights since it was made.

    Args:
        tensors: gives the weights as the optimizer steps them (masters, where it has any). Only
            those with two dimensions or more count, and those that are not all 0 at first, such
            as one half of a low-rank adapter.
        names: of these tensors, for `by_layer`.
    """

    def __init__(self, tensors: Tensors, names: Sequence[str] = ()) -> None:
        self._tensors, self._names = tensors, names
        self._first = [_sample(part) for part in self._parts()]

    def _parts(self) -> list[torch.Tensor]:
        held = self._tensors()
        return [
            part for tensor, part in zip(held, local_parts(held), strict=True) if _counts(tensor)
        ]

    @torch.no_grad()
    def ratios(self) -> list[torch.Tensor]:
        """By matrix, 0-d float32: |change| / |first weights|; NaN where the first are all 0."""
        now = [_sample(part) for part in self._parts()]
        return [(a - b).norm() / b.norm() for a, b in zip(now, self._first, strict=True)]

    @torch.no_grad()
    def row(self, ratios: Sequence[torch.Tensor]) -> torch.Tensor:
        """(BINS + 3,) float64, to be added up over ranks: how many ratios are in each bin, how many
        are not finite, and sum and number of the first weights' roughness."""
        if not ratios:
            return torch.zeros(BINS + 3, dtype=torch.float64)
        device = ratios[0].device  # a model may lie on several
        found = torch.stack([ratio.to(device) for ratio in ratios])
        ours = torch.stack([(first.norm() > 0).to(device) for first in self._first])
        finite = ours & found.isfinite()
        bins = ((found.clamp(min=1e-30).log2() - LOWEST) * PER_OCTAVE).nan_to_num().long()
        bins = bins.clamp(0, BINS - 1)
        counts = (bins[:, None] == torch.arange(BINS, device=found.device)) & finite[:, None]
        rough = torch.stack([_roughness(first).to(device) for first in self._first])
        known = rough.isfinite()
        more = torch.stack([(ours & ~finite).sum(), rough.where(known, 0.0).sum(), known.sum()])
        return torch.cat([counts.sum(0), more]).cpu().double()  # some devices have no float64

    @staticmethod
    def read(row: Sequence[float]) -> Moved:
        """Of rows that were added up."""
        counts, (broken, rough, known) = row[:BINS], row[BINS:]
        half, below = (sum(counts) + broken) / 2, 0.0
        roughness = rough / known if known else 0.0
        if not half:
            return Moved(None, roughness)
        for number, count in enumerate(counts):
            if count and below + count >= half:
                place = number + (half - below) / count
                median = 2.0 ** (LOWEST + place / PER_OCTAVE) if number else 0.0
                return Moved(median, roughness)
            below += count
        return Moved(math.inf, roughness)

    def by_layer(self, ratios: Sequence[torch.Tensor]) -> Mapping[str, float]:
        """Of this rank's own parts, by name; waits for the device."""
        names = [name for name, tensor in zip(self._names, self._tensors(), strict=False)
                 if _counts(tensor)]  # fmt: skip
        values = torch.stack(list(ratios)).tolist() if ratios else []
        return dict(zip(names, values, strict=False))


def _counts(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.is_floating_point()


@torch.no_grad()
def _sample(part: torch.Tensor) -> torch.Tensor:
    """(rows, columns) float32, at most `SIDE` each. A single 0, which does not count, of an empty
    part, and of a tensor subclass from which nothing can be picked."""
    nothing = torch.zeros(1, 1, device=part.device)
    if not part.numel():
        return nothing
    try:
        matrix = part.flatten(1)
        picks = [torch.arange(n, device=part.device) for n in (min(SIDE, s) for s in matrix.shape)]
        rows, columns = (
            pick * size // len(pick) for pick, size in zip(picks, matrix.shape, strict=True)
        )
        return matrix[rows[:, None], columns].float()
    except NotImplementedError:
        return nothing


def _roughness(sample: torch.Tensor) -> torch.Tensor:
    """By how many standard errors the mean squares of rows, or of columns, differ more than those
    of independent numbers; NaN for a sample that is too small or constant."""
    squares = sample.square()
    variance = squares.var(correction=0)
    scores = [
        (side.mean(1).var() / (variance / side.shape[1]) - 1) * math.sqrt((side.shape[0] - 1) / 2)
        for side in (squares, squares.t())
        if min(side.shape) >= 4
    ]
    if not scores or sample.numel() < SIDE:
        return sample.new_full((), math.nan)
    score = torch.stack(scores).max()
    return score.where(variance > 0, math.nan)
