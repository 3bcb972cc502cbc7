"""The line on real tensors: anchor, average, and losses at any multiplier between and beyond (the rule: core/controllers/line.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .converge import Masters
from .core.controllers import Decision, LineRule
from .core.controllers.base import RuledController
from .core.controllers.peak import LARGEST_T
from .probe import undisturbed
from .ranges import ranged
from .replicas import Replicas
from .shards import local_parts, reshard

__all__ = ["LineController", "Way"]

LARGEST_LOSS = 1e30
"""What a loss that is not finite is taken for."""

Closure = Callable[[], Any]


class Way:
    """Where an interval began and the mean of where it has been since its middle, of some tensors; and any point on the line through both.

    Two copies of the tensors: float32 (or better) beside them, ``dtype`` and in the host's memory where ``place`` is "host".
    """

    def __init__(self, tensors: Sequence[torch.Tensor], masters: Masters | None, dtype: torch.dtype | None, place: str) -> None:
        self._tensors, self._masters = list(tensors), masters or (lambda: [None] * len(tensors))
        self._anchor, self._mean = ([_room(t, dtype, place) for t in local_parts(self._tensors)] for _ in range(2))
        self.samples = 0

    @torch.no_grad()
    def begin(self) -> None:
        for anchor, now in zip(self._anchor, self._values(), strict=True):
            anchor.copy_(now)
        self.samples = 0

    def begin_mean(self) -> None:
        """The anchor stays, the mean begins anew."""
        self.samples = 0

    @torch.no_grad()
    def add(self) -> None:
        """mean <- mean + (theta - mean) / n."""
        self.samples += 1
        values = self._values()
        if self.samples == 1:  # no lerp: whatever stands there may be NaN
            for mean, now in zip(self._mean, values, strict=True):
                mean.copy_(now)
            return
        if all(m.dtype == v.dtype and m.device == v.device for m, v in zip(self._mean, values, strict=True)):
            torch._foreach_lerp_(self._mean, values, 1.0 / self.samples)
            return
        for mean, now in zip(self._mean, values, strict=True):
            mean.copy_(torch.lerp(mean.to(now.device, torch.float32), now.float(), 1.0 / self.samples))

    @torch.no_grad()
    def take_back(self) -> None:
        """The tensors as they were at the anchor, in place."""
        for tensor, anchor in zip(local_parts(self._tensors), self._anchor, strict=True):
            tensor.copy_(anchor)

    @contextmanager
    def scored(self) -> Iterator[Callable[[Sequence[float]], None]]:
        """Gives ``put``: ``put(rho)`` makes the tensors anchor + rho[i] * (mean - anchor); afterwards they are what they were, to the bit.

        A tensor whose mean has its dtype is kept in the mean's memory meanwhile, so there is no third copy (and the mean is lost): not in
        16 bits, where the way from point to point would be lost in rounding.
        """
        tensors = local_parts(self._tensors)
        swapped = [m.dtype == t.dtype and t.itemsize >= 4 for m, t in zip(self._mean, tensors, strict=True)]
        kept = [None if s else t.detach().to(m.device, copy=True) for s, t, m in zip(swapped, tensors, self._mean, strict=True)]
        at = [1.0 if s else math.nan for s in swapped]
        aside: set[int] = set()
        with torch.no_grad():
            for swap, tensor, mean in zip(swapped, tensors, self._mean, strict=True):
                if swap:
                    _exchange(tensor, mean)
        try:
            yield lambda rho: self._put(tensors, at, aside, rho)
        finally:
            with torch.no_grad():
                for i in aside:
                    _exchange(tensors[i], self._anchor[i])
                for tensor, mean, own in zip(tensors, self._mean, kept, strict=True):
                    tensor.copy_(mean if own is None else own)
            self.samples = 0

    @torch.no_grad()
    def _put(self, tensors: list[torch.Tensor], at: list[float], aside: set[int], rho: Sequence[float]) -> None:
        """``at``: rho of the points that are there, NaN where the mean's memory still has the mean. ``aside``: the tensors that are at 0,
        where nothing is left of the direction: the point before is in the anchor's memory."""
        for i, (tensor, anchor) in enumerate(zip(tensors, self._anchor, strict=True)):
            if math.isnan(at[i]):
                mean = self._mean[i].to(tensor.device, torch.float32)
                tensor.copy_(torch.lerp(anchor.to(tensor.device).float(), mean, rho[i]))
                continue
            if (i in aside) != (rho[i] == 0):
                _exchange(tensor, anchor)
                aside ^= {i}
            if rho[i] not in (0, at[i]):
                origin = anchor.to(tensor.device)
                tensor.sub_(origin).mul_(rho[i] / at[i]).add_(origin)
                at[i] = rho[i]

    def _values(self) -> list[torch.Tensor]:
        """Masters where there are full ones: rounded weights stand still while they move."""
        return [
            m if m is not None and m.is_floating_point() else t
            for t, m in zip(local_parts(self._tensors), map(_local, self._masters()), strict=True)
        ]


class LineController(RuledController):
    """Scores multipliers that no replica has, on the current training batch: no probe data, no spread, N = 1 and every layout included.

    Each rank calls the closure of ``ensemble.step(loss, closure=...)`` at several points of the line from the interval's beginning through
    the average of its second half, and the differences, paired by example, are added up over ranks. Replicas train alike: the spread
    rests. Learning rates only, with shared gradients; several knobs (parameter groups) are scored one at a time.

    Args:
        model: whose losses the closure computes: it is in eval mode meanwhile, and buffers, modes and random states are afterwards what
            they were. None: the closure sees to that.
        rule: turns losses into decisions; see `LineRule` for its settings, and for the intervals.
        place: "device" or "host": where anchor and average live.
        dtype: of anchor and average; None: float32, or the parameters' own if that is wider. torch.bfloat16 halves them (and the weights
            that are kept meanwhile are then a copy for themselves); weights that are taken back are rounded to it.
        freeze_after: see `BaseController`; of a rule of your own it is the rule's.

    The closure returns the losses of this rank's current batch, one for each example or sequence, shape (examples,), without a graph; or one
    number, where there are several ranks: the error comes from the scatter. None where this rank sees no loss. It is called at the ends
    of seven intervals in a run, about six times each: 1 to 2 % of a run of 1 000 steps, less of longer ones. Memory: two copies of
    the parameters.

    A checkpoint holds what has been learned; an interval that was under way begins anew at the resumed step.
    """

    name = "line"
    needs_replicas = False
    spreads = False

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        rule: LineRule | None = None,
        place: str = "device",
        dtype: torch.dtype | None = None,
        freeze_after: float | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        if rule is not None and not isinstance(rule, LineRule):
            raise TypeError(f"rule must be a LineRule, got {type(rule).__name__}")
        if rule is not None and freeze_after is not None:
            raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, LineRule(freeze_after=...)")
        if place not in ("device", "host"):
            raise ValueError(f"place must be 'device' or 'host' (where anchor and average live), got {place!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating-point dtype or None, got {dtype!r}")
        self.model, self.place, self.dtype = model, place, dtype
        super().__init__(LineRule(freeze_after=freeze_after) if rule is None else rule)
        self._way: Way | None = None
        self._values: list[float] = []  # by knob: mean over the samples, as a part of the schedule's peak

    # -- called by the Ensemble ------------------------------------------------------------------------------------------

    def follow_run(
        self, optimizer: Optimizer, masters: Callable[[Sequence[torch.Tensor]], Masters], knobs: Sequence[Any], total: int
    ) -> None:
        """Once, before the first step. ``masters``: of some tensors. ``total``: steps of the run.

        Raises:
            ValueError: a knob that is no learning rate: displacements do not scale with it.
        """
        for knob in knobs:
            if knob.key != "lr":
                raise ValueError(f"knob {knob.name!r} is no learning rate, and the line scales with no other: use a ProbeController")
        self._knobs, self._total = len(knobs), total
        owners = {index: k for k, knob in enumerate(knobs) for index in knob.indices}
        listed = [(p, owners[g]) for g, group in enumerate(optimizer.param_groups) if g in owners for p in group["params"]]
        tensors = [p for p, _ in listed]
        self._owner = [k for _, k in listed]
        self._make_way = lambda: Way(tensors, masters(tensors), self.dtype, self.place)
        self._begun: int | None = None

    def begin_anew(self) -> None:
        """Parameters were loaded, or a cycle was taken back: the interval begins anew, with the next step."""
        self._begun = None

    def depart(self, step: int) -> None:
        """Before the first optimizer step after ``step`` of them."""
        if self._begun is None and not self.idle:
            self._way = self._way or self._make_way()
            self._way.begin()
            self._begin(step)

    def sample(self, step: int, values: Sequence[float], interval: int) -> None:
        """After optimizer step ``step``, taken at these base values (by knob, as parts of their schedules' peaks). Decisions fall on
        multiples of ``interval``."""
        if self._begun is None or self.idle:
            return
        end = math.ceil(self.rule.next_end(self._total) / interval) * interval
        length = max(1, end - self._begun)
        stride = max(1, length // 100)
        if step > self._begun + length / 2 and (end - step) % stride == 0:
            way = self._way_or_fail()
            way.add()
            self._values = [mean + (value - mean) / way.samples for mean, value in zip(self._values, values, strict=True)]

    def is_due(self, step: int) -> bool:
        return self._begun is not None and step >= self.rule.next_end(self._total) and self._way_or_fail().samples > 0

    @contextmanager
    def lines(self, closure: Closure, replicas: Replicas) -> Iterator[list[_Line]]:
        """The lines of the interval that ends, by knob, to be read inside; afterwards the weights are what they were."""
        with self._way_or_fail().scored() as put, torch.no_grad():
            scores = _Scores(lambda rho: put([rho[k] for k in self._owner]), self._evaluate(closure), replicas, self._knobs)
            yield [_Line(k, value, scores) for k, value in enumerate(self._values)]

    def _evaluate(self, closure: Closure) -> Callable[[], torch.Tensor | None]:
        def evaluate() -> torch.Tensor | None:
            # The same random numbers at all points: dropout, if the closure has any, then cancels.
            with undisturbed(self.model) if self.model is not None else torch.random.fork_rng():
                if self.model is not None:
                    reshard(self.model)
                losses = closure()
            if losses is None or (isinstance(losses, torch.Tensor) and losses.numel() == 0):
                return None
            if not isinstance(losses, torch.Tensor) or losses.dim() > 1 or not losses.is_floating_point():
                what = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
                raise ValueError(f"closure must return losses as a tensor of shape (examples,), or one number as a tensor, got {what}")
            flat = losses.detach().reshape(-1).double()
            return torch.nan_to_num(flat, nan=LARGEST_LOSS, posinf=LARGEST_LOSS, neginf=LARGEST_LOSS).clamp(max=LARGEST_LOSS)

        return evaluate

    @ranged("hdet.line")
    def settle(self, step: int, decisions: Sequence[Decision]) -> bool:
        """After the decisions of `rule`: go on, or begin the next interval. Returns whether weights were taken back (moments are not)."""
        way = self._way_or_fail()
        back = any(decision.restart for decision in decisions)
        if back:
            way.take_back()
        if self.idle:  # for good, and the memory is free again
            self._way, self._begun = None, None
            return back
        if self.rule.keeps:
            self._values = [0.0] * self._knobs
            way.begin_mean()
            return back
        if not back:
            way.begin()
        way.begin_mean()
        self._begin(step)
        return back

    def _begin(self, step: int) -> None:
        self._begun, self._values = step, [0.0] * self._knobs

    def _way_or_fail(self) -> Way:
        assert self._way is not None, "follow_run comes first"
        return self._way


class _Scores:
    """Losses at points of the line: each point is evaluated once on this rank, each pair of points compared once over all ranks."""

    def __init__(
        self, put: Callable[[Sequence[float]], None], evaluate: Callable[[], torch.Tensor | None], replicas: Replicas, knobs: int
    ) -> None:
        self._put, self._evaluate, self._replicas, self._knobs = put, evaluate, replicas, knobs
        self._losses: dict[tuple[float, ...], torch.Tensor | None] = {}
        self._compared: dict[tuple[tuple[float, ...], tuple[float, ...]], tuple[float, float]] = {}

    def difference(self, k: int, a: float, b: float) -> tuple[float, float]:
        pair = (self._point(k, a), self._point(k, b))
        if pair not in self._compared:
            self._compared[pair] = self._compare(*pair)
        return self._compared[pair]

    def _point(self, k: int, rho: float) -> tuple[float, ...]:
        return tuple(rho if i == k else 1.0 for i in range(self._knobs))

    def _at(self, point: tuple[float, ...]) -> torch.Tensor | None:
        if point not in self._losses:
            self._put(point)
            self._losses[point] = self._evaluate()
        return self._losses[point]

    def _compare(self, a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float]:
        """Mean and t of the paired differences. One all_reduce of four numbers a replica.

        The ranks of one replica may see the same examples (tensor parallel) or others (context parallel); their sums are taken for
        the same, which at worst understates t.
        """
        at_b, at_a = self._at(b), self._at(a)
        if at_a is None or at_b is None:
            row = torch.zeros(4, dtype=torch.float64, device=self._device)
        else:
            d = at_a - at_b
            row = torch.stack([torch.ones_like(d[0]), d.new_tensor(float(len(d))), d.sum(), (d * d).sum()])
        rows = self._replicas.sum_rows(row).tolist()
        seen = [[x / row[0] for x in row[1:]] for row in rows if row[0] > 0]
        n, total, squares = (sum(column) for column in zip(*seen, strict=True)) if seen else (0.0, 0.0, 0.0)
        if n < 2:
            raise ValueError(
                f"the closure gave {n:g} losses over all ranks, but the error of a difference comes from the scatter over examples: return one loss for "
                "each example, e.g. cross_entropy(..., reduction='none').mean(-1)"
            )
        mean = total / n
        variance = max(squares / n - mean * mean, 0.0) * n / (n - 1)
        if variance == 0:
            return mean, math.copysign(LARGEST_T, mean) if mean else 0.0
        return mean, max(-LARGEST_T, min(LARGEST_T, mean / math.sqrt(variance / n)))

    @property
    def _device(self) -> torch.device:
        return next((x.device for x in self._losses.values() if x is not None), torch.device("cpu"))


class _Line:
    """`hdet.core.controllers.line.Line`."""

    def __init__(self, k: int, value: float, scores: _Scores) -> None:
        self.value, self._k, self._scores = value, k, scores

    def difference(self, a: float, b: float) -> tuple[float, float]:
        return self._scores.difference(self._k, a, b)


def _room(tensor: torch.Tensor, dtype: torch.dtype | None, place: str) -> torch.Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32) if dtype is None else dtype
    if place == "host" and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    return torch.empty_like(tensor, dtype=dtype)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Contents change places, bit for bit; devices may differ."""
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else local_parts([tensor])[0]
