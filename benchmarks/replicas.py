"""K replicas that share gradient and moments on one device, beside K steps of torch's fused AdamW.

JSON lines; see compare.py.

python -m benchmarks.replicas [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hdet
from hdet import kernels as hk
from hdet.kernels import RankOneTensors, StepPlan, StepSettings, StepTensors

from .compare import Options, Shapes, compare, free, main, torch_adamw


def settings(count: int) -> list[StepSettings]:
    multipliers = [0.8 + 0.4 * k / count for k in range(count)]
    return [StepSettings(1e-4, multipliers, 0.9, 0.999, 1e-8, 1e-2, decay_at_base=True)]


def stored(options: Options, shapes: Shapes, sets: list[list[Tensor]]) -> StepPlan:
    """K stored sets, one pair of moments."""
    return hk.step_plan(
        StepTensors("adamw", sets, [0] * len(shapes), *_state(options, shapes)), options.backend
    )


def _state(options: Options, shapes: Shapes) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return (
        [torch.zeros((), device=options.device) for _ in shapes],
        options.zeros(shapes),
        options.zeros(shapes),
    )


def separate_steps(
    options: Options, shapes: Shapes, count: int, gradients: list[Tensor]
) -> Callable[[], None]:
    """What K separate runs do: K sets of moments, each read and written."""
    optimizers = [torch_adamw(options.randn(shapes), gradients) for _ in range(count)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def shared_moments(
    options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int
) -> dict[str, Any]:
    """Gradient 4, moments 16, and each set read and written: 20 + 8K bytes, where separate steps
    move 28K."""
    gradients = options.randn(shapes)
    plan, rows = (
        stored(options, shapes, [options.randn(shapes) for _ in range(count)]),
        settings(count),
    )
    separate = separate_steps(options, shapes, count, gradients)
    operation = f"{count} replicas, shared moments, vs {count} fused steps"
    return compare(
        options,
        operation,
        name,
        shapes,
        lambda: plan.step(gradients, rows),
        separate,
        20 + 8 * count,
        **notes,
    )


def rank_one(
    options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int
) -> dict[str, Any]:
    """Base and displacement stored, K bfloat16 sets written: gradient 4, moments 16, base 4,
    displacement 8, outputs 2K."""
    gradients, rows = options.randn(shapes), settings(count)
    outputs = [options.zeros(shapes, torch.bfloat16) for _ in range(count)]
    tensors = RankOneTensors(
        "adamw",
        options.randn(shapes),
        options.zeros(shapes),
        outputs,
        [0] * len(shapes),
        *_state(options, shapes),
    )
    plan = hk.rank_one_plan(tensors, options.backend)
    separate = separate_steps(options, shapes, count, gradients)
    operation = f"{count} replicas, rank one, bf16 parameters, vs {count} fused steps"
    return compare(
        options,
        operation,
        name,
        shapes,
        lambda: plan.step(gradients, rows),
        separate,
        32 + 2 * count,
        **notes,
    )


def replicated(
    options: Options, shapes: Shapes, count: int, storage: str, dtype: torch.dtype
) -> hdet.FusedAdamW:
    """Co-resident replicas as an Ensemble has them, in the middle of a cycle; stored ones of 16
    bits with float32 masters."""
    params = [torch.nn.Parameter(p) for p in options.randn(shapes, dtype)]
    masters = "fp32" if storage == "parameters" and dtype != torch.float32 else None
    optimizer = hdet.FusedAdamW(
        params, lr=1e-4, decay_at="base", master_weights=masters, backend=options.backend
    )
    optimizer.set_replicas(
        count, lambda p: [p, *(p.detach().clone() for _ in range(count - 1))], storage
    )
    optimizer.multipliers = [[0.8 + 0.4 * k / count] for k in range(count)]
    for param, gradient in zip(params, options.randn(shapes, dtype), strict=True):
        param.grad = gradient
    optimizer.step()
    return optimizer


def bytes_of(optimizer: hdet.FusedAdamW) -> float:
    """Of parameters, gradients and state, for each parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        value
        for state in optimizer.state.values()
        for held in state.values()
        for value in (held if isinstance(held, list) else [held])
    ]
    tensors = [*params, *(p.grad for p in params), *(t for t in states if t.dim())]
    return sum(t.nbytes for t in tensors) / sum(p.numel() for p in params)


def storages(
    options: Options,
    name: str,
    shapes: Shapes,
    notes: dict[str, Any],
    count: int,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Base and displacement beside stored sets, through the optimizer: a step, and the average of a
    cycle. `memory`: bytes a parameter."""
    line, stored = (
        replicated(options, shapes, count, storage, dtype)
        for storage in ("displacement", "parameters")
    )
    weights, size = [1 / count] * count, dtype.itemsize
    ours, theirs = 28 + size + size * count, 16 + size + (10 if size == 2 else 8) * count
    kind = f"{count} replicas, {str(dtype).removeprefix('torch.')}"
    notes |= {"peer": "hdet, stored", "memory": bytes_of(line), "memory_stored": bytes_of(stored)}
    step = f"a step of {kind}: base and displacement vs stored"
    average = f"an average of {kind}: base and displacement vs stored"
    bound = round(ours / theirs, 2)
    mean, stored_mean = (
        partial(optimizer.average_replicas, weights) for optimizer in (line, stored)
    )
    return [
        compare(options, step, name, shapes, line.step, stored.step, ours, bound=bound, **notes),
        compare(options, average, name, shapes, mean, stored_mean, 16 + size * count, **notes),
    ]


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = []
    # bytes of memory a parameter: ours, theirs and the gradients
    for benchmark, counts, memory in (
        (shared_moments, (2, 8) if not options.quick else (8,), lambda k: 4 + 8 + 4 * k + 12 * k),
        (rank_one, (8,), lambda k: 4 + 16 + 2 * k + 12 * k),
    ):
        for count in counts:
            for name, shapes, notes in options.shapes(memory(count)):
                if options.quick and name == "one of 2^27" and benchmark is not shared_moments:
                    continue
                records.append(benchmark(options, name, shapes, notes, count))
                free()
    for count, dtype in itertools.product((4, 8), (torch.bfloat16, torch.float32)):
        for name, shapes, notes in options.shapes(48 + 14 * count):
            if options.wants(name):
                records += storages(options, name, shapes, notes, count, dtype)
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
