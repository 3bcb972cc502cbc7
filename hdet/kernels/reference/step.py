"""The optimizer step of the torch backend. Mirrors csrc/core/hyper.h and prepare.h.

Step counters and the verdict on gradients stay on the device, so a step does not wait for it; only
where settings change does it wait, on CUDA, for the copy of their table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...rules import RULES, StepSettings
from ...rules.trace import Scalar
from .. import numbers
from ..checks import check_gradients, check_options, wide_dtype
from ..ema import WeightAverage
from ..interface import PLAIN, Column, StepOptions, StepTensors
from ..tables import CALL_SETTINGS, GROUP_SETTINGS, SettingsTable, count_settings
from .arithmetic import (
    Many,
    Number,
    averaged,
    direction,
    exponential,
    in_double,
    logarithm,
    values_of,
    where,
)


def _pick(column: Column | None, members: Sequence[int]) -> list[Tensor | None]:
    return [None if column is None else column[i] for i in members]


def _rounded(numbers: Tensor) -> Number:
    return Many(numbers.float().unbind()) if numbers.dim() else numbers.float()


class Row(NamedTuple):
    """HyperRow and ReplicaRow of csrc/core/hyper.h for some tensors of a group."""

    gradient_scale: Tensor
    settings: dict[str | Scalar, Tensor]
    step: Tensor  # [tensor]
    step_size: list[Number]  # [replica]
    decay: list[Number]  # [replica]
    cautious: bool


def ema_row(average: WeightAverage, step: Tensor) -> tuple[Tensor, Tensor]:
    """EmaRow of csrc/core/hyper.h in `step`'s type: the weight of what a step has made, and the
    rest. `step`: of those that the average has seen, from 1; of any shape."""
    since = step - average.begin
    n = since.div(average.every, rounding_mode="floor")
    if average.decay is None:
        kept = exponential((average.power + 1.0) * logarithm((n - 1.0) / n))
    else:
        kept = torch.full_like(n, average.decay)
        if average.warm_up:
            warm = n / (n + 9.0)
            kept = torch.where(warm < average.decay, warm, kept)
    kept = torch.where(since % average.every != 0, 1.0, torch.where(n == 1, 0.0, kept))
    kept = torch.where(since <= 0, 0.0, kept)
    return 1.0 - kept, kept


_SETTINGS = tuple(name for name in StepSettings._fields if name != "multipliers")


Kept = tuple[Tensor | None, Tensor | None]
"""a moment as it is stored, and the scales of one that is codes"""


def _value(kept: Tensor | None, scales: Tensor | None, signed: bool, like: Tensor) -> Tensor:
    """A moment in float32; zeros where none is kept."""
    if kept is None:
        return torch.zeros_like(like)
    return kept.float() if scales is None else numbers.decode(kept, scales, signed)


class TorchStepPlan:
    """An optimizer step on one set of tensors."""

    def __init__(self, tensors: StepTensors) -> None:
        self.tensors = t = tensors
        self.members: list[list[int]] = [[] for _ in range(t.num_groups)]
        for i, group in enumerate(t.groups):
            self.members[group].append(i)
        self.device = t.params[0][0].device
        self.wide = wide_dtype(self.device)
        groups, replicas = t.num_groups, t.num_replicas
        table = torch.zeros(count_settings(groups, replicas), dtype=self.wide, device=self.device)
        sizes = [CALL_SETTINGS, groups * GROUP_SETTINGS, groups * replicas]
        self.of_call, of_groups, rho = table.split(sizes)
        self.of_groups = of_groups.view(groups, GROUP_SETTINGS)
        self.rho = rho.view(groups, replicas)
        # Holds the table and not the plan, or parameters would live until garbage is collected.
        self._settings = SettingsTable(
            tensors,
            lambda numbers, _: table.copy_(torch.tensor(numbers, dtype=table.dtype, device="cpu")),
        )
        self.norm = torch.zeros((), dtype=torch.float32, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=self.device)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        check_options(options, self.tensors)
        self._settings.take(settings, options)

    @torch.no_grad()
    def step(
        self, gradients: Column, settings: Sequence[StepSettings], options: StepOptions = PLAIN
    ) -> None:
        gradients = list(gradients)
        check_gradients(gradients, self.tensors.params[0], self.tensors.numbers)
        self.upload(settings, options)
        given = [g for g in gradients if g is not None]
        skip, scale = self._control(gradients, options)
        for group, everyone in enumerate(self.members):
            if members := [i for i in everyone if gradients[i] is not None]:
                row = self._derive(group, settings[group], members, scale)
                self._step_group(row, group, members, gradients, skip)
        counters = list(zip(gradients, self.tensors.steps, strict=True))
        counters += zip(gradients, self.tensors.ema_steps, strict=False)
        if counted := [one for gradient, one in counters if gradient is not None]:
            torch._foreach_add_(counted, 1 - self.skipped)
        if given and options.zero_gradients:
            torch._foreach_zero_(given)

    def gradient_norms(self) -> Tensor:
        nothing = torch.zeros((), dtype=self.wide, device=self.device)
        norms = torch.stack([nothing if one is None else one for one in self._norms])
        return (norms * self._unscaling).float()

    def _norms_of(self, gradients: Column) -> list[Tensor | None]:
        """The norm of each gradient as it is, wide, without a copy in a wider type."""
        given = [g for g in gradients if g is not None]
        norms = iter(torch._foreach_norm(given, 2, dtype=self.wide) if given else ())
        return [None if g is None else next(norms) for g in gradients]

    def _control(self, gradients: Column, options: StepOptions) -> tuple[Tensor | None, Tensor]:
        """derive_control: whether to skip (None: for no reason there could be), and what gradients
        are multiplied by."""
        one = torch.ones((), dtype=self.wide, device=self.device)
        inverse, clip = one, one
        skip = None
        if options.grad_scale is not None:
            inverse = one / options.grad_scale.reshape(())
        if options.found_inf is not None:
            skip = options.found_inf.reshape(()) != 0
        norm = 0 * one
        if options.max_norm != 0:
            self._norms, self._unscaling = self._norms_of(gradients), inverse
            given = [one for one in self._norms if one is not None]
            norm = torch.linalg.vector_norm(torch.stack(given)) * inverse if given else norm
            bad = ~norm.isfinite()
            skip = bad if skip is None else skip | bad
            clip = self.of_call[0] / (norm + 1e-6)
            clip = torch.where(clip < 1, clip, one)
        self.norm.copy_(norm)
        self.skipped.copy_(0 * one if skip is None else skip)
        return skip, (inverse * clip).float()

    def _derive(self, group: int, s: StepSettings, members: list[int], scale: Tensor) -> Row:
        """derive_row and derive_replica for some tensors of a group: in double, rounded once."""
        rule = RULES[self.tensors.rule]
        settings: dict[str | Scalar, Tensor] = dict(
            zip(_SETTINGS, self.of_groups[group].unbind(), strict=True)
        )
        lr = settings["lr"] if not isinstance(s.lr, Tensor) else s.lr.reshape(()).to(self.wide)
        step = torch.stack([self.tensors.steps[i] for i in members]) + 1
        wide = step.to(self.wide)
        if rule.first_step > 1:
            lr = torch.where(step < rule.first_step, 0, lr)
        rates = [lr * rho for rho in self.rho[group]]  # Eq. 2
        settings |= {"lr": lr, "rate": rates[0]}
        decays = [torch.where(settings["decay_at_base"] != 0, lr, rate) for rate in rates]
        divisor = in_double(rule.trace.divisor, settings, wide)
        return Row(
            gradient_scale=torch.where(settings["maximize"] != 0, -scale, scale),
            settings=settings,
            step=step,
            step_size=[_rounded(rate / divisor) for rate in rates],
            decay=[
                _rounded(1 - (0 * at if rule.coupled else at * settings["weight_decay"]))
                for at in decays
            ],
            cautious=s.cautious_decay,
        )

    def _step_group(
        self, row: Row, group: int, members: list[int], gradients: Column, skip: Tensor | None
    ) -> None:
        t = self.tensors
        params = [[sets[i] for i in members] for sets in t.params]
        masters = [
            _pick(None if t.masters is None else t.masters[k], members)
            for k in range(t.num_replicas)
        ]
        old = [values_of(*pair) for pair in zip(params, masters, strict=True)]
        u = self._share(row, members, gradients, old[0], skip)
        new = [u]
        if not RULES[t.rule].gives_parameter:
            new = [p * self._decay(row, k, p, u) - u * row.step_size[k] for k, p in enumerate(old)]
        if skip is not None:
            new = [where(skip, before, after) for before, after in zip(old, new, strict=True)]
        for k, values in enumerate(new):
            for j, (value, param, master) in enumerate(
                zip(values.tensors, params[k], masters[k], strict=True)
            ):
                if self._stochastic(param) and (master is None or master.dtype == torch.int8):
                    random = self._random(row.step[j], k, members[j], value)
                    if master is None:
                        value = numbers.stochastic_bfloat16(value, random & 0xFFFF)
                    else:
                        value = numbers.to_24(value, random & 0xFF)
                numbers.store(value, param, master)
            self._follow_over_time(members, k, values_of(params[k], masters[k]), skip)

    def _follow_over_time(
        self, members: list[int], k: int, params: Many, skip: Tensor | None
    ) -> None:
        """Averages over time take in what replica k has become."""
        t = self.tensors
        for average, sets in zip(t.averages, t.emas, strict=True):
            step = torch.stack([t.ema_steps[i] for i in members]) + 1
            weight, rest = ema_row(average, step.to(self.wide))
            if skip is not None:
                weight, rest = torch.where(skip, 0.0, weight), torch.where(skip, 1.0, rest)
            old = Many([sets[k][i] for i in members])
            new = averaged(old, params, _rounded(weight), _rounded(rest))
            torch._foreach_copy_(old.tensors, new.tensors)

    @staticmethod
    def _decay(row: Row, k: int, p: Many, u: Many) -> Number:
        """What replica k's parameters are multiplied by."""
        if not row.cautious:
            return row.decay[k]
        against = Many([x < 0 for x in (u * p).tensors])
        ones = Many([torch.ones_like(x) for x in p.tensors])
        return where(against, ones, ones * row.decay[k])

    def _share(
        self, row: Row, members: list[int], gradients: Column, params: Many, skip: Tensor | None
    ) -> Many:
        """The direction u that all replicas share, from the new moments, which it stores.

        `params`: replica 0's, for coupled decay.
        """
        t, rule = self.tensors, RULES[self.tensors.rule]
        kept = [
            list(zip(_pick(moments, members), _pick(t.scales_of(j), members), strict=True))
            for j, moments in enumerate(t.moments)
        ]
        given = [x.float() for i in members if (x := gradients[i]) is not None]
        g = Many(given) * row.gradient_scale
        moments = [
            Many([_value(*one, signed, like) for one, like in zip(column, g.tensors, strict=True)])
            for column, signed in zip(kept, rule.signed, strict=True)
        ]
        if t.num_replicas > 1:  # no decay in the gradient: see check_group
            params = Many([torch.zeros_like(x) for x in g.tensors])
        inputs = [g, params, *moments]
        u, *new = direction(t.rule, self._scalars(row, inputs), inputs)
        if skip is not None:
            new = [where(skip, before, after) for before, after in zip(moments, new, strict=True)]
        self._store_moments(row, members, kept, new, skip)
        return u

    def _scalars(self, row: Row, inputs: list[Many]) -> list[Number]:
        """Those that elements meet, after a pass for sums over tensors."""
        rule, wide = RULES[self.tensors.rule], row.step.to(self.wide)
        sums: dict[str | Scalar, Tensor] = {
            Scalar("sum", (one,)): wide
            for one in rule.trace.sums  # not read yet
        }
        elements = [float(x.numel()) for x in inputs[0].tensors]
        whole: dict[str | Scalar, Tensor] = {Scalar("elements"): wide.new_tensor(elements), **sums}

        def scalars() -> list[Number]:
            settings = row.settings | whole
            return [_rounded(in_double(s, settings, wide)) for s in rule.trace.scalars]

        found = direction(rule.name, scalars(), inputs, before=True) if sums else []
        for node, terms in zip(sums, found, strict=True):
            whole[node] = torch.stack([x.sum(dtype=self.wide) for x in terms.tensors])
        return scalars()

    def _stochastic(self, x: Tensor) -> bool:
        return self.tensors.stochastic is not None and x.dtype == torch.bfloat16

    def _random(self, step: Tensor, k: int, i: int, like: Tensor) -> Tensor:
        t = self.tensors
        assert t.stochastic is not None
        return numbers.random_words(t.stochastic, step, t.first_replica + k, t.numbers[i], like)

    def _store_moments(
        self,
        row: Row,
        members: list[int],
        kept: Sequence[list[Kept]],
        new: Sequence[Many],
        skip: Tensor | None,
    ) -> None:
        signs = RULES[self.tensors.rule].signed
        for column, values, signed in zip(kept, new, signs, strict=True):
            for j, ((moment, scales), value) in enumerate(zip(column, values.tensors, strict=True)):
                if moment is None:
                    continue
                if scales is not None:
                    for stored, after in zip(
                        (moment, scales), numbers.encode(value, signed), strict=True
                    ):
                        stored.copy_(after if skip is None else torch.where(skip, stored, after))
                    continue
                # with beta2 = 0.999, rounding to nearest would leave it where it is
                if not signed and self._stochastic(moment):
                    replica = -self.tensors.first_replica  # of the run: its number 0
                    random = self._random(row.step[j], replica, members[j], value)
                    value = numbers.stochastic_bfloat16(value, random >> 16)
                moment.copy_(value)
