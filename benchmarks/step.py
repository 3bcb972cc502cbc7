"""One replica's step: fused AdamW, the bfloat16 path with clipping, and packing, each beside torch's way. JSON lines; see compare.py.

python benchmarks/step.py [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from compare import Options, Shapes, compare, free, main, torch_adamw
from harness import emit
from torch import Tensor

from hdet import FusedAdamW
from hdet import kernels as hk
from hdet.kernels import StepOptions, StepSettings, StepTensors

SETTINGS = StepSettings(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)


def fused(options: Options, params: list[Tensor], gradients: list[Tensor], **more: Any) -> FusedAdamW:
    owned = [torch.nn.Parameter(param) for param in params]
    for param, gradient in zip(owned, gradients, strict=True):
        param.grad = gradient
    return FusedAdamW(owned, lr=1e-4, backend=options.backend, **more)


def adamw(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """float32 throughout: gradient, parameter and two moments are read, the last three written: 28 bytes."""
    gradients = options.randn(shapes)
    ours, theirs = fused(options, options.randn(shapes), gradients), torch_adamw(options.randn(shapes), gradients)
    return compare(options, "adamw", name, shapes, ours.step, theirs.step, 28, **notes)


def clipped(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 gradients and parameters, float32 masters: norm (2 bytes), then gradient 2, parameter 2, master 8, moments 16.

    torch: gradients cast to float32 and unscaled, clip_grad_norm_, fused AdamW on the masters, and the cast back.
    """
    gradients, params = options.randn(shapes, torch.bfloat16), options.randn(shapes, torch.bfloat16)
    scale = torch.tensor(1.0, device=options.device)
    ours = fused(options, params, gradients, master_weights="fp32", max_grad_norm=1.0)
    ours.grad_scale, ours.found_inf = scale, torch.zeros((), device=options.device)  # as a GradScaler sets them
    models = options.randn(shapes, torch.bfloat16)
    theirs = torch_adamw([model.float() for model in models], options.zeros(shapes))
    masters: list[Tensor] = theirs.param_groups[0]["params"]
    wide: list[Tensor] = [master.grad for master in masters]  # type: ignore[misc]
    found_inf = torch.zeros(1, device=options.device)

    @torch.no_grad()
    def in_torch() -> None:
        torch._foreach_copy_(wide, gradients)
        torch._amp_foreach_non_finite_check_and_unscale_(wide, found_inf, scale)
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        theirs.step()
        torch._foreach_copy_(models, masters)

    return compare(options, "clip + unscale + step + cast, bf16 with master", name, shapes, ours.step, in_torch, 30, **notes)


def packed(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """The last step before a converge writes weight * parameter into a bucket; in sequence a copy reads what the step has written."""
    gradients = options.randn(shapes)
    together, apart = _tensors(options, shapes), _tensors(options, shapes)
    with_pack, without = hk.step_plan(together, options.backend), hk.step_plan(apart, options.backend)
    assert apart.buckets is not None
    pack = hk.pair_plan(apart.params[0], apart.buckets, backend=options.backend)
    once, plain = StepOptions(finish="pack", weights=[0.25]), StepOptions()

    def in_sequence() -> None:
        without.step(gradients, [SETTINGS], plain)
        pack.copy(0.25)

    def fused_step() -> None:
        with_pack.step(gradients, [SETTINGS], once)

    return compare(
        options, "step with pack vs step, then pack", name, shapes, fused_step, in_sequence, 28, peer="hdet in two calls", **notes
    )


def _tensors(options: Options, shapes: Shapes) -> StepTensors:
    steps = [torch.zeros((), device=options.device) for _ in shapes]
    params, first, second, buckets = options.randn(shapes), options.zeros(shapes), options.zeros(shapes), options.zeros(shapes)
    return StepTensors("adamw", [params], [0] * len(shapes), steps, first, second, buckets=buckets)


def host(options: Options, tensors: int = 300) -> dict[str, Any]:
    """A step on 300 tensors of one element each: nothing but the way from Python to the kernel and back."""
    shapes: Shapes = [(1,)] * tensors
    gradients = options.randn(shapes)
    steps = {"hdet": fused(options, options.randn(shapes), gradients).step, "torch": torch_adamw(options.randn(shapes), gradients).step}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for turn in range(-20, 200):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 0:
                times[key].append(1e6 * (time.perf_counter() - start))
            if options.device == "cuda":
                torch.cuda.synchronize()
    record = {
        "benchmark": "kernels",
        "operation": "host time of a step",
        "shapes": f"{tensors} x 1",
        "device": options.device,
        "backend": options.backend,
        "tensors": tensors,
        "hdet_us": round(statistics.median(times["hdet"]), 1),
        "torch_us": round(statistics.median(times["torch"]), 1),
        "ratio": round(statistics.median(times["hdet"]) / statistics.median(times["torch"]), 3),
    }
    emit(record)
    return record


def run(device: str = "cpu", backend: str = "auto", quick: bool = False) -> list[dict[str, Any]]:
    """All records."""
    options = Options(device, backend, quick)
    records = [host(options)]
    for benchmark, memory in ((adamw, 28), (clipped, 40), (packed, 36)):
        for name, shapes, notes in options.shapes(memory):
            if benchmark is adamw or not quick or name == "GPT-2 124M":
                records.append(benchmark(options, name, shapes, notes))
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
