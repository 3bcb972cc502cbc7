"""One replica's step: fused AdamW, in bfloat16, and with masters and clipping, each beside torch's
way. JSON lines; see compare.py.

python -m benchmarks.step [--device cpu|cuda] [--backend auto] [--quick] [--threads N]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from hdet import FusedAdamW
from hdet.optim import lists
from hdet.optim.moment_storage import SMALLEST

from .compare import Options, Shapes, compare, free, main, torch_adamw
from .harness import emit


def fused(
    options: Options, params: list[Tensor], gradients: list[Tensor], **more: Any
) -> FusedAdamW:
    owned = [torch.nn.Parameter(param) for param in params]
    for param, gradient in zip(owned, gradients, strict=True):
        param.grad = gradient
    return FusedAdamW(owned, lr=1e-4, backend=options.backend, **more)


def adamw(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """float32 throughout: gradient, parameter and two moments are read, the last three written:
    28 bytes."""
    gradients = options.randn(shapes)
    ours, theirs = (
        fused(options, options.randn(shapes), gradients),
        torch_adamw(options.randn(shapes), gradients),
    )
    return compare(options, "adamw", name, shapes, ours.step, theirs.step, 28, **notes)


def mastered(
    options: Options, name: str, shapes: Shapes, notes: dict[str, Any], kind: str = "fp32"
) -> dict[str, Any]:
    """bfloat16 parameters and gradients, float32 masters and moments: gradient 2, parameter 2,
    master 8, moments 16: 28 bytes. Split: 26.

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
    return compare(
        options, operation, name, shapes, ours.step, in_torch, 28 if kind == "fp32" else 26, **notes
    )


def split(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """`mastered`, with the 16 bits that a bfloat16 parameter lacks in the place of a master."""
    return mastered(options, name, shapes, notes, "split")


def clipped(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 gradients and parameters, float32 masters: norm (2 bytes), then gradient 2,
    parameter 2, master 8, moments 16.

    torch: gradients cast to float32 and unscaled, clip_grad_norm_, fused AdamW on the masters, and
    the cast back.
    """
    gradients, params = options.randn(shapes, torch.bfloat16), options.randn(shapes, torch.bfloat16)
    scale = torch.tensor(1.0, device=options.device)
    ours = fused(options, params, gradients, master_weights="fp32", max_grad_norm=1.0)
    ours.grad_scale, ours.found_inf = (
        scale,
        torch.zeros((), device=options.device),
    )  # as a GradScaler sets them
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

    return compare(
        options,
        "clip + unscale + step + cast, bf16 with master",
        name,
        shapes,
        ours.step,
        in_torch,
        30,
        **notes,
    )


def coded(
    options: Options,
    name: str,
    shapes: Shapes,
    notes: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Moments in 8 bits: gradient 4, parameter 8, moments 4: 16 bytes, and 28 of the tensors that
    are too small for codes.

    In bfloat16, split, 14: gradient 2, parameter and its other half 8, moments 4. torch: float32
    moments.
    """
    gradients, halves = options.randn(shapes, dtype), dtype == torch.bfloat16
    ours = fused(
        options,
        options.randn(shapes, dtype),
        gradients,
        moment_dtype="8bit",
        master_weights="split" if halves else None,
    )
    theirs = torch_adamw(options.randn(shapes), options.randn(shapes))
    elements = [torch.Size(shape).numel() for shape in shapes]
    small = sum(count for count in elements if count < SMALLEST) / sum(elements)
    operation = "adamw, 8 bits, bf16 split" if halves else "adamw, 8 bits"
    return compare(
        options,
        operation,
        name,
        shapes,
        ours.step,
        theirs.step,
        (14 if halves else 16) + 12 * small,
        **notes,
    )


def coded_split(
    options: Options, name: str, shapes: Shapes, notes: dict[str, Any]
) -> dict[str, Any]:
    """`coded`, of bfloat16 parameters that are split."""
    return coded(options, name, shapes, notes, torch.bfloat16)


def low(options: Options, name: str, shapes: Shapes, notes: dict[str, Any]) -> dict[str, Any]:
    """bfloat16 throughout, rounded stochastically: 14 bytes. 90 instructions an element, a
    quarter of a Philox call is 25 of them; see docs/evidence/gpu.md."""
    gradients, low = options.randn(shapes, torch.bfloat16), torch.bfloat16
    ours = fused(
        options, options.randn(shapes, low), gradients, moment_dtype=low, stochastic_rounding=True
    )
    theirs = torch_adamw(options.randn(shapes, low), gradients)
    return compare(
        options,
        "adamw, bf16 throughout, stochastic",
        name,
        shapes,
        ours.step,
        theirs.step,
        14,
        **notes,
    )


HOST = {
    "steady": "gradients at the same addresses in every step",
    "fresh": "at other addresses in every step, as zero_grad(set_to_none=True) leaves them",
    "scheduled": "at other addresses, and with another rate, in every step",
    "one None": "one of them is None in every other step, as in a mixture of experts",
}


class Calls(torch.optim.Optimizer):
    """Of hdet's step what torch does, and nothing else: into `step` and out, gradients, where these
    and the parameters lie, versions."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})
        self.params = params
        self.places = lists.note_addresses(self.params)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        lists.note_addresses(
            [gradient for gradient in lists.gradients(self.params) if gradient is not None]
        )
        self.places.same(self.params)
        torch.autograd.graph.increment_version(self.params)


def host(options: Options, tensors: int = 300) -> list[dict[str, Any]]:
    """A step on 300 tensors of one element each, nothing but the way from Python to the kernel and
    back, in each case of HOST.

    `calls_us`: what torch itself takes of hdet's step.
    """
    shapes: Shapes = [(1,)] * tensors
    runs = {
        (case, side): _one_run(options, shapes, side)
        for case in HOST
        for side in ("hdet", "torch", "calls")
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(-20, 200):
        for (case, side), (optimizer, params, sets) in runs.items():
            for param, gradient in zip(
                params, sets[turn % 2 if case in ("fresh", "scheduled") else 0], strict=True
            ):
                param.grad = gradient
            if case == "scheduled":
                optimizer.param_groups[0]["lr"] = 1e-4 * (1 + 1e-3 * turn)
            if case == "one None" and turn % 2:
                params[tensors // 2].grad = None
            start = time.perf_counter()
            optimizer.step()
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
                "host_us": round(ours, 1),
                "calls_us": round(medians[case, "calls"], 1),
                "torch_us": round(theirs, 1),
                "ratio": round(ours / theirs, 3),
                "of_steady": round(ours / medians["steady", "hdet"], 2),
            }
        )
        emit(records[-1])
    return records


def _one_run(
    options: Options, shapes: Shapes, side: str
) -> tuple[Any, list[Tensor], list[list[Tensor]]]:
    """An optimizer, its parameters, and two sets of gradients for them."""
    sets = [options.randn(shapes) for _ in range(2)]
    params = options.randn(shapes)
    if side == "calls":
        made: Any = Calls([torch.nn.Parameter(param) for param in params])
    else:
        made = fused(options, params, sets[0]) if side == "hdet" else torch_adamw(params, sets[0])
    return made, made.param_groups[0]["params"], sets


def run(options: Options) -> list[dict[str, Any]]:
    """All records."""
    records = [] if options.counting else host(options)
    for benchmark, memory in (
        (adamw, 28),
        (mastered, 40),
        (split, 36),
        (coded, 26),
        (coded_split, 24),
        (low, 16),
        (clipped, 40),
    ):
        for name, shapes, notes in options.shapes(memory):
            if benchmark is adamw or options.wants(name):
                records.append(benchmark(options, name, shapes, notes))
                free()
    return records


if __name__ == "__main__":
    main(run, __doc__)
