"""`Sync`: when and how replicas are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ..core.clock import QuadraticPeriod
from ..core.validate import whole, within
from .base import Averaging, Plain
from .buckets import DEFAULT_BUCKET_BYTES

__all__ = ["MOMENTS", "Sync", "Tied"]

MOMENTS = ("keep", "average", "reset")
"""What may become of the optimizer's moments at an average (hdet/run/moments.py)."""

Tied = tuple[torch.Tensor, dist.ProcessGroup]
"""A tensor of which each rank of a group holds a copy, such as an embedding on the first and the
last stage of a pipeline."""


@dataclass(frozen=True, eq=False)
class Sync:
    """When and how replicas are averaged: ``Ensemble(..., sync=hdet.Sync(50))``.

    Args:
        every: T, optimizer steps between averages, >= 1, or a `QuadraticPeriod`. The end of the run
            ends a cycle, so that ``every=total_steps`` averages once, at the end.
        converge: the way of averaging, from hdet.converge (docs/converge.md tells when another one
            pays).
        gradients: ``"shared"``: all replicas step with the same all-reduced gradient. ``"local"``:
            each with its own, so that nothing is sent between averages (DDP inside ``no_sync()``,
            or a one-dimensional FSDP mesh for each replica); then ``moments`` is needed. The first
            step checks which of them it is.
        moments: with local gradients, what becomes of the optimizer's moments at an average:
            ``"keep"``, ``"average"`` or ``"reset"`` (hdet/run/moments.py tells what follows from
            each). Needed with shared ones, too, if a knob makes moments differ (betas, clipping):
            then ``"average"`` or ``"reset"``.
        begin: with local gradients, the optimizer step from which they are local, or the part of
            the run before it, a float in (0, 1) (post-local SGD, Lin et al. 2018, arXiv 1808.07217;
            with one average at the end SWAP, arXiv 2001.02312). Until then replicas train alike, as
            data parallelism does: without averages, spread, or outer steps, and nothing controls;
            an AutoLR that searches puts it off. Gradients are averaged by the model's
            DistributedDataParallel, over replicas of one process each, whose all-reduce is turned
            off there: leave ``no_sync()`` out.
        buffers: further floating-point tensors to average (running statistics of BatchNorm), or a
            module: all it has at the time, but for those in 8 bits, also where a forward pass has
            put a new tensor in a buffer's place, which a list of tensors would miss. Co-resident
            replicas share theirs.
        tied: (tensor, group) for each parameter of which several ranks of one replica hold a copy,
            such as an embedding on the first and the last pipeline stage: after each average it is
            sent from the group's first rank, so that copies stay equal bitwise.
        refresh: called whenever parameters were written outside of ``optimizer.step()``; whoever
            keeps a model beside the parameters that the optimizer has (Megatron's float32 masters)
            copies them there. FSDP2 modules given as ``buffers``, to an `AutoLR` or to a
            `ProbeController` are resharded without it.
        bucket_bytes: extra memory of the average, in bytes: two buckets of half as many.

    Raises:
        TypeError: an object of another kind.
        ValueError: a value that cannot be used. Both name the argument and the remedy.

    Example::

        sync = hdet.Sync(50, converge=hdet.converge.Compressed("bf16"))
        ensemble = hdet.Ensemble(optimizer, scheduler, sync=sync)
    """

    every: int | QuadraticPeriod = 1000
    _: KW_ONLY
    converge: Averaging = field(default_factory=Plain)
    gradients: str = "shared"
    moments: str | None = None
    begin: int | float = 0
    buffers: Iterable[torch.Tensor] | nn.Module = ()
    tied: Sequence[Tied] = ()
    refresh: Callable[[], object] | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.every, QuadraticPeriod):
            whole(self.every, "every", of="steps")
        if isinstance(self.begin, float):
            within(self.begin, "begin", "(0, 1)", "a float is a part of the run, an int a step")
        else:
            whole(self.begin, "begin", 0, of="steps")
        if self.begin and self.gradients != "local":
            raise ValueError(
                f"begin is {self.begin!r}, from where each replica has its own gradients: pass "
                "gradients='local' and a choice of moments, or leave begin out"
            )
        if self.gradients not in ("shared", "local"):
            raise ValueError(
                "gradients must be 'shared' (all-reduced every step, as under DDP) or 'local' "
                f"(each replica its own, as under no_sync), got {self.gradients!r}"
            )
        if self.gradients == "local" and self.moments not in MOMENTS:
            raise ValueError(
                f"moments must be one of {', '.join(map(repr, MOMENTS))} with gradients='local', "
                f"got {self.moments!r}: replicas' moments "
                "differ, and what becomes of them at an average is a choice (docs/local.md)"
            )
        if not isinstance(self.converge, Averaging):
            raise TypeError(
                "converge must be a way of averaging such as hdet.converge.Plain(), got "
                f"{self.converge!r}"
            )
        if self.refresh is not None and not callable(self.refresh):
            raise TypeError(
                f"refresh must be callable as refresh(), got {type(self.refresh).__name__}"
            )

    @property
    def shortest(self) -> int:
        """T, or the least one."""
        return self.every.least if isinstance(self.every, QuadraticPeriod) else self.every
