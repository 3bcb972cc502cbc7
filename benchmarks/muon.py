"""A step of FusedMuon on a transformer's blocks, beside torch.optim.Muon and AdamW, and how near
both directions are to float64's. JSON lines.

python -m benchmarks.muon [--width 384] [--blocks 12] [--tokens 0] [--device cpu|cuda] [--threads N]
[--out FILE]

torch computes Newton-Schulz in bfloat16 on every device; hdet in float32 on a CPU, where bfloat16
is slower, and in bfloat16 elsewhere. So "ns_dtype" of a record is hdet's. The biases, the norms,
and the embeddings go through AdamW, torch's with fused=True. "newton_schulz_ms" is the part of
hdet's step that products take, "whole_products_ms" the same with torch's products in the place of
those that compute half of a symmetric one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hdet import FusedMuon
from hdet.optim import newton_schulz

from .compare import Options, Shapes, free, gpt2, launches
from .harness import alternate, alternate_on_cuda, emit

USUAL = (3.4445, -4.7750, 2.0315)
OPERATION = "muon and adamw, a step"
SIZE = {"width": 768, "blocks": 12, "tokens": 50257}
"""of what `make gpu` times: GPT-2 124M"""


def model(width: int, blocks: int, tokens: int) -> tuple[Shapes, Shapes]:
    """(matrices of the blocks, the rest): GPT-2's shapes, with that many tokens."""
    shapes = gpt2(width, blocks)
    tables = [(tokens, width), shapes[1]] if tokens else shapes[1:2]
    return [s for s in shapes[2:] if len(s) == 2], [*tables, *(s for s in shapes if len(s) == 1)]


def owned(shapes: Shapes, gradients: list[Tensor], device: str) -> list[Parameter]:
    params = [Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params


def optimizer(matrices: list[Parameter], rest: list[Parameter], **options: Any) -> FusedMuon:
    return FusedMuon(
        [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}], **options
    )


def step(
    options: Options, width: int, blocks: int, tokens: int, ns_dtype: torch.dtype | None
) -> dict[str, Any]:
    matrices, rest = model(width, blocks, tokens)
    of_matrices, of_rest = options.randn(matrices), options.randn(rest)
    made = [
        (owned(matrices, of_matrices, options.device), owned(rest, of_rest, options.device))
        for _ in range(2)
    ]
    ours = optimizer(*made[0], ns_dtype=ns_dtype, backend=options.backend)
    theirs = [torch.optim.Muon(made[1][0]), torch.optim.AdamW(made[1][1], fused=True)]
    dtype = ns_dtype or (torch.float32 if options.device == "cpu" else torch.bfloat16)
    how = newton_schulz.Iteration(USUAL, 5, 1e-7, dtype)
    alike = [
        [x for x in of_matrices if tuple(sorted(x.shape)) == sides]
        for sides in sorted({tuple(sorted(s)) for s in matrices})
    ]

    def in_torch() -> None:
        for one in theirs:
            one.step()

    def products(backend: str) -> None:
        for batch in alike:
            newton_schulz.orthogonalise(batch, how, backend)

    candidates: dict[str, Callable[[], object]] = {
        "hdet": ours.step,
        "torch": in_torch,
        "newton_schulz": lambda: products(options.backend),
        "whole_products": lambda: products("torch"),
    }
    repeats = min(options.repeats, 7)
    seconds = (
        alternate_on_cuda(candidates, repeats)
        if options.device == "cuda"
        else alternate(candidates, repeats, warmup=1)
    )
    ratio = statistics.median(
        one / other for one, other in zip(seconds["hdet"], seconds["torch"], strict=True)
    )
    return {
        "benchmark": "muon",
        "operation": OPERATION,
        "shapes": f"{blocks} x {width}, {tokens} tokens",
        "backend": options.backend,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "width": width,
        "blocks": blocks,
        "tokens": tokens,
        "parameters_of_matrices": sum(torch.Size(shape).numel() for shape in matrices),
        "ns_dtype": str(dtype),
        **{
            f"{name}_ms": round(1e3 * statistics.median(values), 3)
            for name, values in seconds.items()
        },
        "ratio": round(ratio, 3),
    }


def run(options: Options) -> list[dict[str, Any]]:
    """What `make gpu` prints."""
    if options.counting:
        matrices, rest = model(64, 12, 0)
        params = [
            owned(shapes, options.randn(shapes), options.device) for shapes in (matrices, rest)
        ]
        counted = launches(optimizer(*params, backend=options.backend).step)
        records = [
            {
                "benchmark": "launches",
                "operation": OPERATION,
                "backend": options.backend,
                "launches": counted,
            }
        ]
    else:
        records = [step(options, **SIZE, ns_dtype=None)]
    for record in records:
        emit(record)
    free()
    return records


def exact(x: Tensor) -> Tensor:
    """The direction in float64, from singular values."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    s = values / values.square().sum().sqrt()
    for _ in range(5):
        s = USUAL[0] * s + USUAL[1] * s**3 + USUAL[2] * s**5
    return left @ torch.diag(s) @ right


def accuracy(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Relative distance |O - exact| / |exact| of directions, Frobenius.

    "steep": singular values fall by six orders of magnitude.
    """
    from torch.optim._muon import _zeropower_via_newtonschulz as torchs

    width = arguments.width
    x = torch.randn(width, 4 * width, device=arguments.device)
    if kind == "steep":
        x = x * torch.logspace(0, -6, 4 * width, device=arguments.device)
    expected = exact(x)
    made = {"torch": torchs(x, USUAL, 5, 1e-7)}
    for dtype in (torch.float32, torch.bfloat16):
        (made[f"hdet {dtype}"],) = newton_schulz.orthogonalise(
            [x], newton_schulz.Iteration(USUAL, 5, 1e-7, dtype)
        )
    off = {
        name: float((o.double() - expected).norm() / expected.norm()) for name, o in made.items()
    }
    return {
        "benchmark": "muon",
        "operation": "direction",
        "matrix": kind,
        "width": width,
        "off": {k: float(f"{v:.2g}") for k, v in off.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=0, help="rows of the table of tokens")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="a file to append the lines to")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    for kind in ("normal", "steep"):
        emit(accuracy(given, kind), given.out)
    for dtype in (None, torch.bfloat16) if given.device == "cpu" else (None,):
        emit(
            step(
                Options(given.device, "auto", quick=False),
                given.width,
                given.blocks,
                given.tokens,
                dtype,
            ),
            given.out,
        )
