"""Replicas on one line (csrc/core/rank_one.h) against the same replicas stored as sets, and what takes them off the line."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hdet import kernels
from hdet.kernels import StepTensors

from .cases import BACKENDS, SIZES, Guarded, check_same_bits
from .lines import RULES, Line, line_left, settings_of
from .problem import special_values
from .table import BF16, COMBINATIONS, F16, F32, SPECIAL_VALUES


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_infinities_and_nan_are_where_stored_sets_have_them(rule: str, backend: str) -> None:
    line = Line(rule, [COMBINATIONS], 3, backend)
    line.base.tensors[0].copy_(special_values(line.base.tensors[0], 1, 0))
    sets = [[t.clone() for t in line.base.tensors] for _ in range(3)]
    first, second = [torch.zeros_like(t) for t in sets[0]], [torch.zeros_like(t) for t in sets[0]]
    steps = [torch.zeros((), device=line.device)]
    stored = kernels.step_plan(
        StepTensors(rule, sets, [0], steps, first, second if line.tensors.exp_avg_sqs else None),
        backend,
    )
    for turn in range(6):
        gradients = [special_values(first[0], len(SPECIAL_VALUES), turn)]
        for plan in (stored, line.plan):
            plan.step(gradients, settings_of(rule, [0.5, 1.0, 2.0])[:1])
        if turn == 2:
            kernels.average_(sets, [0.5, 0.0, 0.5], backend)
            line.plan.converge([0.5, 0.0, 0.5])
        for ours, theirs in zip(
            [line.outputs[k].tensors[0] for k in range(3)], [s[0] for s in sets], strict=True
        ):
            for is_so in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(is_so(ours), is_so(theirs)), f"{is_so.__name__} in turn {turn}"


@pytest.mark.parametrize(
    "formats", [(F32, F32, F32), (BF16, BF16, BF16), (F16, F32, BF16)], ids=str
)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_and_instruction_sets_give_the_same_bits(
    backend: str,
    rule: str,
    count: int,
    formats: tuple[torch.dtype, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No NaN is left in these: the gradient that holds one is set to zero, and its step is skipped."""
    check_same_bits(
        lambda name: line_left(rule, count, formats, SIZES["block edges"], name),
        monkeypatch,
        backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_converge_of_replicas_that_are_together_changes_nothing(backend: str) -> None:
    line = Line("lion", SIZES["vector edges"], 3, backend)
    line.plan.converge([0.2, 0.3, 0.5])
    assert all(
        torch.equal(b, o)
        for outputs in line.outputs
        for b, o in zip(line.base.tensors, outputs.tensors, strict=True)
    )
    line.plan.step(
        Guarded(SIZES["vector edges"], 0, 5, line.device).tensors,
        settings_of("lion", [1.0, 2.0, 3.0]),
    )
    line.plan.converge([0.2, 0.3, 0.5])
    before = line.everything()
    line.plan.converge([1.0, 0.0, 0.0])
    assert all(torch.equal(a, b) for a, b in zip(before, line.everything(), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_would_leave_the_line_is_refused_before_anything_changes(backend: str) -> None:
    sizes = SIZES["vector edges"]
    line = Line("adamw", sizes, 2, backend)
    gradients, settings = (
        Guarded(sizes, 0, 5, line.device).tensors,
        settings_of("adamw", [0.5, 1.5]),
    )
    line.plan.step(gradients, settings)
    before = line.everything()
    with pytest.raises(
        ValueError, match=r"multipliers changed .* while the replicas are apart.*converge"
    ):
        line.plan.step(gradients, settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"multipliers changed"):
        line.plan.upload(settings_of("adamw", [0.5, 1.6]))
    with pytest.raises(ValueError, match=r"weight_decay=0.1 of group 0 .*decay_at_base"):
        line.plan.step(gradients, [s._replace(decay_at_base=False) for s in settings])
    with pytest.raises(ValueError, match=r"sum to 1"):
        line.plan.converge([0.5, 0.6])
    assert all(torch.equal(a, b) for a, b in zip(before, line.everything(), strict=True))
    line.plan.converge([0.5, 0.5])
    line.plan.step(gradients, settings_of("adamw", [0.5, 1.6]))

    coupled = Line("adam", sizes, 1, backend)
    with pytest.raises(ValueError, match=r"weight_decay=0.5 of group 1 .*adamw or lion"):
        coupled.plan.step(
            gradients,
            [s._replace(weight_decay=0.5 * i) for i, s in enumerate(settings_of("adam", [1.0]))],
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_cannot_be_planned_are_refused_by_name(backend: str) -> None:
    good = Line("adamw", [3, 4], 2, backend).tensors

    def refused(message: str, error: type[Exception] = ValueError, **changes: object) -> None:
        with pytest.raises(error, match=message):
            kernels.rank_one_plan(dataclasses.replace(good, **changes), backend)  # type: ignore[arg-type]

    refused("there are no outputs", outputs=[])
    refused("bases has 1 entries, but there are 2", bases=good.bases[:1])
    refused(
        "displacement 1 has the shape", displacements=[good.displacements[0], good.displacements[0]]
    )
    refused(
        "base 0 and output 0 of replica 1 overlap|output 0 of replica 1 and base 0 overlap",
        bases=good.outputs[1],
    )
