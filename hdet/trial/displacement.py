"""How far training moves the weights: |change| / |first weights| of each matrix, from samples; of
each vector where no matrix is trained.

It needs no copy of the model and no closure, and works on whatever part of a matrix a rank holds
(FSDP, tensor parallel): each rank measures its own parts, and the median is taken over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ..replicas import Replicas
from ..tensors.dtensor import local_parts

__all__ = ["Displacement", "Ratios", "medians"]

SIDE = 64  # a sample of a matrix: the values at so many evenly spaced rows and columns
PRETRAINED, ROUGHEST = 3.5, 12.0
"""Standard errors, in the mean over matrices, by which rows or columns of weights that are trained
differ more in size than random numbers would; and the most that a matrix counts for: a table of
sinusoids among random matrices is fresh."""
# Ratios are counted in bins from 2^LOWEST on, which ranks can add up; in the last one, those that
# are not finite.
LOWEST, BINS, PER_OCTAVE = -24, 256, 8

Ratios = Mapping[tuple[bool, str], torch.Tensor]
"""|change| / |first weights| by (is it a vector?, name): 0-d float32, on the weight's device."""


class Displacement:
    """Of the weights since it was made.

    Args:
        weights: gives them by name, as the optimizer steps them (masters, where it has any). Those
            that are all 0 at first do not count, such as one half of a low-rank adapter.
    """

    def __init__(self, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._weights = weights
        self._first = {name: own for name, own in self._samples().items() if own.norm() > 0}

    def _samples(self) -> dict[tuple[bool, str], torch.Tensor]:
        tensors = {
            (tensor.dim() < 2, name): tensor
            for name, tensor in self._weights().items()
            if tensor.is_floating_point()
        }
        return dict(zip(tensors, map(_sample, local_parts([*tensors.values()])), strict=True))

    def ratios(self) -> Ratios:
        """Of this rank's own parts, as they are now. Does not wait for the device."""
        now = self._samples()
        return {name: (now[name] - first).norm() / first.norm()
                for name, first in self._first.items()}  # fmt: skip

    def is_pretrained(self, replicas: Replicas) -> bool:
        """Were the first weights trained already? Then rows and columns differ in size. One
        collective."""
        known = [min(score, ROUGHEST) for first in self._first.values()
                 if math.isfinite(score := _roughness(first.cpu()))]  # fmt: skip
        row = torch.tensor([sum(known), len(known)], dtype=torch.float64)
        total, count = replicas.sum_rows(row, purpose="first weights").sum(0).tolist()
        return count > 0 and total / count > PRETRAINED


def medians(replicas: Replicas, *of: Ratios) -> list[float | None]:
    """Of each of some `Ratios`, together with those of the other ranks: one collective, in which a
    rank without ratios takes part all the same.

    Returns:
        Of matrices; of vectors where no rank has a matrix. None where there are none, infinity
        where the median one is not finite.
    """
    if not of:
        return []
    row = torch.cat([_histogram(ratios, kind) for ratios in of for kind in (False, True)])
    total = replicas.sum_rows(row, purpose="displacements").sum(0).view(len(of), 2, BINS + 1)
    return [_median(of_matrices if sum(of_matrices) else of_vectors)
            for of_matrices, of_vectors in total.tolist()]  # fmt: skip


def _histogram(ratios: Ratios, of_vectors: bool) -> torch.Tensor:
    """(BINS + 1,) float64 on the CPU."""
    chosen = [ratio.cpu() for (is_vector, _), ratio in ratios.items() if is_vector == of_vectors]
    values = torch.stack(chosen) if chosen else torch.empty(0)
    bins = (values.clamp(min=1e-30).log2() - LOWEST) * PER_OCTAVE
    bins = bins.nan_to_num().long().clamp(0, BINS - 1).where(values.isfinite(), BINS)
    return torch.bincount(bins, minlength=BINS + 1).double()


def _median(counts: Sequence[float]) -> float | None:
    half, below = sum(counts) / 2, 0.0
    for number, count in enumerate(counts):
        if count and below + count >= half:
            octave = (number + (half - below) / count) / PER_OCTAVE
            return math.inf if number == BINS else 2.0 ** (LOWEST + octave) if number else 0.0
        below += count
    return None


def _sample(part: torch.Tensor) -> torch.Tensor:
    """(rows, columns) float32, at most `SIDE` each; of a vector one row of at most `SIDE` ** 2. A
    single 0, which does not count, of an empty part, and of a tensor subclass from which nothing
    can be picked."""
    nothing = torch.zeros(1, 1, device=part.device)
    if not part.numel():
        return nothing
    try:
        matrix, most = (part.flatten(1), SIDE) if part.dim() > 1 else (part.reshape(1, -1), SIDE**2)
        rows, columns = (
            torch.arange(min(most, size), device=part.device) * size // min(most, size)
            for size in matrix.shape
        )
        return matrix[rows[:, None], columns].float()
    except NotImplementedError:
        return nothing


def _roughness(sample: torch.Tensor) -> float:
    """By how many standard errors the mean squares of rows, or of columns, differ more than those
    of independent numbers; NaN for a sample that is too small or constant. Training leaves no two
    rows alike: those that are, or are 0, were made so (the A of a state space, padding)."""
    sample = sample[sample.any(1)][:, sample.any(0)]
    if sample.numel():
        sample = sample.unique(dim=0).unique(dim=1)
    if min(sample.shape) < 4 or sample.numel() < SIDE:
        return math.nan
    squares = sample.square()
    variance = squares.var(correction=0)
    return max(
        float((side.mean(1).var() / (variance / side.shape[1]) - 1) * ((len(side) - 1) / 2) ** 0.5)
        for side in (squares, squares.t())
    )
