"""The probe: every replica scores the same mini-batches at its cycle-averaged weights (docs/method.md).

Averaging a replica's weights over the cycle takes away the noise that makes a smaller rate look better for the moment;
scoring all replicas on the same mini-batches takes away the noise of the data. What remains is the direction.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import truediv
from typing import Any

import torch
from torch import nn

from .converge import Masters, digest
from .core.controllers import ProbeRule
from .core.controllers.base import RuledController
from .kernels import PairPlan
from .kernels.checks import FLOATS
from .optim.finish import values_to
from .ranges import ranged
from .shards import local_parts, reshard

__all__ = ["CycleAverage", "ProbeController", "undisturbed"]


class CycleAverage:
    """Running mean of some tensors, in place: one more copy of the parameters, at least in float32.

    ``masters``: gives the master of each tensor or None, asked at every sample; the mean is that of the masters' values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], masters: Masters | None = None) -> None:
        self.tensors = list(tensors)
        # In 16 bits the n-th sample, which counts 1 / n, would mostly be rounded away.
        self.means = [torch.empty_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in local_parts(self.tensors)]
        self.samples = 0
        self._masters = masters or (lambda: [None] * len(self.tensors))
        self._addresses: list[int] = []
        self._plans: list[PairPlan] = []

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        self.samples += 1
        self._plan()
        for plan in self._plans:
            plan.lerp(1.0 / self.samples)  # 1 copies

    def _plan(self) -> None:
        """One plan for each device, and for what only torch can read; made anew if a tensor has moved."""
        masters = [None if m is None else local_parts([m])[0] for m in self._masters()]
        own = local_parts(self.tensors)
        addresses = [t.data_ptr() for pair in zip(own, masters, strict=True) for t in pair if t is not None]
        if self._plans and addresses == self._addresses:
            return
        kinds: dict[tuple[torch.device, bool], list[int]] = {}
        for i, (tensor, mean) in enumerate(zip(own, self.means, strict=True)):
            native = tensor.dtype in FLOATS and tensor.is_contiguous() and tensor.device.type in ("cpu", "cuda")
            kinds.setdefault((mean.device, native), []).append(i)
        self._addresses, self._plans = addresses, []
        for (_, native), places in kinds.items():
            means, tensors = [self.means[i] for i in places], [own[i] for i in places]
            self._plans.append(values_to(means, tensors, [masters[i] for i in places], "auto" if native else "torch"))

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap contents, addresses stay: graphs and flat buffers that point at the parameters remain valid. Twice restores the tensors."""
        for tensor, mean in zip(local_parts(self.tensors), self.means, strict=True):
            held = tensor.clone()
            tensor.copy_(mean)
            mean.copy_(held)

    def reset(self) -> None:
        self.samples = 0


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; afterwards module modes, buffers and every random state are exactly as before.

    Covers torch (CPU and CUDA), Python's ``random`` and, if it is loaded, numpy's global state.
    """
    modes = [(module, module.training) for module in model.modules()]
    # By name too: a module may put a new tensor in the place of a buffer.
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    python_state, numpy_state = random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(torch.no_grad())
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                module._buffers[name] = buffer
                if buffer is not None and content is not None:
                    buffer.copy_(content)
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)


class ProbeController(RuledController):
    """Scores replicas on common mini-batches and lets a `ProbeRule` decide. The recommended controller.

    Args:
        loss_fn: ``loss_fn(model, batch)`` -> scalar tensor (nats, or any unit: the rule is scale-free). Called in eval mode,
            without gradients, on the bare module (a DistributedDataParallel wrapper is taken off: its collectives have no place here).
            All ranks of a replica call it together, so a model that is split over them runs as it does in training; a rank that
            does not see the loss (a pipeline stage before the last) returns None.
        batches: a list of mini-batches, of which each cycle takes the next ``chunks``; or ``batches(cycle)`` -> at least ``chunks``
            of them. They must be the SAME on every replica (checked each cycle) and should not be validation data.
        chunks: mini-batches per cycle, >= 2; the error of the slope comes from their scatter.
        model: the module whose parameters the optimizer trains.
        rule: turns scores into decisions; see `ProbeRule` for its settings.
        average_every: sample the cycle average every so many steps.
        average_from: part of the cycle, in [0, 1), that is left out of the average at its beginning.
        freeze_after: see `BaseController`; of a rule of your own it is the rule's.
        held_out: you say that ``batches`` are not trained on, and that ``loss_fn`` is the objective that counts, without smoothing, decay
            or augmentation. Without it no knob may be explored of which training losses are no honest judge (dropout, weight decay ...).

    Costs ``chunks`` forward passes per replica and cycle, one copy of the parameters, and no gradient. A replica whose probe is
    NaN or infinite is left out of the decision.
    """

    name = "probe"
    needs_probe = True
    measures = "probes"

    def __init__(
        self,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        batches: Sequence[Any] | Callable[[int], Sequence[Any]],
        chunks: int = 8,
        *,
        model: nn.Module,
        rule: ProbeRule | None = None,
        average_every: int = 5,
        average_from: float = 0.0,
        freeze_after: float | None = None,
        held_out: bool = False,
    ) -> None:
        if not isinstance(held_out, bool):
            raise ValueError(f"held_out must be True or False, got {held_out!r}: pass the held-out mini-batches as batches")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable as loss_fn(model, batch), got {type(loss_fn).__name__}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not callable(batches) and not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
            raise TypeError(
                f"batches must be a list of mini-batches or a function of the cycle, got {type(batches).__name__}: list(...) it first"
            )
        if rule is not None and not hasattr(rule, "update"):
            raise TypeError(f"rule must be a ProbeRule, got {type(rule).__name__}")
        if rule is not None and freeze_after is not None:
            raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, ProbeRule(freeze_after=...)")
        if not isinstance(chunks, int) or chunks < 2:
            raise ValueError(
                f"chunks must be a whole number >= 2, got {chunks!r}: the slope's error comes from the scatter over mini-batches"
            )
        if not isinstance(average_every, int) or average_every < 1:
            raise ValueError(f"average_every must be a whole number of steps >= 1, got {average_every!r}")
        if not isinstance(average_from, (int, float)) or not 0 <= average_from < 1:
            raise ValueError(f"average_from must lie in [0, 1), got {average_from!r}")
        if not callable(batches) and len(batches) < chunks:
            raise ValueError(f"batches holds {len(batches)} mini-batches, chunks asks for {chunks} per cycle: pass more, or lower chunks")
        self.loss_fn, self.batches, self.chunks = loss_fn, batches, chunks
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        super().__init__(ProbeRule(freeze_after=freeze_after) if rule is None else rule)
        self.average_every, self.average_from, self.held_out = average_every, average_from, held_out
        self._averages: list[CycleAverage] = []

    # -- called by the Ensemble ------------------------------------------------------------------------------------------

    @property
    def row_width(self) -> int:
        """Numbers per replica in the slots: how many ranks have seen losses, their sums by chunk, and the mini-batches' digest."""
        return self.chunks + 2

    def watch(self, *replicas: Sequence[torch.Tensor], masters: Sequence[Masters] | None = None, knobs: Sequence[Any] = ()) -> None:
        """The parameters to average over the cycle: those the optimizer trains, of each replica in this process; and their masters.

        Raises:
            ValueError: none of them is the model's, so the probe would score the same weights for ever.
        """
        own = {id(p) for p in self.model.parameters()}
        if not any(id(p) in own for p in replicas[0]):
            raise ValueError("the ProbeController's model has no parameter of this optimizer: pass the module that it trains")
        self._averages = [CycleAverage(own, None if masters is None else masters[k]) for k, own in enumerate(replicas)]

    def sample(self, position: int, length: int) -> None:
        """After step ``position`` (1 .. ``length``) of a cycle of ``length`` steps; its last step is always a sample."""
        if position > self.average_from * length and (length - position) % self.average_every == 0:
            for average in self._averages:
                average.add()

    def forget(self) -> None:
        """The window begins anew (a cycle has begun, or replicas were averaged ahead of time)."""
        for average in self._averages:
            average.reset()

    @ranged("hdet.probe")
    def measure(self, cycle: int, place: int = 0) -> torch.Tensor:
        """(row_width,) float64 on the model's device: 1 and the chunk losses at the cycle-averaged weights (zeros where this rank sees
        none), then the mini-batches' digest.

        ``place``: which of the watched replicas; the model must have its weights now.
        """
        average = self._averages[place]
        if not average.samples:
            average.add()  # a cycle cut too short for a sample: the weights as they are
        with undisturbed(self.model):
            chosen = self._choose(cycle)
            average.exchange()
            reshard(self.model)
            try:
                losses = [self.loss_fn(self.model, batch) for batch in chosen]
            finally:
                average.exchange()
                reshard(self.model)
        marks = digest(list(_tensors_in(chosen)))[1:]
        if all(loss is None for loss in losses):
            return torch.cat(
                [torch.zeros(1 + self.chunks, dtype=torch.float64, device=average.means[0].device), marks.to(average.means[0].device)]
            )
        row = torch.stack([_scalar(loss) for loss in losses])
        return torch.cat([torch.ones_like(row[:1]), row, marks.to(row.device)])

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Added-up rows -> chunk losses per replica.

        Raises:
            ValueError: no rank of a replica has seen a loss.
            RuntimeError: replicas scored different mini-batches, so their losses cannot be compared.
        """
        seen, *chunks, marks = zip(*rows, strict=True)  # columns: of a thousand rows each number by itself would cost too much
        if len(set(marks)) > 1:
            raise RuntimeError(
                "the replicas were given different probe batches: make `batches` a function of the cycle alone (not of the rank or a shared generator)"
            )
        if not all(seen):
            raise ValueError(
                f"loss_fn returned None on every rank of replica {seen.index(0)}: the rank that sees the loss must return it as a tensor"
            )
        return list(map(list, zip(*(map(truediv, chunk, seen) for chunk in chunks), strict=True)))

    def _choose(self, cycle: int) -> list[Any]:
        if callable(self.batches):
            chosen = list(self.batches(cycle))[: self.chunks]
            if len(chosen) < self.chunks:
                raise ValueError(f"batches({cycle}) returned {len(chosen)} mini-batches, chunks asks for {self.chunks}")
            return chosen
        return [self.batches[(cycle * self.chunks + i) % len(self.batches)] for i in range(self.chunks)]


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number as a tensor, got {shape}: return the mean over the batch")
    return loss.detach().double().reshape(())


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors_in(value)
