"""One replica's step: fused AdamW, in bfloat16, and with masters and clipping, each beside torch's way. JSON lines; see compare.py.

python -m benchmarks.step [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from hdet import FusedAdamW

from .compare import Options, Shapes, compare, free, main, torch_adamw
from .harness import emit


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


def mastered(options: Options, name: str, shapes: Shapes, notes: dict[str, Any], kind: str = "fp32") -> dict[str, Any]:
    """bfloat16 parameters and gradients, float32 masters and moments: gradient 2, parameter 2, master 8, moments 16: 28 bytes. Split: 26.

    torch: gradients cast to float32, fused AdamW on the masters, and the cast back.
    """
    gradients, params = options.randn(shapes, torch.bfloat16), options.randn(shapes, torch.bfloat16)
    ours = fused(options, params, gradients, master_weights=kind)
    models = options.randn(shapes, torch.bfloat16)
    theirs = torch_adamw([model.float() for model in models], options.zeros(shapes))
    masters: list[Tensor] = theirs.param_groups[0]["params"]
    wide: list[Tensor] = [master.grad for master in masters]  # type: ignore[misc]

    @torch.no_grad()
    def in_torch() -> None:
        torch._foreach_copy_(wide, gradients)
        theirs.step()
        torch._foreach_copy_(models, masters)

    operation = {"fp32": "adamw, bf16 with master", "split": "adamw, bf16 split"}[kind]
    return compare(options, operation, name, shapes, ours.step, in_torch, 28 if kind == "fp32" else 26, **notes)


def split(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """`mastered`, with the 16 bits that a bfloat16 parameter lacks in the place of a master."""
    return mastered(options, name, shapes, notes, "split")


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


def low(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 throughout, rounded stochastically: 14 bytes. Bound by instructions, not by memory.

    At 4.3 TB/s and 1.75 GHz an H200 has 96 issue slots for an element. The update takes about 75 of them (exact division and root),
    a quarter of a Philox call 25, and widening and rounding four streams 20 or so: of_copy is about 0.8 at best.
    """
    gradients, low = options.randn(shapes, torch.bfloat16), torch.bfloat16
    ours = fused(options, options.randn(shapes, low), gradients, moment_dtype=low, stochastic_rounding=True)
    theirs = torch_adamw(options.randn(shapes, low), gradients)
    return compare(options, "adamw, bf16 throughout, stochastic", name, shapes, ours.step, theirs.step, 14, **notes)


HOST = {
    "steady": "gradients at the same addresses in every step",
    "fresh": "at other addresses in every step, as zero_grad(set_to_none=True) leaves them",
    "one None": "one of them is None in every other step, as in a mixture of experts",
}


def host(options: Options, tensors: int = 300) -> list[dict[str, Any]]:
    """A step on 300 tensors of one element each, nothing but the way from Python to the kernel and back, in each case of HOST."""
    shapes: Shapes = [(1,)] * tensors
    runs = {(case, side): _one_run(options, shapes, side) for case in HOST for side in ("hdet", "torch")}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(-20, 200):
        for (case, side), (step, params, sets) in runs.items():
            for param, gradient in zip(params, sets[turn % 2 if case == "fresh" else 0], strict=True):
                param.grad = gradient
            if case == "one None" and turn % 2:
                params[tensors // 2].grad = None
            start = time.perf_counter()
            step()
            if turn >= 0:
                times[case, side].append(1e6 * (time.perf_counter() - start))
            if options.device == "cuda":
                torch.cuda.synchronize()
    medians = {key: statistics.median(values) for key, values in times.items()}
    records = []
    for case, meaning in HOST.items():
        ours, theirs = medians[case, "hdet"], medians[case, "torch"]
        records.append(
            {
                "benchmark": "kernels",
                "operation": f"host time of a step, {case}",
                "gradients": meaning,
                "shapes": f"{tensors} x 1",
                "device": options.device,
                "backend": options.backend,
                "tensors": tensors,
                "hdet_us": round(ours, 1),
                "torch_us": round(theirs, 1),
                "ratio": round(ours / theirs, 3),
                "of_steady": round(ours / medians["steady", "hdet"], 2),
            }
        )
        emit(records[-1])
    return records


def _one_run(options: Options, shapes: Shapes, side: str) -> tuple[Any, list[Tensor], list[list[Tensor]]]:
    """A step, its parameters, and two sets of gradients for them."""
    sets = [options.randn(shapes) for _ in range(2)]
    made = fused(options, options.randn(shapes), sets[0]) if side == "hdet" else torch_adamw(options.randn(shapes), sets[0])
    return made.step, made.param_groups[0]["params"], sets


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = [] if options.counting else host(options)
    for benchmark, memory in ((adamw, 28), (mastered, 40), (split, 36), (low, 16), (clipped, 40)):
        for name, shapes, notes in options.shapes(memory):
            if benchmark is adamw or options.wants(name):
                records.append(benchmark(options, name, shapes, notes))
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
