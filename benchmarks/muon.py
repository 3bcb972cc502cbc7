"""A step of FusedMuon on a transformer's blocks, beside torch.optim.Muon and AdamW; how near
directions are to float64's; and ways of computing them. JSON lines.

python -m benchmarks.muon [directions step ways products] [--width 384] [--blocks 12] [--tokens 0]
    [--device cpu|cuda] [--threads N] [--quick] [--json FILE]

step         torch computes Newton-Schulz in bfloat16 on every device; hdet in "ns_dtype": the
             default is float16 on GPUs and the faster of the two on a CPU. The biases, the
             norms, and the embeddings go through AdamW, torch's with fused=True. "newton_schulz_ms"
             is the part of hdet's step that products take, "whole_products_ms" the same with
             torch's products in the place of those that compute half of a symmetric one. On CUDA
             "kernels_ms" and "launches" are the profiler's
directions   relative distances |O - exact| / |exact|, Frobenius; "steep": singular values fall by
             six orders of magnitude
ways         Newton-Schulz in two types, step by step and two steps at a time on X X^T, and with the
             coefficients of Polar Express; without the host on CUDA, where "predicted" is what
             float16 is the default for
products     on CUDA: halves of symmetric products of GPT-2 124M beside torch's whole ones
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torchs_directions

from hdet import FusedMuon
from hdet.optim import POLAR_EXPRESS, newton_schulz
from hdet.optim.newton_schulz import Iteration

from .kernels import Machine, Shapes, gpt2, graph_of, machine_of, owned, parser

USUAL = (3.4445, -4.7750, 2.0315)
BF16, FP16 = torch.bfloat16, torch.float16


def exact(x: Tensor, coefficients: Sequence[Any] = (USUAL,) * 5) -> Tensor:
    """The direction in float64, from singular values."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    s = values / values.norm()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (left * s) @ right


def off(found: Tensor, expected: Tensor) -> float:
    return float(f"{float((found.double() - expected).norm() / expected.norm()):.3g}")


def how(dtype: torch.dtype) -> Iteration:
    return Iteration((USUAL,) * 5, 1e-7, dtype)


# -- sections --------------------------------------------------------------------------------------


def directions(machine: Machine, width: int, blocks: int, tokens: int) -> None:
    for kind in ("normal", "steep"):
        x = torch.randn(width, 4 * width, device=machine.device)
        if kind == "steep":
            x = x * torch.logspace(0, -6, 4 * width, device=machine.device)
        made = {"torch": torchs_directions(x, USUAL, 5, 1e-7)}
        for dtype in (torch.float32, BF16, FP16):
            (made[f"hdet {dtype}"],) = newton_schulz.orthogonalise([x], how(dtype))
        expected = exact(x)
        distances = {name: off(found, expected) for name, found in made.items()}
        machine.say(operation="direction", shapes=kind, width=width, off=distances)


def model(width: int, blocks: int, tokens: int) -> tuple[Shapes, Shapes]:
    """(matrices of the blocks, the rest): GPT-2's shapes, with that many tokens."""
    shapes = gpt2(width, blocks)
    tables = [(tokens, width), shapes[1]] if tokens else shapes[1:2]
    return [s for s in shapes[2:] if len(s) == 2], [*tables, *(s for s in shapes if len(s) == 1)]


def step(machine: Machine, width: int, blocks: int, tokens: int) -> None:
    for dtype in (torch.float32, BF16) if not machine.is_gpu else (BF16, FP16):
        kinds = model(width, blocks, tokens)
        gradients = [machine.randn(shapes) for shapes in kinds]

        def params(kinds: Any = kinds, gradients: Any = gradients) -> list[list[Any]]:
            pairs = zip(kinds, gradients, strict=True)
            return [owned(machine.randn(shapes), of) for shapes, of in pairs]

        matrices, rest = params()
        groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        ours = FusedMuon(groups, ns_dtype=dtype, backend=machine.backend)
        matrices, rest = params()
        theirs = [torch.optim.Muon(matrices), torch.optim.AdamW(rest, fused=True)]
        alike = [
            [x for x in gradients[0] if tuple(sorted(x.shape)) == sides]
            for sides in sorted({tuple(sorted(s)) for s in kinds[0]})
        ]

        def products(backend: str, alike: Any = alike, dtype: torch.dtype = dtype) -> None:
            for batch in alike:
                newton_schulz.orthogonalise(batch, how(dtype), backend)

        candidates: dict[str, Callable[[], object]] = {
            "hdet": ours.step,
            "torch": lambda theirs=theirs: [one.step() for one in theirs],  # type: ignore[misc]
            "newton_schulz": partial(products, machine.backend),
            "whole_products": partial(products, "torch"),
        }
        seconds = machine.seconds(candidates)
        machine.say(
            operation="muon and adamw, a step" + (", float16" if dtype == FP16 else ""),
            shapes=f"{blocks} x {width}, {tokens} tokens",
            parameters_of_matrices=sum(torch.Size(shape).numel() for shape in kinds[0]),
            ns_dtype=str(dtype),
            **{f"{name}_ms": _ms(values) for name, values in seconds.items()},
            ratio=round(float(np.median(np.divide(seconds["hdet"], seconds["torch"]))), 3),
            **(profiled(ours.step) if machine.is_gpu else {}),
            **({"predicted_kernels_ms": PREDICTED[dtype]} if machine.is_gpu else {}),
        )


PREDICTED = {BF16: 4.6, FP16: 3.8}
"""Kernels of a step of GPT-2 124M on an H100, which were 5.98 ms. Products 2.4, in float16 1.8 as
two steps at a time need fewer; AdamW 0.4; the rest are 58 and 52 bytes of each of 85 million
elements of matrices, which were 84, at 2.7 TB/s."""


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * float(np.median(seconds)), 4)


def profiled(call: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one call, and the longest of them, as the profiler counts them. It slows what
    follows."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    parts: dict[str, list[float]] = {}
    for event in profile.events():
        is_kernel = event.device_type == torch.profiler.DeviceType.CUDA
        if is_kernel and not event.name.startswith(("Optimizer", "Memcpy", "Memset")):
            parts.setdefault(event.name[:60], []).append(event.time_range.elapsed_us() / 1e3)
    rows = [(name, len(times), round(sum(times), 3)) for name, times in parts.items()]
    return {
        "launches": sum(count for _, count, _ in rows),
        "kernels_ms": round(sum(ms for *_, ms in rows), 2),
        "longest": sorted(rows, key=lambda row: -row[2])[:14],
    }


WAYS: dict[str, tuple[Iteration, float, dict[str, float]]] = {
    "bf16": (how(BF16), 0.0, {"ms": 2.1, "error": 0.010}),
    "fp16, step by step": (how(FP16), 0.0, {"ms": 2.15, "error": 0.0013}),
    "fp16": (how(FP16), newton_schulz._GROWTH[FP16], {"ms": 1.55, "error": 0.0030}),
    "bf16, polar express": (Iteration(POLAR_EXPRESS, 1e-7, BF16), 0.0, {"ms": 2.1, "error": 0.009}),
}
"""how, growth of steps that are taken together, and what is predicted of 24 of 768 x 3072"""


def ways(machine: Machine, width: int, blocks: int, tokens: int) -> None:
    """``error``: of the directions, beside an exact iteration."""
    sizes = [(24, 768, 3072), (12, 768, 2304), (12, 768, 768), (8, 4096, 11008)]
    for size in sizes if machine.is_gpu else [(2, 32, 128)]:
        x = torch.randn(size, device=machine.device)
        for name, (way, growth, predicted) in WAYS.items():
            y = x.to(newton_schulz.given_in(way.dtype))
            run = partial(newton_schulz.of_stacks, y, y.new_empty(0, *reversed(size[1:])), way)
            with mock.patch.dict(newton_schulz._GROWTH, {way.dtype: growth}):
                small = size[1] < 4096
                error = off(run()[0][0], exact(x[0], way.coefficients)) if small else None
                call = graph_of(run).replay if machine.is_gpu else run
                machine.say(
                    operation=f"newton-schulz, {name}",
                    shapes=f"{size[0]} of {size[1]} x {size[2]}",
                    alone_ms=_ms(machine.seconds({"it": call})["it"]),
                    error=error,
                    **({"predicted": predicted} if size == sizes[0] else {}),
                )


def operands() -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, what is multiplied with its transpose, what is added)."""
    side = 768
    for count, length in ((24, 3072), (12, 2304), (12, 768)):
        x = torch.randn(count, side, length, device="cuda", dtype=BF16) / length**0.5
        yield f"X X^T, {count} of {side} x {length}", x, None
    for count in (24, 12):
        x = torch.randn(count, side, side, device="cuda", dtype=BF16) / side**0.5
        gram = torch.bmm(x, x.mT)
        yield f"polynomial, {count} of {side} x {side}", gram, gram


def products(machine: Machine, width: int, blocks: int, tokens: int) -> None:
    if not machine.is_gpu:
        return
    from hdet.kernels.triton import symmetric_products

    def in_torch(x: Tensor, added: Tensor | None) -> Tensor:
        if added is None:
            return torch.bmm(x, x.mT)
        return torch.baddbmm(added, x, x.mT, beta=0.5, alpha=1.5)

    def ours(x: Tensor, added: Tensor | None) -> Tensor:
        return symmetric_products.product(x, x, added, 1.5, 0.5)

    for way, call in {"torch": in_torch, "hdet": ours}.items():
        calls = {name: partial(call, x, added) for name, x, added in operands()}
        ms = {name: _ms(machine.seconds({"it": run})["it"]) for name, run in calls.items()}
        machine.say(operation=f"symmetric products, {way}", shapes="of GPT-2 124M", ms=ms)


SECTIONS = {"directions": directions, "step": step, "ways": ways, "products": products}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("sections", nargs="*", metavar="SECTION", help="without, the first two")
    made.add_argument("--width", type=int, default=384)
    made.add_argument("--blocks", type=int, default=12)
    made.add_argument("--tokens", type=int, default=0, help="rows of the table of tokens")
    options = made.parse_args(arguments)
    torch.manual_seed(0)
    for name in options.sections or ("directions", "step"):
        machine = machine_of(options)
        SECTIONS[name](machine, options.width, options.blocks, options.tokens)


if __name__ == "__main__":
    main()
