"""K replicas that share gradient and moments on one device, beside K steps of torch's fused AdamW.

JSON lines; see compare.py.

python -m benchmarks.replicas [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdet import kernels as hk
from hdet.kernels import StepPlan, StepSettings, StepTensors

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


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = []
    for count in (2, 8) if not options.quick else (8,):
        # bytes of memory a parameter: ours, theirs and the gradients
        for name, shapes, notes in options.shapes(12 + 16 * count):
            records.append(shared_moments(options, name, shapes, notes, count))
            free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
