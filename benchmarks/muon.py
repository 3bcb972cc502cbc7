"""A step of FusedMuon on a transformer's blocks, beside torch.optim.Muon and AdamW, and how near both directions are to float64's. JSON lines.

python -m benchmarks.muon [--width 384] [--blocks 12] [--rounds 7] [--device cpu|cuda] [--threads N] [--out FILE]

torch computes Newton-Schulz in bfloat16 on every device; hdet in float32 on a CPU, where bfloat16 is slower, and in bfloat16 elsewhere. So
"ns_dtype" of a record is hdet's. The biases, the norms, and an embedding of 1024 rows go through AdamW, torch's with fused=True.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hdet import FusedMuon
from hdet.optim import newton_schulz

from .compare import Shapes, gpt2
from .harness import alternate, alternate_on_cuda, emit

USUAL = (3.4445, -4.7750, 2.0315)


def model(width: int, blocks: int) -> tuple[Shapes, Shapes]:
    """(matrices of the blocks, the rest): GPT-2's shapes without the table of tokens, which a vocabulary would decide."""
    shapes = gpt2(width, blocks)[1:]
    return [s for s in shapes[1:] if len(s) == 2], [s for s in shapes if len(s) == 1 or s == shapes[0]]


def owned(shapes: Shapes, gradients: list[Tensor], device: str) -> list[Parameter]:
    params = [Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params


def step(arguments: argparse.Namespace, ns_dtype: torch.dtype | None) -> dict[str, Any]:
    matrices, rest = model(arguments.width, arguments.blocks)
    of_matrices, of_rest = ([torch.randn(shape, device=arguments.device) for shape in shapes] for shapes in (matrices, rest))
    ours = FusedMuon(
        [
            {"params": owned(matrices, of_matrices, arguments.device), "use_muon": True},
            {"params": owned(rest, of_rest, arguments.device), "use_muon": False},
        ],
        ns_dtype=ns_dtype,
    )
    theirs = [
        torch.optim.Muon(owned(matrices, of_matrices, arguments.device)),
        torch.optim.AdamW(owned(rest, of_rest, arguments.device), fused=True),
    ]

    def in_torch() -> None:
        for optimizer in theirs:
            optimizer.step()

    candidates = {"hdet": ours.step, "torch": in_torch}
    if arguments.device == "cuda":
        seconds = alternate_on_cuda(candidates, arguments.rounds)
    else:
        seconds = alternate(candidates, arguments.rounds, warmup=1)
    ratio = statistics.median(one / other for one, other in zip(seconds["hdet"], seconds["torch"], strict=True))
    return {
        "benchmark": "muon",
        "operation": "step",
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "width": arguments.width,
        "blocks": arguments.blocks,
        "parameters_of_matrices": sum(torch.Size(shape).numel() for shape in matrices),
        "ns_dtype": str(ns_dtype or (torch.float32 if arguments.device == "cpu" else torch.bfloat16)),
        "hdet_ms": round(1e3 * statistics.median(seconds["hdet"]), 1),
        "torch_ms": round(1e3 * statistics.median(seconds["torch"]), 1),
        "ratio": round(ratio, 3),
    }


def exact(x: Tensor) -> Tensor:
    """The direction in float64, from singular values."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    s = values / values.square().sum().sqrt()
    for _ in range(5):
        s = USUAL[0] * s + USUAL[1] * s**3 + USUAL[2] * s**5
    return left @ torch.diag(s) @ right


def accuracy(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Relative distance |O - exact| / |exact| of directions, Frobenius. "steep": singular values fall by six orders of magnitude."""
    from torch.optim._muon import _zeropower_via_newtonschulz as torchs

    width = arguments.width
    x = torch.randn(width, 4 * width, device=arguments.device)
    if kind == "steep":
        x = x * torch.logspace(0, -6, 4 * width, device=arguments.device)
    expected = exact(x)
    made = {"torch": torchs(x, USUAL, 5, 1e-7)}
    for dtype in (torch.float32, torch.bfloat16):
        (made[f"hdet {dtype}"],) = newton_schulz.orthogonalise([x], newton_schulz.Iteration(USUAL, 5, 1e-7, dtype))
    off = {name: float((o.double() - expected).norm() / expected.norm()) for name, o in made.items()}
    return {
        "benchmark": "muon",
        "operation": "direction",
        "matrix": kind,
        "width": width,
        "off": {k: float(f"{v:.2g}") for k, v in off.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="a file to append the lines to")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    for kind in ("normal", "steep"):
        emit(accuracy(given, kind), given.out)
    for dtype in (None, torch.bfloat16) if given.device == "cpu" else (None,):
        emit(step(given, dtype), given.out)
