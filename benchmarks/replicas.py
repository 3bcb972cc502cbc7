"""K replicas that share gradient and moments on one device, beside K steps of torch's fused AdamW. JSON lines; see compare.py.

python -m benchmarks.replicas [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hdet import kernels as hk
from hdet.kernels import RankOneTensors, StepOptions, StepPlan, StepSettings, StepTensors

from .compare import Options, Shapes, compare, free, main, torch_adamw

PLAIN = StepOptions()


def settings(count: int) -> list[StepSettings]:
    multipliers = [0.8 + 0.4 * k / count for k in range(count)]
    return [StepSettings(1e-4, multipliers, 0.9, 0.999, 1e-8, 1e-2, decay_at_base=True)]


def stored(options: Options, shapes: Shapes, sets: list[list[Tensor]]) -> StepPlan:
    """K stored sets, one pair of moments."""
    return hk.step_plan(StepTensors("adamw", sets, [0] * len(shapes), *_state(options, shapes)), options.backend)


def _state(options: Options, shapes: Shapes) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [torch.zeros((), device=options.device) for _ in shapes], options.zeros(shapes), options.zeros(shapes)


def separate_steps(options: Options, shapes: Shapes, count: int, gradients: list[Tensor]) -> Callable[[], None]:
    """What K separate runs do: K sets of moments, each read and written."""
    optimizers = [torch_adamw(options.randn(shapes), gradients) for _ in range(count)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def shared_moments(options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int) -> dict[str, Any]:
    """Gradient 4, moments 16, and each set read and written: 20 + 8K bytes, where separate steps move 28K."""
    gradients = options.randn(shapes)
    plan, rows = stored(options, shapes, [options.randn(shapes) for _ in range(count)]), settings(count)
    separate = separate_steps(options, shapes, count, gradients)
    operation = f"{count} replicas, shared moments, vs {count} fused steps"
    return compare(options, operation, name, shapes, lambda: plan.step(gradients, rows, PLAIN), separate, 20 + 8 * count, **notes)


def rank_one(options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int) -> dict[str, Any]:
    """Base and displacement stored, K bfloat16 sets written: gradient 4, moments 16, base 4, displacement 8, outputs 2K."""
    gradients, rows = options.randn(shapes), settings(count)
    outputs = [options.zeros(shapes, torch.bfloat16) for _ in range(count)]
    tensors = RankOneTensors("adamw", options.randn(shapes), options.zeros(shapes), outputs, [0] * len(shapes), *_state(options, shapes))
    plan = hk.rank_one_plan(tensors, options.backend)
    separate = separate_steps(options, shapes, count, gradients)
    operation = f"{count} replicas, rank one, bf16 parameters, vs {count} fused steps"
    return compare(options, operation, name, shapes, lambda: plan.step(gradients, rows, PLAIN), separate, 32 + 2 * count, **notes)


def with_mean(options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int) -> dict[str, Any]:
    """The last step of a cycle writes the mean to all sets: 20 + 8K bytes, and the average on its own another 8K (bound 0.57 for 8)."""
    gradients, rows = options.randn(shapes), settings(count)
    sets, other_sets = ([options.randn(shapes) for _ in range(count)] for _ in range(2))
    plan, other = stored(options, shapes, sets), stored(options, shapes, other_sets)
    weights = [1 / count] * count
    mean = StepOptions(finish="mean", weights=weights)
    average = hk.average_plan(other_sets, None, options.backend)

    def in_sequence() -> None:
        other.step(gradients, rows, PLAIN)
        average.average(weights)

    operation = f"step of {count} replicas with their mean vs step, then average"
    return compare(
        options,
        operation,
        name,
        shapes,
        lambda: plan.step(gradients, rows, mean),
        in_sequence,
        20 + 8 * count,
        peer="hdet in two calls",
        bound=round((20 + 8 * count) / (20 + 16 * count), 2),
        **notes,
    )


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = []
    # bytes of memory a parameter: ours, theirs and the gradients
    for benchmark, counts, memory in (
        (shared_moments, (2, 8) if not options.quick else (8,), lambda k: 4 + 8 + 4 * k + 12 * k),
        (rank_one, (8,), lambda k: 4 + 16 + 2 * k + 12 * k),
        (with_mean, (8,), lambda k: 4 + 2 * (8 + 4 * k)),
    ):
        for count in counts:
            for name, shapes, notes in options.shapes(memory(count)):
                if options.quick and name == "one of 2^27" and benchmark is not shared_moments:
                    continue
                records.append(benchmark(options, name, shapes, notes, count))
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
