"""The weighted mean of K co-resident sets, and a copy into a bucket, beside torch's ways.

JSON lines; see compare.py.

python -m benchmarks.average [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

from typing import Any

import torch

from hdet import kernels as hk

from .compare import Options, Shapes, compare, free, main


def average(
    options: Options, name: str, shapes: Shapes, notes: dict[str, Any], count: int = 8
) -> dict[str, Any]:
    """Every set is read and written once: 8K bytes. torch: the mean of a stack, copied back to
    all sets."""
    ours, theirs = ([options.randn(shapes) for _ in range(count)] for _ in range(2))
    plan, weights = hk.average_plan(ours, None, options.backend), [1 / count] * count

    def in_torch() -> None:
        for tensors in zip(*theirs, strict=True):
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)

    return compare(
        options,
        f"average of {count}",
        name,
        shapes,
        lambda: plan.average(weights),
        in_torch,
        8 * count,
        **notes,
    )


def pack(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 parameters into a float32 bucket, scaled: 6 bytes."""
    params, ours, theirs = (
        options.randn(shapes, torch.bfloat16),
        options.zeros(shapes),
        options.zeros(shapes),
    )
    plan = hk.copy_plan(params, ours, backend=options.backend)

    def in_torch() -> None:
        torch._foreach_copy_(theirs, params)
        torch._foreach_mul_(theirs, 0.25)

    return compare(
        options,
        "scaled copy, bf16 to fp32",
        name,
        shapes,
        lambda: plan.copy(0.25),
        in_torch,
        6,
        **notes,
    )


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = []
    for benchmark, memory in ((average, 64 + 40), (pack, 10)):
        for name, shapes, notes in options.shapes(memory):
            if benchmark is average or options.wants(name):
                records.append(benchmark(options, name, shapes, notes))
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
