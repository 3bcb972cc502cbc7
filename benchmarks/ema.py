"""A step of AdamW with averages of the weights over time, beside a second pass over them.

JSON lines.

    python -m benchmarks.ema [--device cpu|cuda] [--threads N] [--quick] [--json FILE]

Float32, all in turn in one run: a step alone; with one average and with two, moved in the same pass
(`ema=`); and alone, followed by the multi-tensor update of torch.optim.swa_utils' AveragedModel.

    ms                    of a step, the median
    of_step               to the step alone, the median round by round; by bytes 1.29 with one
                          average, 1.57 with two
    of_two_passes         to the step and swa_utils' update, likewise; by bytes 0.9
    target                what `of_step` and `of_two_passes` are to be at most, on a CPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import ParameterList
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hdet

from .harness import emit
from .kernels import Machine, gpt2, machine_of, owned, parser

Shapes = Sequence[tuple[int, ...]]
SHAPES: dict[str, Callable[[bool], Shapes]] = {
    "16 x 2^20": lambda quick: [(1 << (14 if quick else 20),)] * 16,
    "GPT-2 small": lambda quick: gpt2(32, 1, 101) if quick else gpt2(),
    "3 000 x 1 000": lambda quick: [(1000,)] * (30 if quick else 3000),
}
TARGETS = {"16 x 2^20": {"of_step": 1.25, "of_two_passes": 0.85}}
WAYS: dict[str, Any] = {
    "alone": None,
    "one average": 0.999,
    "two averages": (0.999, 0.9999),
    "then swa_utils": None,
}
ALONE, SECOND_PASS = "alone", "then swa_utils"


def step_of(machine: Machine, shapes: Shapes, way: str) -> Callable[[], object]:
    """A step, far enough from the beginning of its averages."""
    zeros = lambda: [Tensor.mul_(p, 1e-3) for p in machine.randn(shapes, torch.float32)]
    params = owned(machine.randn(shapes, torch.float32), zeros())
    optimizer = hdet.FusedAdamW(params, lr=1e-4, ema=WAYS[way], backend=machine.backend)
    step: Callable[[], object] = optimizer.step
    if way == SECOND_PASS:
        model = ParameterList(params)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        step = lambda: (optimizer.step(), averaged.update_parameters(model))
    for _ in range(12):
        step()
    return step


def records(machine: Machine) -> Iterator[dict[str, Any]]:
    for name, shapes_of in SHAPES.items():
        shapes = shapes_of(machine.quick)
        seconds = machine.seconds({way: step_of(machine, shapes, way) for way in WAYS})
        for way, own in seconds.items():
            ratios = {
                f"of_{what}": round(median(a / b for a, b in zip(own, of, strict=True)), 3)
                for what, of in (("step", seconds[ALONE]), ("two_passes", seconds[SECOND_PASS]))
            }
            one = way == "one average" and not machine.is_gpu
            yield {
                "operation": "adamw step", "tensors": name, "averages": way,
                "device": machine.name, "threads": torch.get_num_threads(),
                "ms": round(1e3 * median(own), 3), **ratios,
                "target": TARGETS.get(name) if one else None,
            }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.set_defaults(threads=1)
    options = made.parse_args(arguments)
    for record in records(machine_of(options)):
        emit({"benchmark": "ema", **record}, options.json)


if __name__ == "__main__":
    main()
