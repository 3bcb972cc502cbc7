"""Replicas on one line (csrc/core/rank_one.h) against the same replicas stored as sets, and what takes them off the line."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import StepOptions, StepSettings, StepTensors

from . import reference
from .cases import BACKENDS, SIZES, Guarded
from .lines import RULES, Line, line_left, settings_of
from .problem import special_values
from .reference import Bounded, OnLine
from .table import BF16, COMBINATIONS, F16, F32, SPECIAL_VALUES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_infinities_and_nan_are_where_stored_sets_have_them(rule: str, backend: str) -> None:
    line = Line(rule, [COMBINATIONS], 3, backend)
    line.base.tensors[0].copy_(special_values(line.base.tensors[0], 1, 0))
    sets = [[t.clone() for t in line.base.tensors] for _ in range(3)]
    first, second = [torch.zeros_like(t) for t in sets[0]], [torch.zeros_like(t) for t in sets[0]]
    steps = [torch.zeros((), device=line.device)]
    stored = kernels.step_plan(StepTensors(rule, sets, [0], steps, first, second if line.tensors.exp_avg_sqs else None), backend)
    for turn in range(6):
        gradients = [special_values(first[0], len(SPECIAL_VALUES), turn)]
        for plan in (stored, line.plan):
            plan.step(gradients, settings_of(rule, [0.5, 1.0, 2.0])[:1])
        if turn == 2:
            kernels.average_(sets, [0.5, 0.0, 0.5], backend)
            line.plan.converge([0.5, 0.0, 0.5])
        for ours, theirs in zip([line.outputs[k].tensors[0] for k in range(3)], [s[0] for s in sets], strict=True):
            for is_so in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(is_so(ours), is_so(theirs)), f"{is_so.__name__} in turn {turn}"


class Twin:
    """The line in float64, step by step from what the backend has stored: the scale of each row is its own."""

    def __init__(self, line: Line) -> None:
        self.line, self.scales = line, [1.0, 1.0]

    def stored(self, i: int) -> OnLine:
        values = (self.line.base.tensors[i].cpu().double(), self.line.displacement.tensors[i].cpu().double())
        return OnLine(*(Bounded(x, torch.zeros_like(x)) for x in values), scale=self.scales[self.line.rows[i]])

    def expect(self, i: int, gradient: Tensor | None, factor: float, s: StepSettings) -> tuple[OnLine, Tensor, Tensor]:
        """Tensor i after a step; gradient None: after one that is skipped."""
        line = self.stored(i)
        first, second = (x.tensors[i].cpu().double() for x in (self.line.first, self.line.second))
        if gradient is not None:
            hyper, t = reference.Hyper(**s._asdict()), int(self.line.steps[i]) + 1
            line = reference.step_on_line(self.line.tensors.rule, hyper, t, gradient.cpu(), factor, line, first, second)
        return line, first, second


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moments", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("rule", RULES)
def test_equals_float64(rule: str, dtype: torch.dtype, moments: torch.dtype, backend: str) -> None:
    """Steps, skipped ones, and two converges: everything within one rounding."""
    sizes, replicas, weights = [0, 5, *SIZES["block edges"], 33], 3, [0.25, 0.25, 0.5]
    line = Line(rule, sizes, replicas, backend, dtype, moments)
    twin = Twin(line)
    multipliers = [0.5, 1.0, 2.0]
    for turn in range(7):
        settings = settings_of(rule, multipliers, 1 - turn / 20)
        gradients = Guarded(sizes, 1, 200 + turn, line.device, dtype)
        skip = turn in (2, 4)
        if skip:
            gradients.tensors[1][3] = math.inf
        _, clip = reference.clip_coefficient([g.cpu() for g in gradients.tensors], 1.0, 30.0)
        expected = [twin.expect(i, None if skip else g, clip, settings[line.rows[i]]) for i, g in enumerate(gradients.tensors)]
        line.plan.step(gradients.tensors, settings, StepOptions(max_norm=30.0))
        assert line.plan.skipped.item() == skip
        for i, (exact, first, second) in enumerate(expected):
            assert torch.equal(line.base.tensors[i].cpu().double(), exact.base.value), f"base {i} in turn {turn}"
            reference.assert_stored(line.displacement.tensors[i], exact.displacement, f"displacement {i} in turn {turn}")
            for k in range(replicas):
                reference.assert_stored(line.outputs[k].tensors[i], exact.at(multipliers[k]), f"output {i} of {k} in turn {turn}")
            for moment, old, new in (
                (line.first, first, exact.stepped and exact.stepped.first),
                (line.second, second, exact.stepped and exact.stepped.second),
            ):
                if new is not None:
                    reference.assert_stored(moment.tensors[i], new, f"moment {i} in turn {turn}")
                else:
                    assert torch.equal(moment.tensors[i].cpu().double(), old)
        twin.scales = [expected[line.rows.index(row) + 2][0].scale for row in range(2)]
        if turn in (3, 6):
            points = [twin.stored(i).at(sum(w * rho for w, rho in zip(weights, multipliers, strict=True))) for i in range(len(sizes))]
            line.plan.converge(weights)
            for i, point in enumerate(points):
                reference.assert_stored(line.base.tensors[i], point, f"base {i} after a converge")
                assert not line.displacement.tensors[i].any()
                for outputs in line.outputs:
                    assert torch.equal(outputs.tensors[i], line.base.tensors[i].to(dtype))
            twin.scales = [1.0, 1.0]
            multipliers = [m * 1.1 for m in multipliers]
    assert [float(step) for step in line.steps] == [5.0] * len(sizes)
    for part in (line.base, line.displacement, *line.outputs, line.first, line.second):
        part.assert_guards()


@pytest.mark.parametrize("formats", [(F32, F32, F32), (BF16, BF16, BF16), (F16, F32, BF16)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("other", BACKENDS[1:])
def test_all_backends_and_instruction_sets_give_the_same_bits(
    other: str, rule: str, count: int, formats: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No NaN is left in these: the gradient that holds one is set to zero, and its step is skipped."""
    found = [line_left(rule, count, formats, SIZES["block edges"], other)]
    for isa in _C.isa:
        monkeypatch.setenv("HDET_ISA", isa)
        found.append(line_left(rule, count, formats, SIZES["block edges"], "cpu"))
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_converge_of_replicas_that_are_together_changes_nothing(backend: str) -> None:
    line = Line("lion", SIZES["vector edges"], 3, backend)
    line.plan.converge([0.2, 0.3, 0.5])
    assert all(torch.equal(b, o) for outputs in line.outputs for b, o in zip(line.base.tensors, outputs.tensors, strict=True))
    line.plan.step(Guarded(SIZES["vector edges"], 0, 5, line.device).tensors, settings_of("lion", [1.0, 2.0, 3.0]))
    line.plan.converge([0.2, 0.3, 0.5])
    before = line.everything()
    line.plan.converge([1.0, 0.0, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(before, line.everything(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_would_leave_the_line_is_refused_before_anything_changes(backend: str) -> None:
    sizes = SIZES["vector edges"]
    line = Line("adamw", sizes, 2, backend)
    gradients, settings = Guarded(sizes, 0, 5, line.device).tensors, settings_of("adamw", [0.5, 1.5])
    line.plan.step(gradients, settings)
    before = line.everything()
    with pytest.raises(ValueError, match=r"multipliers changed .* while the replicas are apart.*converge"):
        line.plan.step(gradients, settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"multipliers changed"):
        line.plan.upload(settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"weight_decay=0.1 of row 0 .*decay_at_base"):
        line.plan.step(gradients, [s._replace(decay_at_base=False) for s in settings])
    with pytest.raises(ValueError, match=r"sum to 1"):
        line.plan.converge([0.5, 0.6])
    assert all(torch.equal(a, b) for a, b in zip(before, line.everything(), strict=True))
    line.plan.converge([0.5, 0.5])
    line.plan.step(gradients, settings_of("adamw", [0.5, 1.6]))

    coupled = Line("adam", sizes, 1, backend)
    with pytest.raises(ValueError, match=r"weight_decay=0.5 of row 1 .*adamw or lion"):
        coupled.plan.step(gradients, [s._replace(weight_decay=0.5 * i) for i, s in enumerate(settings_of("adam", [1.0]))])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_cannot_be_planned_are_refused_by_name(backend: str) -> None:
    good = Line("adamw", [3, 4], 2, backend).tensors

    def refused(message: str, error: type[Exception] = ValueError, **changes: object) -> None:
        with pytest.raises(error, match=message):
            kernels.rank_one_plan(dataclasses.replace(good, **changes), backend)  # type: ignore[arg-type]

    refused("there are no outputs", outputs=[])
    refused("bases has 1 entries, but there are 2", bases=good.bases[:1])
    refused("displacement 1 has the shape", displacements=[good.displacements[0], good.displacements[0]])
    refused("base 0 has the dtype torch.float64", TypeError, bases=[t.double() for t in good.bases])
    refused("base 0 and output 0 of replica 1 overlap|output 0 of replica 1 and base 0 overlap", bases=good.outputs[1])
