"""Newton-Schulz: a matrix with its singular values pushed to about 1, from products alone (Jordan
et al. 2024, kellerjordan.github.io/posts/muon).

One step is X <- a X + b (X X^T) X + c (X X^T)^2 X. Matrices of one shape go through it together,
lying: no more rows than columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hdet import kernels

SymmetricProduct = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]
"""(left, right, added, alpha, beta) -> beta * added + alpha * left @ right.mT, (B, m, m), where the
caller knows that it is symmetric"""

_GRAM_STEPS = 3
"""steps that are taken on X X^T alone.

Each one multiplies what rounding has put into small eigenvalues by a^2, 12 for the usual
coefficients: three leave 1e-5 in float32"""


class Iteration(NamedTuple):
    """How matrices are orthogonalised. Equal for all of one batch."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    dtype: torch.dtype


def work(shape: torch.Size | tuple[int, ...]) -> int:
    """What a matrix (or a stack of them) costs, in products of its elements with its shorter
    side."""
    return int(torch.Size(shape).numel()) * min(shape[-2:])


def orthogonalise(
    matrices: list[Tensor],
    how: Iteration,
    backend: str = "auto",
    *,
    skip: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The directions of some matrices: list of (..., m, n) -> list of the same shapes, contiguous,
    in `dtype`, by default `how.dtype`.

    All have the same m and n, or n and m: they are computed as one batch (B, min, max). A matrix of
    zeros gives zeros. A matrix with NaN or infinity gives NaN, and leaves the others alone. Where
    `skip` (0-d) holds, all directions are zeros.
    """
    lying = [matrix for matrix in matrices if not _stands(matrix)]
    standing = [matrix for matrix in matrices if _stands(matrix)]
    short, long = sorted(matrices[0].shape[-2:])
    cut = _count(lying)
    batch = torch.empty(
        cut + _count(standing), short, long, dtype=how.dtype, device=matrices[0].device
    )
    if lying:
        torch._foreach_copy_(_parts(batch[:cut], lying), lying)
    if standing:  # turned together: one by one they would be as many launches on a GPU
        stack = batch.new_empty(_count(standing), long, short)
        torch._foreach_copy_(_parts(stack, standing), standing)
        batch[cut:] = stack.mT
    if batch.numel():
        batch = iterate(batch, how, symmetric_product(batch, backend))
    if skip is not None:
        batch.masked_fill_(skip, 0.0)
    dtype = dtype or how.dtype
    turned = (
        batch[cut:].mT.to(dtype, memory_format=torch.contiguous_format).contiguous()
    )  # one copy, whether the type changes or not
    made = iter(_parts(batch[:cut].to(dtype), lying)), iter(_parts(turned, standing))
    return [next(made[_stands(matrix)]) for matrix in matrices]


def _stands(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _count(matrices: list[Tensor]) -> int:
    return sum(matrix.shape[:-2].numel() for matrix in matrices)


def _parts(stack: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """Views of a stack that are like these."""
    if all(matrix.dim() == 2 for matrix in matrices):
        return list(stack.unbind())
    counts = [matrix.shape[:-2].numel() for matrix in matrices]
    return [
        part.view(matrix.shape) for part, matrix in zip(stack.split(counts), matrices, strict=True)
    ]


def iterate(x: Tensor, how: Iteration, symmetric: SymmetricProduct) -> Tensor:
    """(B, m, n), m <= n -> (B, m, n).

    In float32, from n = 2 m on, up to three steps are taken on the (m, m) matrix X X^T: with P = a
    + b A + c A^2 the next A is P A P, and X is multiplied by the product of all P at once. That is
    a third fewer operations for n = 4 m.
    """
    a, b, c = how.coefficients
    # in float32 also for 16 bits, which cannot hold a sum of so many squares
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norms.clamp(min=how.eps).to(x.dtype)
    together = _GRAM_STEPS if x.dtype == torch.float32 and x.shape[-1] >= 2 * x.shape[-2] else 1
    for steps in _cut(how.steps, together):
        gram = symmetric(x, x, None, 1.0, 0.0)
        if steps == 1:
            x = torch.baddbmm(x, symmetric(gram, gram, gram, c, b), x, beta=a)
            continue
        total: Tensor | None = None
        for left in reversed(range(steps)):
            p = symmetric(gram, gram, gram, c, b)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            # all of these are polynomials of one matrix: they commute, and each product is
            # symmetric
            total = p if total is None else symmetric(p, total, None, 1.0, 0.0)
            if left:
                gram = symmetric(symmetric(p, gram, None, 1.0, 0.0), p, None, 1.0, 0.0)
        assert total is not None
        x = torch.bmm(total, x)
    return x


def _cut(steps: int, most: int) -> list[int]:
    """Numbers as equal as can be, none above `most`, that sum to `steps`."""
    parts = -(-steps // most)
    bounds = [steps * i // parts for i in range(parts + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def symmetric_product(x: Tensor, backend: str) -> SymmetricProduct:
    """The fastest there is for matrices like `x`: a Triton kernel for 16 bits on CUDA (and where it
    is asked for), else torch's."""
    suits = x.is_cuda and x.dtype != torch.float32 and backend != "torch"
    if backend == "triton" or (suits and kernels.state("triton", x.device) == kernels.USABLE):
        from hdet.kernels.triton import symmetric_products

        return symmetric_products.product
    return _whole


def _whole(left: Tensor, right: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    if added is None:
        product = torch.bmm(left, right.mT)
        return product if alpha == 1.0 else product * alpha
    return torch.baddbmm(added, left, right.mT, beta=beta, alpha=alpha)
