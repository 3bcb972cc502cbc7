"""Losses of common mini-batches: every replica scores the same ones, at its cycle-averaged weights
(docs/method.md).

Averaging a replica's weights over the cycle takes away the noise that makes a smaller rate look
better for the moment; scoring all replicas on the same mini-batches takes away the noise of the
data. What remains is the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import truediv
from typing import Any

import torch
from torch import nn

from ..converge import digest
from ..core.validate import whole
from ..tensors.buffers import tensors_in
from ..tensors.dtensor import local_parts, reshard
from ..tensors.eval_mode import eval_mode
from ..tensors.profiling import ranged
from .measurement import Measurement, Watched
from .running_mean import RunningMean

__all__ = ["BatchLosses"]


class BatchLosses(Measurement):
    """[replica][chunk]: losses of mini-batches that are common to all replicas.

    Args:
        loss_fn: ``loss_fn(model, batch)`` -> scalar tensor. Called in eval mode, without gradients,
            on the bare module without a DistributedDataParallel wrapper. All ranks of a replica
            call it together; one that does not see the loss (a pipeline stage before the last)
            returns None.
        batches, chunks, model: as for a `ProbeController`.
        average_every: steps between samples of the average.
        place: "device" or "host": where averages live.

    Costs ``chunks`` forward passes per replica and cycle, no gradient, and one copy of the
    parameters in float32.
    """

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int,
        model: nn.Module,
        average_every: int = 5,
        place: str = "device",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
        if not callable(batches) and not hasattr(batches, "__getitem__"):
            raise TypeError(
                f"batches must be a list, or a function of the cycle, got {type(batches).__name__}:"
                " pass list(itertools.islice(loader, 8))"
            )
        whole(chunks, "chunks", 2, why="the slope's error comes from the scatter over mini-batches")
        if not callable(batches) and len(batches) < chunks:
            raise ValueError(
                f"batches holds {len(batches)} mini-batches, chunks asks for {chunks} per cycle: "
                "pass more, or lower chunks"
            )
        whole(average_every, "average_every", of="steps")
        if place not in ("device", "host"):
            raise ValueError(
                "place must be 'device' or 'host' (where copies of the weights live), got "
                f"{place!r}"
            )
        self.loss_fn, self.batches, self.chunks = loss_fn, batches, chunks
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        self.model: nn.Module = model
        self.average_every, self.place = average_every, place
        self._means: list[RunningMean] = []
        """[local replica], from the first sample on."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self.model]

    def watch(self, watched: Watched) -> None:
        """Raises ValueError if none of the optimizer's parameters is the model's."""
        own = {id(p) for p in self.model.parameters()}
        if not any(id(p) in own for p in watched.sets[0]):
            raise ValueError(
                "the ProbeController's model has no parameter of this optimizer: pass the module "
                "that it trains"
            )
        self.release()
        self._watched, self._device = watched, local_parts(watched.sets[0][:1])[0].device

    # -- a cycle -----------------------------------------------------------------------------------

    def reset(self) -> None:
        for mean in self._means:
            mean.samples = 0

    def release(self) -> None:
        self._means = []

    def sample(self, position: int, length: int) -> None:
        """The last step of a cycle is always a sample."""
        if (length - position) % self.average_every == 0:
            for mean in self._rooms():
                mean.add()

    def _rooms(self) -> list[RunningMean]:
        if not self._means:
            pairs = zip(self._watched.sets, self._watched.masters, strict=True)
            self._means = [RunningMean(*pair, self.place) for pair in pairs]
        return self._means

    @ranged("hdet.probe")
    def measure(self, cycle: int, slot: int = 0) -> torch.Tensor:
        """(chunks + 2,) float64: 1 and the chunk losses at this replica's averaged weights (zeros
        where this rank sees none), then the mini-batches' digest."""
        mean = self._rooms()[slot]
        if not mean.samples:  # a cycle cut too short for a sample: the weights as they are
            mean.add()
        with eval_mode(self.model):
            chosen = self._choose(cycle)
            mean.exchange()
            try:
                reshard(self.model)
                losses = [self.loss_fn(self.model, batch) for batch in chosen]
            finally:
                mean.exchange()
                reshard(self.model)
        marks = digest(list(tensors_in(chosen)))[1:]
        if all(loss is None for loss in losses):
            row = torch.zeros(1 + self.chunks, dtype=torch.float64, device=self._device)
        else:
            row = torch.stack([torch.ones_like(_scalar(losses[0])), *map(_scalar, losses)])
        return torch.cat([row, marks.to(row.device)])

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up rows -> chunk losses per replica. Raises ValueError if no rank of a replica has
        seen a loss, RuntimeError if replicas scored different mini-batches."""
        # By columns: of a thousand rows each number by itself would cost too much.
        seen, *chunks, marks = zip(*rows, strict=True)
        if len(set(marks)) > 1:
            raise RuntimeError(
                "the replicas were given different probe batches: make `batches` a function of the "
                "cycle alone (not of the rank or a shared generator)"
            )
        if not all(seen):
            raise ValueError(
                f"loss_fn returned None on every rank of replica {seen.index(0)}: the rank that "
                "sees the loss must return it as a tensor"
            )
        return list(map(list, zip(*(map(truediv, chunk, seen) for chunk in chunks), strict=True)))

    def _choose(self, cycle: int) -> list[Any]:
        if not callable(self.batches):
            first = cycle * self.chunks
            return [self.batches[(first + i) % len(self.batches)] for i in range(self.chunks)]
        chosen = list(self.batches(cycle))[: self.chunks]
        if len(chosen) < self.chunks:
            raise ValueError(
                f"batches({cycle}) returned {len(chosen)} mini-batches, chunks asks for "
                f"{self.chunks}"
            )
        return chosen


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return one number as a tensor, got {shape}: return the batch's mean"
        )
    return loss.detach().double().reshape(())
