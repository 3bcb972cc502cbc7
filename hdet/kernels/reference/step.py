"""The optimizer step of the torch backend. Mirrors csrc/core/hyper.h, prepare.h and rank_one.h.

Step counters and the verdict on gradients stay on the device, so a step does not wait for it; only where settings change does it wait,
on CUDA, for the copy of their table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec import rounding
from ..spec.arguments import check_gradients
from ..spec.interface import DECOUPLED, PLAIN, Column, RankOneTensors, StepOptions, StepSettings, StepTensors
from ..spec.settings import CALL_SETTINGS, ROW_SETTINGS, SettingsTable, check_options, count_settings
from ..spec.shared import OnLine
from .rules import Many, Row, direction, global_norm, power, store, values_of, where, wide_dtype


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
        self.wide = wide_dtype(self.device)
        rows, replicas = len(self.leaders), t.num_replicas
        self.table = torch.zeros(count_settings(rows, replicas), dtype=self.wide, device=self.device)
        self.of_call, of_rows, of_replicas = self.table.split([CALL_SETTINGS, rows * ROW_SETTINGS, rows * replicas])
        self.of_rows, self.rho = of_rows.view(rows, ROW_SETTINGS), of_replicas.view(rows, replicas)
        self._settings = SettingsTable(tensors, lambda numbers, _: self.table.copy_(torch.tensor(numbers, dtype=self.wide)))
        self.norm = torch.zeros((), device=self.device)
        self.skipped = torch.zeros((), device=self.device)

    def upload(self, settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        check_options(options, self.tensors)
        self._settings.take(settings, options)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = PLAIN) -> None:
        check_gradients(gradients, self.tensors.params[0])
        self.upload(settings, options)
        skip, scale = self._control(gradients, options)
        rows = self._prepare(settings, scale, skip)
        for r, members in enumerate(self.members):
            self._step_row(Row(*(field[r] for field in rows)), members, gradients, skip)
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
            norm = global_norm(gradients) * inverse
            bad = ~norm.isfinite()
            skip = bad if skip is None else skip | bad
            clip = self.of_call[0] / (norm + 1e-6)
            clip = torch.where(clip < 1, clip, one)
        self.norm.copy_(norm)
        self.skipped.copy_(0 * one if skip is None else skip)
        return skip, (inverse * clip).float()

    def _prepare(self, settings: Sequence[StepSettings], scale: Tensor, skip: Tensor | None) -> Row:
        return self._derive(settings, scale, self.rho)

    def _derive(self, settings: Sequence[StepSettings], scale: Tensor, rho: Tensor) -> Row:
        """derive_row and derive_replica, for all rows at once: in double, rounded once. `rho`: [row, replica]."""
        rule = self.tensors.rule
        adam, decoupled = rule in ("adamw", "adam"), rule in DECOUPLED
        rates, beta1, beta2, eps, weight_decay, dampening, nesterov, maximize, decay_at_base = self.of_rows.unbind(1)
        lr = torch.stack([rates[r] if not isinstance(s.lr, Tensor) else s.lr.reshape(()).to(self.wide) for r, s in enumerate(settings)])
        step = torch.stack([self.tensors.steps[i] for i in self.leaders]) + 1
        one = torch.ones_like(beta1)
        if rule == "sgd":
            lerp1 = torch.where((step <= 1) | (beta1 == 0), one, 1 - dampening)
        else:
            lerp1 = 1 - beta1
        rate = lr[:, None] * rho  # Eq. 2
        decay = torch.where(decay_at_base[:, None] != 0, lr[:, None], rate) * weight_decay[:, None] if decoupled else 0 * rate
        return Row(
            gradient_scale=torch.where(maximize != 0, -scale, scale),
            beta1=beta1.float(),
            lerp1=lerp1.float(),
            beta2=beta2.float(),
            lerp2=(1 - beta2).float(),
            inv_sqrt_correction2=(1 / (1 - power(beta2, step)).sqrt() if adam else one).float(),
            eps=eps.float(),
            coupled_decay=(0 * one if decoupled else weight_decay).float(),
            nesterov=nesterov,
            step=step,
            step_size=(rate / (1 - power(beta1, step))[:, None] if adam else rate).float(),
            decay=1 - decay,
        )

    def _step_row(self, row: Row, members: list[int], gradients: Sequence[Tensor], skip: Tensor | None) -> None:
        t = self.tensors
        params = [[sets[i] for i in members] for sets in t.params]
        masters = [_pick(None if t.masters is None else t.masters[k], members) for k in range(t.num_replicas)]
        old = [values_of(*pair) for pair in zip(params, masters, strict=True)]
        u = self._share(row, members, gradients, old[0], skip)
        new = [p * row.decay[k].float() - u * row.step_size[k] for k, p in enumerate(old)]
        if skip is not None:
            new = [where(skip, before, after) for before, after in zip(old, new, strict=True)]
        for k, values in enumerate(new):
            for i, value, param, master in zip(members, values.tensors, params[k], masters[k], strict=True):
                if self._stochastic(param) and master is None:
                    value = rounding.stochastic_bfloat16(value, self._random(row, k, i, value) & 0xFFFF)
                store(value, param, master)

    def _share(self, row: Row, members: list[int], gradients: Sequence[Tensor], params: Many, skip: Tensor | None) -> Many:
        """The direction u that all replicas share, from the new moments, which it stores. `params`: replica 0's, for coupled decay."""
        t = self.tensors
        columns = [_pick(column, members) for column in (t.exp_avgs, t.exp_avg_sqs)]
        g = Many([gradients[i].float() for i in members]) * row.gradient_scale
        moments = [Many([torch.zeros_like(x) if y is None else y.float() for x, y in zip(g.tensors, c, strict=True)]) for c in columns]
        if t.num_replicas > 1:
            params = Many([torch.zeros_like(x) for x in g.tensors])  # no decay in the gradient: see check_row
        u, *new = direction(t.rule, row, g, params, *moments)
        if skip is not None:
            new = [where(skip, before, after) for before, after in zip(moments, new, strict=True)]
        self._store_moments(row, members, columns, new)
        return u

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


class TorchRankOnePlan(OnLine, TorchStepPlan):
    """A step of K replicas on one line: replica k is at A * base - rho_k * D."""

    def __init__(self, tensors: RankOneTensors) -> None:
        super().__init__(tensors)
        self.scales = torch.tensor(tensors.scales or [1.0] * len(self.leaders), dtype=self.wide, device=self.device)  # A

    @torch.no_grad()
    def _meet(self, rhos: list[float]) -> None:
        along = torch.tensor(rhos, dtype=self.wide, device=self.device).float()
        for r, members in enumerate(self.members):
            base, displacement = self._line(members)
            mean = base * self.scales[r].float() - displacement * along[r]
            for i, value in zip(members, mean.tensors, strict=True):
                self.line_tensors.bases[i].copy_(value)
                self.line_tensors.displacements[i].zero_()
                for outputs in self.tensors.params:
                    outputs[i].copy_(value)
        self.scales.fill_(1)

    def _line(self, members: list[int]) -> tuple[Many, Many]:
        t = self.line_tensors
        return Many([t.bases[i] for i in members]), Many([t.displacements[i] for i in members])

    def _prepare(self, settings: Sequence[StepSettings], scale: Tensor, skip: Tensor | None) -> Row:
        """prepare_rank_one, for all rows at once."""
        row = self._derive(settings, scale, torch.ones_like(self.scales)[:, None])
        if skip is not None:
            row = row._replace(decay=torch.where(skip, 1, row.decay))
        self.scales.mul_(row.decay[:, 0])
        return row

    def _step_row(self, row: Row, members: list[int], gradients: Sequence[Tensor], skip: Tensor | None) -> None:
        base, displacement = self._line(members)
        zeros = Many([torch.zeros_like(x) for x in base.tensors])
        u = self._share(row, members, gradients, zeros, skip)
        if skip is not None:
            u = where(skip, zeros, u)
        displacement = displacement * row.decay[0].float() + u * row.step_size[0]
        r = self.tensors.rows[members[0]]
        for k, outputs in enumerate(self.tensors.params):
            values = base * self.scales[r].float() - displacement * self.rho[r, k].float()
            for i, value in zip(members, values.tensors, strict=True):
                outputs[i].copy_(value)
        for i, d in zip(members, displacement.tensors, strict=True):
            self.line_tensors.displacements[i].copy_(d)
