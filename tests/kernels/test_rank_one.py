"""Replicas on one line (csrc/core/rank_one.h) against the same replicas stored as sets, and what takes them off the line."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import RankOneTensors, StepOptions, StepSettings, StepTensors

from . import reference
from .cases import BACKENDS, SIZES, Guarded, device_of
from .problem import special_values
from .reference import Bounded, OnLine
from .table import COMBINATIONS, SPECIAL_VALUES

RULES = ("adamw", "adam", "sgd", "lion")
BASE = {
    "adamw": StepSettings(3e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decay_at_base=True),
    "adam": StepSettings(3e-2, beta1=0.9, beta2=0.99, eps=1e-8),
    "sgd": StepSettings(3e-2, beta1=0.9, dampening=0.1),
    "lion": StepSettings(1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, decay_at_base=True),
}


class Line:
    """A rank-one plan in guarded memory."""

    def __init__(
        self, rule: str, sizes: list[int], replicas: int, backend: str, dtype: torch.dtype = torch.float32, **more: object
    ) -> None:
        moments = more.pop("moments", torch.float32)
        assert isinstance(moments, torch.dtype)

        def guarded(seed: int, kind: torch.dtype = torch.float32) -> Guarded:
            return Guarded(sizes, seed % 3, seed, device_of(backend), kind)

        self.rows = [i % min(2, len(sizes)) for i in range(len(sizes))]
        self.base, self.displacement = guarded(1), guarded(2).zero()
        self.outputs = [guarded(10 + k, dtype) for k in range(replicas)]
        for outputs in self.outputs:
            for tensor in outputs.tensors:
                tensor.fill_(float("nan"))  # written, never read
        self.first, self.second = guarded(3, moments).zero(), guarded(4, moments).zero()
        self.steps = [torch.zeros((), device=device_of(backend)) for _ in sizes]
        self.tensors = RankOneTensors(
            rule,
            self.base.tensors,
            self.displacement.tensors,
            [outputs.tensors for outputs in self.outputs],
            self.rows,
            self.steps,
            self.first.tensors,
            self.second.tensors if rule in ("adamw", "adam") else None,
            **more,  # type: ignore[arg-type]
        )
        self.plan = kernels.rank_one_plan(self.tensors, backend)

    def everything(self) -> list[Tensor]:
        parts = [self.base, self.displacement, *self.outputs, self.first, self.second]
        return [part.buffer.clone() for part in parts] + [torch.stack(self.steps)]

    def values(self) -> list[list[Tensor]]:
        return [[t.clone() for t in outputs.tensors] for outputs in self.outputs]


def settings_of(rule: str, multipliers: list[float], rate: float = 1.0) -> list[StepSettings]:
    one = BASE[rule]._replace(multipliers=multipliers)
    return [one._replace(lr=one.lr * rate), one._replace(lr=one.lr * rate * 0.5)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
def test_a_line_goes_where_stored_sets_go(rule: str, replicas: int, backend: str) -> None:
    """Two means and a converge, each followed by other multipliers. Counters, moments and, after a mean, all outputs are bitwise equal."""
    sizes = [0, *SIZES["chunk edges"], 5]
    line = Line(rule, sizes, replicas, backend)
    sets = [[t.clone() for t in line.base.tensors] for _ in range(replicas)]
    first, second = [torch.zeros_like(t) for t in sets[0]], [torch.zeros_like(t) for t in sets[0]]
    steps = [torch.zeros((), device=device_of(backend)) for _ in sizes]
    stored = kernels.step_plan(StepTensors(rule, sets, line.rows, steps, first, second if line.tensors.exp_avg_sqs else None), backend)
    stored_mean = kernels.average_plan(sets, backend=backend)
    weights = [(k + 1) / (replicas * (replicas + 1) / 2) for k in range(replicas)]
    multipliers = [0.6 + 0.8 * k / replicas for k in range(replicas)]
    for turn in range(16):
        gradients = Guarded(sizes, 1, 100 + turn, device_of(backend))
        finish = "mean" if turn in (4, 5, 10) else "store"
        options = StepOptions(max_norm=50.0, finish=finish, weights=weights if finish == "mean" else None, zero_gradients=turn % 2 == 1)
        settings = settings_of(rule, multipliers, 1 - turn / 20)
        stored.step([g.clone() for g in gradients.tensors], settings, options)
        line.plan.step(gradients.tensors, settings, options)
        gradients.assert_guards()
        assert all(not g.any() for g in gradients.tensors) == options.zero_gradients
        if turn == 13:
            stored_mean.average(weights)
            line.plan.converge(weights)
            assert not any(d.any() for d in line.displacement.tensors)
            assert all(torch.equal(b, o) for outputs in line.outputs for b, o in zip(line.base.tensors, outputs.tensors, strict=True))
        if finish == "mean" or turn == 13:
            multipliers = multipliers[1:] + [multipliers[0] * 1.1]
            assert all(torch.equal(a, b) for outputs in line.outputs for a, b in zip(line.outputs[0].tensors, outputs.tensors, strict=True))
        for k in range(replicas):
            for ours, theirs in zip(line.outputs[k].tensors, sets[k], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
        for ours, theirs in zip([*line.first.tensors, *line.second.tensors, *line.steps], [*first, *second, *steps], strict=True):
            assert torch.equal(ours, theirs)
    for part in (line.base, line.displacement, *line.outputs, line.first, line.second):
        part.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_infinities_and_nan_are_where_stored_sets_have_them(rule: str, backend: str) -> None:
    line = Line(rule, [COMBINATIONS], 3, backend)
    line.base.tensors[0].copy_(special_values(line.base.tensors[0], 1, 0))
    sets = [[t.clone() for t in line.base.tensors] for _ in range(3)]
    first, second = [torch.zeros_like(t) for t in sets[0]], [torch.zeros_like(t) for t in sets[0]]
    steps = [torch.zeros((), device=device_of(backend))]
    stored = kernels.step_plan(StepTensors(rule, sets, [0], steps, first, second if line.tensors.exp_avg_sqs else None), backend)
    for turn in range(6):
        gradients = [special_values(first[0], len(SPECIAL_VALUES), turn)]
        options = StepOptions(finish="mean", weights=[0.5, 0.0, 0.5]) if turn == 2 else StepOptions()
        for plan in (stored, line.plan):
            plan.step(gradients, settings_of(rule, [0.5, 1.0, 2.0])[:1], options)
        for ours, theirs in zip([line.outputs[k].tensors[0] for k in range(3)], [s[0] for s in sets], strict=True):
            for is_so in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(is_so(ours), is_so(theirs)), f"{is_so.__name__} in turn {turn}"


class Twin:
    """The line in float64, step by step from what the backend has stored: scale and pending mean of each row are its own."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.scales = [1.0, 1.0]
        self.means: list[float | None] = [None, None]  # rho_mean of a mean that the base has yet to become

    def stored(self, i: int) -> OnLine:
        values = (self.line.base.tensors[i].cpu().double(), self.line.displacement.tensors[i].cpu().double())
        return OnLine(*(Bounded(x, torch.zeros_like(x)) for x in values), scale=self.scales[self.line.rows[i]])

    def expect(self, i: int, gradient: Tensor | None, factor: float, s: StepSettings) -> tuple[OnLine, Tensor, Tensor]:
        """Tensor i after a step; gradient None: after one that is skipped."""
        line, mean = self.stored(i), self.means[self.line.rows[i]]
        if mean is not None:
            base = line.at(mean)
            line = OnLine(base, Bounded(torch.zeros_like(base.value), torch.zeros_like(base.value)))
        first, second = (x.tensors[i].cpu().double() for x in (self.line.first, self.line.second))
        if gradient is not None:
            hyper = reference.Hyper(**s._asdict())
            line = reference.step_on_line(
                self.line.tensors.rule, hyper, int(self.line.steps[i]) + 1, gradient.cpu(), factor, line, first, second
            )
        return line, first, second


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_equals_float64(rule: str, dtype: torch.dtype, moments: torch.dtype, backend: str) -> None:
    """Steps, a mean, its fold, a skipped step, a mean right after a mean, and a converge: everything within one rounding."""
    sizes, replicas, weights = [0, 5, *SIZES["block edges"], 33], 3, [0.5, 0.0, 0.5]
    line = Line(rule, sizes, replicas, backend, dtype, moments=moments)
    twin = Twin(line)
    multipliers = [0.5, 1.0, 2.0]
    for turn in range(9):
        settings = settings_of(rule, multipliers, 1 - turn / 20)
        gradients = Guarded(sizes, 1, 200 + turn, device_of(backend), dtype)
        skip, mean = turn in (3, 5), turn in (2, 4, 5, 7)
        if skip:
            gradients.tensors[1][3] = math.inf
        _, clip = reference.clip_coefficient([g.cpu() for g in gradients.tensors], 1.0, 30.0)
        rhos = [0.5 * (m[0] + m[2]) if mean else None for m in [multipliers] * 2]
        expected = [twin.expect(i, None if skip else g, clip, settings[line.rows[i]]) for i, g in enumerate(gradients.tensors)]
        options = StepOptions(max_norm=30.0, finish="mean" if mean else "store", weights=weights if mean else None)
        line.plan.step(gradients.tensors, settings, options)
        for i, (exact, first, second) in enumerate(expected):
            reference.assert_stored(line.base.tensors[i], exact.base, f"base {i} in turn {turn}")
            reference.assert_stored(line.displacement.tensors[i], exact.displacement, f"displacement {i} in turn {turn}")
            for k in range(replicas):
                rho = rhos[line.rows[i]]
                output = line.outputs[k].tensors[i]
                reference.assert_stored(output, exact.at(multipliers[k] if rho is None else rho), f"output {i} of {k} in turn {turn}")
            for moment, old, new in (
                (line.first, first, exact.stepped and exact.stepped.first),
                (line.second, second, exact.stepped and exact.stepped.second),
            ):
                if new is not None:
                    reference.assert_stored(moment.tensors[i], new, f"moment {i} in turn {turn}")
                else:
                    assert torch.equal(moment.tensors[i].cpu().double(), old)
        for row in range(2):
            twin.scales[row] = expected[line.rows.index(row) + 2][0].scale
        twin.means = rhos
        if mean:
            multipliers = [m * 1.1 for m in multipliers]
    points = [twin.stored(i).at(0.25 * multipliers[0] + 0.25 * multipliers[1] + 0.5 * multipliers[2]) for i in range(len(sizes))]
    line.plan.converge([0.25, 0.25, 0.5])
    for i, point in enumerate(points):
        reference.assert_stored(line.base.tensors[i], point, f"base {i} after the converge")
        assert not line.displacement.tensors[i].any()
        for outputs in line.outputs:
            assert torch.equal(outputs.tensors[i], line.base.tensors[i].to(dtype))
    assert [float(step) for step in line.steps] == [7.0] * len(sizes)


@pytest.mark.parametrize("rule", RULES)
def test_torch_has_the_bits_of_the_cpu(rule: str) -> None:
    found = []
    for backend in ("cpu", "torch"):
        line = Line(rule, SIZES["chunk edges"], 3, backend, torch.bfloat16, moments=torch.bfloat16, stochastic=11)
        for turn in range(6):
            finish = StepOptions(finish="mean", weights=[0.5, 0.0, 0.5]) if turn in (1, 2) else StepOptions()
            found_inf = torch.tensor(float(turn == 2))
            options = dataclasses.replace(finish, found_inf=found_inf)
            line.plan.step(Guarded(SIZES["chunk edges"], 0, turn).tensors, settings_of(rule, [0.5, 1.0, 1.5]), options)
        line.plan.converge([0.25, 0.5, 0.25])
        found.append(line.everything())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_of_16_bits_are_the_rounded_ones(dtype: torch.dtype, backend: str) -> None:
    lines = [Line("adamw", SIZES["block edges"], 4, backend, kind) for kind in (torch.float32, dtype)]
    for turn in range(5):
        gradients = Guarded(SIZES["block edges"], 0, turn, device_of(backend), dtype)
        finish = StepOptions(finish="mean", weights=[0.25] * 4) if turn == 2 else StepOptions()
        for line in lines:
            line.plan.step(gradients.tensors, settings_of("adamw", [0.5, 1.0, 1.5, 0.0]), finish)
        for exact, rounded in zip(lines[0].outputs, lines[1].outputs, strict=True):
            assert all(torch.equal(a.to(dtype), b) for a, b in zip(exact.tensors, rounded.tensors, strict=True))
            rounded.assert_guards()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("after_mean", [False, True])
def test_a_skipped_step_moves_nothing_but_folds(after_mean: bool, backend: str) -> None:
    sizes = SIZES["vector edges"]
    line = Line("adamw", sizes, 2, backend)
    settings = settings_of("adamw", [0.5, 1.5])
    line.plan.step(Guarded(sizes, 0, 5, device_of(backend)).tensors, settings)
    if after_mean:
        line.plan.step(Guarded(sizes, 0, 6, device_of(backend)).tensors, settings, StepOptions(finish="mean", weights=[0.5, 0.5]))
    base, outputs, moments = line.base.buffer.clone(), line.values(), line.first.buffer.clone()
    spoiled = Guarded(sizes, 0, 7, device_of(backend))
    spoiled.tensors[3][0] = math.nan
    line.plan.step(spoiled.tensors, settings, StepOptions(max_norm=math.inf))
    assert line.plan.skipped.item() == 1.0
    assert float(line.steps[0]) == 1.0 + after_mean
    assert torch.equal(line.first.buffer, moments)
    assert torch.equal(line.base.buffer, base) != after_mean
    assert all(torch.equal(a, b) for old, new in zip(outputs, line.values(), strict=True) for a, b in zip(old, new, strict=True))
    if after_mean:
        assert all(torch.equal(b, o) for b, o in zip(line.base.tensors, line.outputs[0].tensors, strict=True))
        assert not any(d.any() for d in line.displacement.tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_converge_before_any_step_and_after_a_mean_changes_nothing(backend: str) -> None:
    line = Line("lion", SIZES["vector edges"], 3, backend)
    line.plan.converge([0.2, 0.3, 0.5])
    assert all(torch.equal(b, o) for outputs in line.outputs for b, o in zip(line.base.tensors, outputs.tensors, strict=True))
    gradients = Guarded(SIZES["vector edges"], 0, 5, device_of(backend)).tensors
    line.plan.step(gradients, settings_of("lion", [1.0, 2.0, 3.0]), StepOptions(finish="mean", weights=[0.2, 0.3, 0.5]))
    before = line.values()
    line.plan.converge([1.0, 0.0, 0.0])  # they are one already
    assert all(torch.equal(a, b) for old, new in zip(before, line.values(), strict=True) for a, b in zip(old, new, strict=True))
    assert all(torch.equal(b, o) for b, o in zip(line.base.tensors, line.outputs[0].tensors, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_would_leave_the_line_is_refused_before_anything_changes(backend: str) -> None:
    sizes = SIZES["vector edges"]
    line, gradients = Line("adamw", sizes, 2, backend), Guarded(sizes, 0, 5, device_of(backend)).tensors
    settings = settings_of("adamw", [0.5, 1.5])
    line.plan.step(gradients, settings)
    before = line.everything()
    with pytest.raises(ValueError, match=r"multipliers changed .* while the replicas are apart.*converge"):
        line.plan.step(gradients, settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"multipliers changed"):
        line.plan.upload(settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"weight_decay=0.1 of row 0 .*decay_at_base"):
        line.plan.step(gradients, [s._replace(decay_at_base=False) for s in settings])
    with pytest.raises(ValueError, match=r"finish='pack'"):
        line.plan.step(gradients, settings, StepOptions(finish="pack", weights=[1.0]))
    with pytest.raises(ValueError, match=r"average_weight 0"):
        line.plan.step(gradients, settings, StepOptions(average_weight=0.5))
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


@pytest.mark.parametrize("rule", RULES)
def test_instruction_sets_give_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for isa in _C.isa:
        monkeypatch.setenv("HDET_ISA", isa)
        line = Line(rule, SIZES["chunk edges"], 3, "cpu", torch.bfloat16, moments=torch.bfloat16, stochastic=11)
        for turn in range(4):
            finish = StepOptions(max_norm=1.0, finish="mean", weights=[0.5, 0.0, 0.5]) if turn == 1 else StepOptions()
            line.plan.step(Guarded(SIZES["chunk edges"], 0, turn).tensors, settings_of(rule, [0.5, 1.0, 1.5]), finish)
        line.plan.converge([0.25, 0.5, 0.25])
        found.append(line.everything())
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
