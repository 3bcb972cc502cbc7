"""The torch backend: every operation in torch's own calls, on any device. The others are compared with it.

It mirrors csrc/core: hyper.h is `_derive`, rules.h the functions on `Many`. Each operation rounds once, as the native kernels do, so
the results have their bits wherever torch's arithmetic on a device is IEEE's. Hyperparameters, step counters and the verdict on
gradients stay on the device, so a step never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import rounding
from .checks import check_gradients, check_options, check_settings, check_shares, check_swap
from .interface import PLAIN, Column, StepOptions, StepSettings, StepTensors

_EMPTY_SUM = -0.0  # the neutral element of addition: -0 + 0 = 0, but -0 + -0 = -0
_COUNTER_BITS = 25  # float32 counts to 2^24


class Many:
    """Float32 tensors that go through the same arithmetic, in one multi-tensor call for each operation."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def _apply(self, function: Callable[..., Sequence[Tensor]], other: Many | Tensor) -> Many:
        return Many(function(self.tensors, other.tensors if isinstance(other, Many) else other))

    def __add__(self, other: Many | Tensor) -> Many:
        return self._apply(torch._foreach_add, other)

    def __sub__(self, other: Many) -> Many:
        return self._apply(torch._foreach_sub, other)

    def __mul__(self, other: Many | Tensor) -> Many:
        return self._apply(torch._foreach_mul, other)

    def __truediv__(self, other: Many) -> Many:
        return self._apply(torch._foreach_div, other)

    def sqrt(self) -> Many:
        if self.tensors[0].device.type == "cpu":  # torch's float32 root is not always the nearest number there
            return Many([x.double().sqrt().float() for x in self.tensors])
        return Many(torch._foreach_sqrt(self.tensors))

    def sign(self) -> Many:
        return Many(torch._foreach_sign(self.tensors))


def where(condition: Tensor, a: Many, b: Many) -> Many:
    return Many([torch.where(condition, x, y) for x, y in zip(a.tensors, b.tensors, strict=True)])


def lerp(a: Many, b: Many, weight: Tensor, rest: Tensor) -> Many:
    """a + weight * (b - a) from the end that is nearer."""
    way = b - a
    return where(weight < 0.5, a + way * weight, b - way * rest)


class Row(NamedTuple):
    """HyperRow of csrc/core/hyper.h; of one row, or of all rows at once."""

    gradient_scale: Tensor
    beta1: Tensor
    lerp1: Tensor
    beta2: Tensor
    lerp2: Tensor
    inv_sqrt_correction2: Tensor
    eps: Tensor
    coupled_decay: Tensor
    nesterov: Tensor
    step: Tensor
    step_size: Tensor  # [replica]
    decay: Tensor  # [replica]


def _adamw(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    m = lerp(m, g, row.lerp1, row.beta1)
    v = v * row.beta2 + g * row.lerp2 * g
    return m / (v.sqrt() * row.inv_sqrt_correction2 + row.eps), m, v


def _sgd(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    m = m * row.beta1 + g * row.lerp1
    return where(row.nesterov != 0, g + m * row.beta1, m), m, v


def _lion(row: Row, g: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    return lerp(m, g, row.lerp1, row.beta1).sign(), lerp(m, g, row.lerp2, row.beta2), v


def _direction(rule: str, row: Row, g: Many, p: Many, m: Many, v: Many) -> tuple[Many, Many, Many]:
    """u, which all replicas share, and the new moments. `p` is read where decay is part of the gradient."""
    if rule in ("adam", "sgd"):
        g = g + p * row.coupled_decay
    return {"adamw": _adamw, "adam": _adamw, "sgd": _sgd, "lion": _lion}[rule](row, g, m, v)


def _running_average(average: Many, param: Many, weight: Tensor) -> Many:
    return where(weight == 1, param, lerp(average, param, weight, 1 - weight))


def _weighted_sum(values: Sequence[Many], weights: Tensor) -> Many:
    """A replica of weight 0 is left out even where it holds NaN or infinity."""
    total = Many([torch.full_like(x, _EMPTY_SUM) for x in values[0].tensors])
    for value, weight in zip(values, weights, strict=True):
        total = where(weight == 0, total, total + value * weight)
    return total


def _wide(device: torch.device) -> torch.dtype:
    """What hyperparameters and sums of squares are computed in: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent by squaring: multiplications alone, in the order of the native kernels."""
    result, exponent = torch.ones_like(base), exponent.long()
    for bit in range(_COUNTER_BITS):
        result = torch.where((exponent >> bit & 1) == 1, result * base, result)
        base = base * base
    return result


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The global norm, wide. A tensor's norm and the norm of the norms: no copy in a wider type is made."""
    wide = _wide(tensors[0].device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide)))


def _values(params: Sequence[Tensor], masters: Sequence[Tensor | None]) -> Many:
    """What the parameters stand for, in float32: the master where there is one."""
    return Many([_value(param, master) for param, master in zip(params, masters, strict=True)])


def _value(param: Tensor, master: Tensor | None) -> Tensor:
    if master is None:
        return param.float()
    return master if master.dtype == torch.float32 else rounding.join(param, master)


def _store(value: Tensor, param: Tensor, master: Tensor | None) -> None:
    if master is not None and master.dtype == torch.int16:
        upper, lower = rounding.split(value.float())
        param.copy_(upper)
        master.copy_(lower)
        return
    param.copy_(value)
    if master is not None:
        master.copy_(value)


def _pick(column: Column | None, members: Sequence[int]) -> list[Tensor | None]:
    return [None if column is None else column[i] for i in members]


class TorchStepPlan:
    """An optimizer step on one set of tensors."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = t = tensors
        self.leaders = tensors.leaders()
        self.members: list[list[int]] = [[] for _ in self.leaders]
        for i, row in enumerate(tensors.rows):
            self.members[row].append(i)
        self.device = t.params[0][0].device
        self.wide = _wide(self.device)
        rows, replicas = len(self.leaders), t.num_replicas
        # as csrc/core/hyper.h: two numbers of the step, nine of each row, multipliers, weights
        self.table = torch.zeros(2 + rows * (9 + replicas) + replicas, dtype=self.wide, device=self.device)
        self.of_step, of_rows, of_replicas, self.weights = self.table.split([2, rows * 9, rows * replicas, replicas])
        self.of_rows, self.rho = of_rows.view(rows, 9), of_replicas.view(rows, replicas)
        self.mirror: list[float] = []
        self.norm = torch.zeros((), device=self.device)
        self.skipped = torch.zeros((), device=self.device)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        check_settings(settings, self.tensors)
        check_options(options, self.tensors)
        numbers = [options.max_norm, options.average_weight]
        for s in settings:
            numbers += [0.0 if isinstance(s.lr, Tensor) else s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.dampening]
            numbers += [s.nesterov, s.maximize, s.decay_at_base]
        for s in settings:
            numbers += s.multipliers
        numbers += [0.0] * self.tensors.num_replicas if options.weights is None else options.weights
        if numbers != self.mirror:
            self.table.copy_(torch.tensor(numbers, dtype=self.wide))
            self.mirror = numbers

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        check_gradients(gradients, self.tensors.params[0])
        self.upload(settings, options)
        skip, scale = self._control(gradients, options)
        rows = self._derive(settings, scale)
        for r, members in enumerate(self.members):
            self._step_row(Row(*(field[r] for field in rows)), members, gradients, options, skip)
        torch._foreach_add_(list(self.tensors.steps), 1 - self.skipped)
        if options.zero_gradients:
            torch._foreach_zero_(list(gradients))

    def _control(self, gradients: Sequence[Tensor], options: StepOptions) -> tuple[Tensor | None, Tensor]:
        """derive_control: whether to skip (None: for no reason there could be), and what gradients are multiplied by."""
        one = torch.ones((), dtype=self.wide, device=self.device)
        inverse, clip = one, one
        skip = None
        if options.grad_scale is not None:
            inverse = one / options.grad_scale.reshape(())
        if options.found_inf is not None:
            skip = options.found_inf.reshape(()) != 0
        norm = 0 * one
        if options.max_norm != 0:
            norm = _norm(gradients) * inverse
            bad = ~norm.isfinite()
            skip = bad if skip is None else skip | bad
            clip = self.of_step[0] / (norm + 1e-6)
            clip = torch.where(clip < 1, clip, one)
        self.norm.copy_(norm)
        self.skipped.copy_(0 * one if skip is None else skip)
        return skip, (inverse * clip).float()

    def _derive(self, settings: Sequence[StepSettings], scale: Tensor) -> Row:
        """derive_row and derive_replica, for all rows at once: in double, rounded once."""
        rule = self.tensors.rule
        adam, decoupled = rule in ("adamw", "adam"), rule in ("adamw", "lion")
        rates, beta1, beta2, eps, weight_decay, dampening, nesterov, maximize, decay_at_base = self.of_rows.unbind(1)
        lr = torch.stack([rates[r] if not isinstance(s.lr, Tensor) else s.lr.reshape(()).to(self.wide) for r, s in enumerate(settings)])
        step = torch.stack([self.tensors.steps[i] for i in self.leaders]) + 1
        one = torch.ones_like(beta1)
        if rule == "sgd":
            lerp1 = torch.where((step <= 1) | (beta1 == 0), one, 1 - dampening)
        else:
            lerp1 = 1 - beta1
        rate = lr[:, None] * self.rho  # Eq. 2
        decay = torch.where(decay_at_base[:, None] != 0, lr[:, None], rate) * weight_decay[:, None] if decoupled else 0 * rate
        return Row(
            gradient_scale=torch.where(maximize != 0, -scale, scale),
            beta1=beta1.float(),
            lerp1=lerp1.float(),
            beta2=beta2.float(),
            lerp2=(1 - beta2).float(),
            inv_sqrt_correction2=(1 / (1 - _power(beta2, step)).sqrt() if adam else one).float(),
            eps=eps.float(),
            coupled_decay=(0 * one if decoupled else weight_decay).float(),
            nesterov=nesterov,
            step=step,
            step_size=(rate / (1 - _power(beta1, step))[:, None] if adam else rate).float(),
            decay=(1 - decay).float(),
        )

    def _step_row(self, row: Row, members: list[int], gradients: Sequence[Tensor], options: StepOptions, skip: Tensor | None) -> None:
        t = self.tensors
        params = [[sets[i] for i in members] for sets in t.params]
        masters = [_pick(None if t.masters is None else t.masters[k], members) for k in range(t.num_replicas)]
        moments = [_pick(column, members) for column in (t.exp_avgs, t.exp_avg_sqs)]
        g = Many([gradients[i].float() for i in members]) * row.gradient_scale
        m, v = (Many([torch.zeros_like(x) if y is None else y.float() for x, y in zip(g.tensors, c, strict=True)]) for c in moments)
        old = [_values(*pair) for pair in zip(params, masters, strict=True)]
        u, *new_moments = _direction(t.rule, row, g, old[0], m, v)
        new = [p * row.decay[k] - u * row.step_size[k] for k, p in enumerate(old)]
        if skip is not None:
            new = [where(skip, before, after) for before, after in zip(old, new, strict=True)]
            new_moments = [where(skip, before, after) for before, after in zip((m, v), new_moments, strict=True)]
        self._store_moments(row, members, moments, new_moments)
        if options.average_weight != 0:
            self._update_averages(members, new, skip)
        if options.finish == "pack":
            packed = _weighted_sum(new, self.weights.float())
            for i, value in zip(members, packed.tensors, strict=True):
                t.buckets[i].copy_(value)  # type: ignore[index]
            return
        if options.finish == "mean":
            new = [_weighted_sum(new, self.weights.float())] * t.num_replicas
        for k, values in enumerate(new):
            for i, value, param, master in zip(members, values.tensors, params[k], masters[k], strict=True):
                if self._stochastic(param) and master is None and options.finish == "store":
                    value = rounding.stochastic_bfloat16(value, self._random(row, k, i, value) & 0xFFFF)
                _store(value, param, master)

    def _stochastic(self, x: Tensor) -> bool:
        return self.tensors.stochastic is not None and x.dtype == torch.bfloat16

    def _random(self, row: Row, k: int, i: int, like: Tensor) -> Tensor:
        t = self.tensors
        assert t.stochastic is not None
        return rounding.random_words(t.stochastic, row.step, t.first_replica + k, i if t.ids is None else t.ids[i], like)

    def _store_moments(self, row: Row, members: list[int], moments: Sequence[list[Tensor | None]], new: Sequence[Many]) -> None:
        for column, values, second in zip(moments, new, (False, True), strict=True):
            for i, moment, value in zip(members, column, values.tensors, strict=True):
                if moment is not None:
                    if second and self._stochastic(moment):  # with beta2 = 0.999, rounding to nearest would leave it where it is
                        value = rounding.stochastic_bfloat16(value, self._random(row, -self.tensors.first_replica, i, value) >> 16)
                    moment.copy_(value)

    def _update_averages(self, members: list[int], new: Sequence[Many], skip: Tensor | None) -> None:
        weight = self.of_step[1].float()
        for values, column in zip(new, self.tensors.averages or [], strict=True):
            there = [(column[i], value) for i, value in zip(members, values.tensors, strict=True) if column[i] is not None]
            if not there:
                continue
            old = Many([average.float() for average, _ in there])  # type: ignore[union-attr]
            averages = _running_average(old, Many([value for _, value in there]), weight)
            if skip is not None:
                averages = where(skip, old, averages)
            for (average, _), value in zip(there, averages.tensors, strict=True):
                average.copy_(value)  # type: ignore[union-attr]


class TorchAveragePlan:
    """The weighted mean of K co-resident sets (Eq. 3)."""

    def __init__(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> None:
        self.params = params
        self.masters: Sequence[Column] = [[None] * len(row) for row in params] if masters is None else masters

    @torch.no_grad()
    def average(self, weights: Sequence[float]) -> None:
        check_shares(weights, len(self.params))
        values = [_values(*pair) for pair in zip(self.params, self.masters, strict=True)]
        mean = _weighted_sum(values, torch.tensor(weights, dtype=torch.float32))
        for params, masters in zip(self.params, self.masters, strict=True):
            for value, param, master in zip(mean.tensors, params, masters, strict=True):
                _store(value, param, master)


class TorchPairPlan:
    """Operations between two sets of tensors of any floating dtypes and strides."""

    def __init__(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> None:
        self.sources, self.destinations = sources, destinations
        self.lowers: Column = source_lowers or [None] * len(sources)
        self.masters: Column = masters or [None] * len(destinations)

    @torch.no_grad()
    def copy(self, scale: float = 1.0) -> None:
        for source, lower, destination, master in zip(self.sources, self.lowers, self.destinations, self.masters, strict=True):
            value = source if lower is None else rounding.join(source, lower)
            if scale == 0:
                value = torch.zeros_like(value)
            elif scale != 1:
                value = (value if value.dtype == torch.float64 else value.float()) * scale
            _store(value, destination, master)

    @torch.no_grad()
    def lerp(self, weight: float) -> None:
        _check_weight(weight)
        for source, lower, destination, master in zip(self.sources, self.lowers, self.destinations, self.masters, strict=True):
            towards, old = _value(source, lower), _value(destination, master)
            w = torch.tensor(weight, dtype=torch.float32)
            _store(_running_average(Many([old]), Many([towards]), w).tensors[0], destination, master)

    @torch.no_grad()
    def swap(self) -> None:
        check_swap(self.sources, self.destinations, self.lowers, self.masters)
        for one, other in (*zip(self.sources, self.destinations, strict=True), *zip(self.lowers, self.masters, strict=True)):
            if one is not None and other is not None:
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)


def _check_weight(weight: float) -> None:
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight} must be in [0, 1]; 1 copies")


class TorchNormPlan:
    """The global norm of one set of tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    @torch.no_grad()
    def norm(self) -> Tensor:
        return _norm(self.tensors).float()


class TorchBackend:
    name = "torch"

    def step_plan(self, tensors: StepTensors) -> TorchStepPlan:
        return TorchStepPlan(tensors)

    def average_plan(self, params: Sequence[Sequence[Tensor]], masters: Sequence[Column] | None) -> TorchAveragePlan:
        return TorchAveragePlan(params, masters)

    def pair_plan(
        self, sources: Sequence[Tensor], destinations: Sequence[Tensor], source_lowers: Column | None, masters: Column | None
    ) -> TorchPairPlan:
        return TorchPairPlan(sources, destinations, source_lowers, masters)

    def norm_plan(self, tensors: Sequence[Tensor]) -> TorchNormPlan:
        return TorchNormPlan(tensors)
