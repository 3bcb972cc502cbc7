"""Offsets past 2^31 elements without the memory, on the CPU: chunks lie that far out, and addresses as far back. The step itself is
in test_cpu.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet import _C, kernels
from hdet.kernels import RankOneTensors, StepOptions, StepSettings, StepTensors
from hdet.kernels.native.step import NativeStepPlan
from hdet.kernels.spec import rounding

from .cases import CHUNK, Guarded

BF16 = torch.bfloat16
FAR = 2**36 + CHUNK
"""elements: past 2^31, and past 2^34 where random numbers need a second word; chunks start at multiples of their length"""
SIZES = [CHUNK + 3, 17]
SETTINGS = StepSettings(0.02, (), 0.9, 0.95, 1e-8, 0.1, decay_at_base=True)


def move_chunks(chunks: Tensor) -> None:
    """Every chunk starts FAR elements further on."""
    chunks.view(torch.int64).view(-1, _C.CHUNK_BYTES // 8)[:, 0] += FAR


def move_addresses(table: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """The tensors of the table's first entries start so much earlier, so that a chunk's memory is what it was."""
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            table[i] -= FAR * tensor.element_size()


class FarStepPlan(NativeStepPlan):
    def move(self) -> None:
        t = self.tensors
        parts = [*t.params, t.exp_avgs or [], t.exp_avg_sqs or []]
        move_addresses(self.addresses, [tensor for part in parts for tensor in part])

    def step(
        self, gradients: Sequence[Tensor], settings: Sequence[StepSettings], options: StepOptions = kernels.spec.interface.PLAIN
    ) -> None:
        self._take_settings(settings, options)
        self._take_gradients(gradients)
        move_chunks(self.chunks)
        move_addresses(self.gradient_table, gradients)
        self._run()


def step_tensors(dtype: torch.dtype, **more: object) -> StepTensors:
    columns = [Guarded(SIZES, place % 3, place).tensors for place in range(3)]
    params = [t.to(BF16).to(dtype) for t in columns[0]]
    moments = [[t.abs() for t in column] for column in columns[1:]]
    return StepTensors("adamw", [params], [0] * len(SIZES), [torch.zeros(()) for _ in SIZES], *moments, **more)  # type: ignore[arg-type]


def test_random_numbers_know_where_they_are() -> None:
    """A stochastically rounded step far out uses the numbers of its elements there, all 50 bits of them."""
    exact, tensors = step_tensors(torch.float32), step_tensors(BF16, stochastic=77, first_replica=3, ids=[5, 9])
    gradients, settings = Guarded(SIZES, 1, 60).tensors, [SETTINGS._replace(multipliers=[1.0])]
    kernels.step_plan(exact, "cpu").step(gradients, settings)
    plan = FarStepPlan(tensors, kernels.native.Memory(torch.device("cpu")))
    plan.move()
    plan.step(gradients, settings)
    for identity, value, found in zip([5, 9], exact.params[0], tensors.params[0], strict=True):
        element = FAR + torch.arange(value.numel())
        zero, quad = torch.zeros_like(element), element // 4
        words = rounding.philox(77, (quad & 0xFFFFFFFF, (quad >> 32) | 3 << 16, zero + identity, zero + 1))
        word = torch.stack(words)[element % 4, torch.arange(value.numel())]
        assert torch.equal(found, rounding.stochastic_bfloat16(value, word & 0xFFFF))


def test_an_average_a_pair_and_a_norm_far_out() -> None:
    def sets(count: int) -> list[list[Tensor]]:
        return [Guarded(SIZES, k, k, dtypes=BF16).tensors for k in range(count)]

    near, far = sets(3), sets(3)
    plan = kernels.average_plan(far, backend="cpu")
    move_chunks(plan.chunks)  # type: ignore[attr-defined]
    move_addresses(plan.addresses, [t for row in far for t in row])  # type: ignore[attr-defined]
    plan.average([0.2, 0.3, 0.5])
    kernels.average_(near, [0.2, 0.3, 0.5])
    assert all(torch.equal(a, b) for ours, theirs in zip(near, far, strict=True) for a, b in zip(ours, theirs, strict=True))

    (source, near_lower), far_set = sets(2), Guarded(SIZES, 0, 9).tensors
    del near_lower
    pair = kernels.pair_plan(source, far_set, backend="cpu")
    move_chunks(pair.chunks)  # type: ignore[attr-defined]
    move_addresses(pair.addresses, [*source, *far_set])  # type: ignore[attr-defined]
    pair.copy(0.5)
    assert all(torch.equal(0.5 * a.float(), b) for a, b in zip(source, far_set, strict=True))
    pair.lerp(1.0)
    assert all(torch.equal(a.float(), b) for a, b in zip(source, far_set, strict=True))

    norm = kernels.norm_plan(source, backend="cpu")
    expected = norm.norm()
    move_chunks(norm.chunks)  # type: ignore[attr-defined]
    move_addresses(norm.addresses, source)  # type: ignore[attr-defined]
    assert torch.equal(norm.norm(), expected)


def test_swap_far_out() -> None:
    one, other = Guarded(SIZES, 0, 1).tensors, Guarded(SIZES, 1, 2).tensors
    before = [[t.clone() for t in tensors] for tensors in (other, one)]
    plan = kernels.pair_plan(one, other, backend="cpu")
    move_chunks(plan.chunks)  # type: ignore[attr-defined]
    move_addresses(plan.addresses, [*one, *other])  # type: ignore[attr-defined]
    plan.swap()
    assert all(torch.equal(a, b) for old, new in zip(before, (one, other), strict=True) for a, b in zip(old, new, strict=True))


def test_a_line_far_out() -> None:
    def tensors() -> RankOneTensors:
        columns = [Guarded(SIZES, 0, place).tensors for place in range(4)]
        outputs = [Guarded(SIZES, 1, 10 + k, dtypes=BF16).tensors for k in range(2)]
        moments = [[t.abs() for t in column] for column in columns[2:]]
        return RankOneTensors("adamw", *columns[:2], outputs, [0, 0], [torch.zeros(()) for _ in SIZES], *moments)

    near, far = tensors(), tensors()
    plans = [kernels.rank_one_plan(t, "cpu") for t in (near, far)]
    moved: list[Tensor] = [*far.outputs[0], *far.outputs[1], *far.exp_avgs, *far.exp_avg_sqs]  # type: ignore[misc,list-item]
    move_addresses(plans[1].addresses, moved)  # type: ignore[attr-defined]
    move_addresses(plans[1].line_addresses, [*far.bases, *far.displacements])  # type: ignore[attr-defined]
    move_chunks(plans[1].chunks)  # type: ignore[attr-defined]
    settings, gradients = [SETTINGS._replace(multipliers=[0.5, 1.5])], Guarded(SIZES, 0, 99).tensors
    plans[0].step(gradients, settings)
    far_plan = plans[1]
    far_plan._take_settings(settings, kernels.spec.interface.PLAIN)  # type: ignore[attr-defined]
    far_plan._take_gradients(gradients)  # type: ignore[attr-defined]
    move_addresses(far_plan.gradient_table, gradients)  # type: ignore[attr-defined]
    far_plan._run()  # type: ignore[attr-defined]
    for plan in plans:
        plan.converge([0.5, 0.5])
    for ours, theirs in [(near.bases, far.bases), (near.displacements, far.displacements), *zip(near.outputs, far.outputs, strict=True)]:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
