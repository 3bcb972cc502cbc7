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

from ..replicas import Replicas
from ..tensors.dtensor import local_parts

__all__ = ["Displacement", "Moved", "Ratios", "name_outliers"]

SIDE = 64  # a sample of a matrix: the values at so many evenly spaced rows and columns
PRETRAINED = 3.5
"""Standard errors, in the mean over matrices, by which rows or columns of weights that are trained
differ more in size than random numbers would. Fresh models have -0.5 to 3.1, models that were
trained 3.9 to 2000."""
OUTLIER = 8  # factor by which a layer moves more or less than the median one, to be named
# Ratios are counted in bins from 2^LOWEST on, which ranks can add up. A rank's row has the counts,
# how many ratios are not finite, and sum and number of the first weights' roughness.
LOWEST, BINS, PER_OCTAVE = -24, 256, 8
WIDTH = BINS + 3

Ratios = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Moved:
    """What was measured on all ranks, the same on each.

    Attributes:
        median: over all matrices; None if there are none, infinity where weights are not finite.
        pretrained: were the first weights trained already? Then rows and columns differ in size.
    """

    median: float | None
    pretrained: bool


class Displacement:
    """Of the weights since it was made.

    Args:
        tensors: gives the weights as the optimizer steps them (masters, where it has any). Only
            those with two dimensions or more count, and those that are not all 0 at first, such
            as one half of a low-rank adapter.
        names: of these tensors, for `by_layer`.
    """

    def __init__(
        self, tensors: Callable[[], Sequence[torch.Tensor]], names: Sequence[str] = ()
    ) -> None:
        self._tensors, self._names = tensors, names
        self._first = self._samples()

    def _samples(self) -> list[torch.Tensor]:
        held = self._tensors()
        pairs = zip(held, local_parts(held), strict=True)
        return [_sample(part) for tensor, part in pairs if _is_matrix(tensor)]

    @torch.no_grad()
    def ratios(self) -> Ratios:
        """By matrix, 0-d float32: |change| / |first weights|; NaN where the first are all 0."""
        pairs = zip(self._samples(), self._first, strict=True)
        return [(now - first).norm() / first.norm() for now, first in pairs]

    def over_ranks(self, replicas: Replicas, *of: Ratios) -> list[Moved]:
        """What each of some `ratios` says, together with those of the other ranks: one collective.
        Without ratios, a rank takes part in it all the same."""
        row = torch.cat([self._row(ratios) for ratios in of])
        total = replicas.sum_rows(row).sum(0).tolist()
        return [_read(total[i * WIDTH : (i + 1) * WIDTH]) for i in range(len(of))]

    def by_layer(self, ratios: Ratios) -> Mapping[str, float]:
        """Of this rank's own parts, by name; waits for the device."""
        pairs = zip(self._names, self._tensors(), strict=False)
        names = [name for name, tensor in pairs if _is_matrix(tensor)]
        values = torch.stack(list(ratios)).tolist() if ratios else []
        return dict(zip(names, values, strict=False))

    @torch.no_grad()
    def _row(self, ratios: Ratios) -> torch.Tensor:
        """(WIDTH,) float64 on the CPU."""
        if not ratios:
            return torch.zeros(WIDTH, dtype=torch.float64)
        device = ratios[0].device  # a model may lie on several
        each = torch.stack([ratio.to(device) for ratio in ratios])
        ours = torch.stack([(first.norm() > 0).to(device) for first in self._first])
        rough = torch.stack([_roughness(first).to(device) for first in self._first])
        finite, known = ours & each.isfinite(), rough.isfinite()
        bins = (each.clamp(min=1e-30).log2() - LOWEST) * PER_OCTAVE
        bins = bins.nan_to_num().long().clamp(0, BINS - 1)
        counts = (bins[:, None] == torch.arange(BINS, device=device)) & finite[:, None]
        more = torch.stack([(ours & ~finite).sum(), rough.where(known, 0.0).sum(), known.sum()])
        return torch.cat([counts.sum(0), more]).cpu().double()  # some devices have no float64


def name_outliers(layers: Mapping[str, float]) -> str:
    """A sentence on layers that move far less or far more than the others; empty without any."""
    known = sorted(value for value in layers.values() if 0 < value < math.inf)
    if len(known) < 3:
        return ""
    middle = known[len(known) // 2]
    far = sorted(
        (-x, name) for name, x in layers.items() if x > OUTLIER * middle or 0 < x < middle / OUTLIER
    )
    named = ", ".join(f"{name} by {-x:.2g}" for x, name in far[:4])
    return f"the median matrix moved by {middle:.2g} of its size, but {named}" if named else ""


def _read(row: Sequence[float]) -> Moved:
    """Of rows that were added up."""
    counts, (broken, rough, known) = row[:BINS], row[BINS:]
    half, below = (sum(counts) + broken) / 2, 0.0
    pretrained = known > 0 and rough / known > PRETRAINED
    if not half:
        return Moved(None, pretrained)
    for number, count in enumerate(counts):
        if count and below + count >= half:
            octave = (number + (half - below) / count) / PER_OCTAVE
            return Moved(2.0 ** (LOWEST + octave) if number else 0.0, pretrained)
        below += count
    return Moved(math.inf, pretrained)


def _is_matrix(tensor: torch.Tensor) -> bool:
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
        rows, columns = (
            torch.arange(min(SIDE, size), device=part.device) * size // min(SIDE, size)
            for size in matrix.shape
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
    return torch.stack(scores).max().where(variance > 0, math.nan)
