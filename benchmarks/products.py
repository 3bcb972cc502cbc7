"""Symmetric products of Newton-Schulz on a GPU, in tiles of several kinds, beside torch's whole
ones. JSON lines.

    python -m benchmarks.products

Shapes are those of GPT-2 124M: X X^T of its matrices, and the polynomials of these.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .harness import alternate_on_cuda, emit

KINDS = [(128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 4)]
"""rows of a tile, depth, warps, stages"""
SIDE = 768


def operands() -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, what is multiplied with its transpose, what is added)."""
    for count, length in ((24, 3072), (12, 2304), (12, 768)):
        x = torch.randn(count, SIDE, length, device="cuda", dtype=torch.bfloat16) / length**0.5
        yield f"X X^T, {count} of {SIDE} x {length}", x, None
    for count in (24, 12):
        x = torch.randn(count, SIDE, SIDE, device="cuda", dtype=torch.bfloat16) / SIDE**0.5
        gram = torch.bmm(x, x.mT)
        yield f"polynomial, {count} of {SIDE} x {SIDE}", gram, gram


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks.products: torch finds no GPU here")
    from hdet.kernels.triton import symmetric_products as products

    def milliseconds(way: Any) -> dict[str, float]:
        return {
            name: round(
                1e3
                * statistics.median(
                    alternate_on_cuda({"it": lambda x=x, added=added: way(x, added)}, 5)["it"]
                ),
                4,
            )
            for name, x, added in operands()
        }

    def in_torch(x: Tensor, added: Tensor | None) -> Tensor:
        return (
            torch.bmm(x, x.mT)
            if added is None
            else torch.baddbmm(added, x, x.mT, beta=0.5, alpha=1.5)
        )

    emit({"benchmark": "products", "way": "torch", "ms": milliseconds(in_torch)})
    for tile, depth, warps, stages in KINDS:
        options = {
            "BLOCK": tile,
            "DEPTH": depth,
            "_OPTIONS": {"num_warps": warps, "num_stages": stages},
        }
        with mock.patch.multiple(products, **options):
            ms = milliseconds(lambda x, added: products.product(x, x, added, 1.5, 0.5))
        emit(
            {
                "benchmark": "products",
                "way": "pointers",
                "tile": tile,
                "depth": depth,
                "warps": warps,
                "stages": stages,
                "ms": ms,
            }
        )


if __name__ == "__main__":
    main()
