"""Newton-Schulz: a matrix with its singular values pushed to about 1, from products alone (Jordan
et al. 2024, kellerjordan.github.io/posts/muon).

One step is X <- a X + b (X X^T) X + c (X X^T)^2 X. Matrices of one shape go through it
together, lying: no more rows than columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdet import kernels

Triple = tuple[float, float, float]

SymmetricProduct = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]
"""(left, right, added, alpha, beta) -> beta * added + alpha * left @ right.mT, (B, m, m), where the
caller knows that it is symmetric"""

POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.205160414, -22.901934987, 16.460724910),
    (4.066395160, -2.861154087, 0.518399523),
    (3.909594904, -2.823351735, 0.525036977),
    (3.285564017, -2.415301960, 0.485294066),
    (2.300652020, -1.668903985, 0.418807312),
)
"""Coefficients of five steps for `ns_coefficients` (Amsel, Persson, Musco and Gower 2025, arXiv
2505.16932, Algorithm 1): the best ones for singular values from 1e-3 to 1, those of all steps but
the last for values up to 1.01, as the authors do against rounding."""

_GROWTH = {torch.float32: 2000.0, torch.float16: 150.0}
"""How much rounding may grow in steps on X X^T alone. Each multiplies what it has put into small
eigenvalues by a^2, 12 for the usual coefficients: three steps at a time are exact to 1e-4 in
float32. Two in float16 are off by 0.003 to 0.0045, one by 0.0015, one in bfloat16, which takes them
so, by 0.01 to 0.018."""

_FLOAT16_SCALE = 8.0
"""What X is multiplied by in float16. Its norm is 1 at first, so that elements of a large matrix
would be below 6e-5, where float16 has fewer digits. (X X^T)^2 stays below 65504 up to singular
values of 2."""


class Iteration(NamedTuple):
    """How matrices are orthogonalised, with coefficients for each step. Equal for all of one
    batch."""

    coefficients: tuple[Triple, ...]
    eps: float
    dtype: torch.dtype


@functools.cache
def fastest_dtype(device_type: str) -> torch.dtype:
    """On GPUs float16, which is as fast as bfloat16 and takes several steps at a time. On a CPU
    bfloat16 where it multiplies matrices (AMX), in a third of float32's time; without AMX it takes
    twice to seven times that."""
    if device_type != "cpu":
        return torch.float16
    has_amx = torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_amx else torch.float32


def given_in(dtype: torch.dtype) -> torch.dtype:
    """What is orthogonalised in this type is kept so until then: float16 holds no gradient whose
    norm is not known."""
    return torch.float32 if dtype == torch.float16 else dtype


def work(shape: torch.Size | tuple[int, ...]) -> int:
    """What a matrix (or a stack of them) costs, in products of its elements with its shorter
    side."""
    return int(torch.Size(shape).numel()) * min(shape[-2:])


def orthogonalise(matrices: list[Tensor], how: Iteration, backend: str = "auto") -> list[Tensor]:
    """The directions of some matrices: list of (..., m, n) -> list of the same shapes, contiguous,
    in `how.dtype`.

    All have the same m and n, or n and m: they are computed as one batch. A matrix of zeros gives
    zeros. A matrix with NaN or infinity gives NaN, and leaves the others alone.
    """
    short, long = sorted(matrices[0].shape[-2:])
    kinds = [[m for m in matrices if stands(m.shape) == kind] for kind in (False, True)]
    nothing = [matrices[0].new_empty(0, short, long), matrices[0].new_empty(0, long, short)]
    lying, standing = (
        torch.cat([none, *(m.reshape(m.shape[:-2].numel(), *m.shape[-2:]) for m in kind)])
        for kind, none in zip(kinds, nothing, strict=True)
    )
    given = given_in(how.dtype)
    stacks = of_stacks(lying.to(given), standing.to(given), how, backend)
    made = [
        iter(stack.contiguous().split([m.shape[:-2].numel() for m in kind]) if kind else ())
        for stack, kind in zip(stacks, kinds, strict=True)
    ]
    return [next(made[stands(m.shape)]).view(m.shape) for m in matrices]


def stands(shape: torch.Size) -> bool:
    return shape[-2] > shape[-1]


def of_stacks(
    lying: Tensor, standing: Tensor, how: Iteration, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The same of (L, m, n) and (S, n, m), m <= n, of which either may be empty, and of the type
    that `given_in` says. What is made of the second is not contiguous."""
    cut, (short, long) = len(lying), lying.shape[1:]
    x = lying.new_empty(cut + len(standing), short, long, dtype=how.dtype)
    scale = _FLOAT16_SCALE if how.dtype == torch.float16 else 1.0
    for part, given in ((x[:cut], lying), (x[cut:], standing.mT)):
        # in float32, as 16 bits cannot hold a sum of so many squares
        norms = torch.linalg.vector_norm(given, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        torch.div(given, norms.clamp(min=how.eps).to(given.dtype) / scale, out=part)
    if x.numel():
        x = _iterate(x, how, scale, symmetric_product(x, backend))
    return x[:cut], x[cut:].mT


def _iterate(x: Tensor, how: Iteration, scale: float, symmetric: SymmetricProduct) -> Tensor:
    """(B, m, n), m <= n -> (B, m, n). `scale`: x is that many times too large, until the last step.

    From n = 2 m on, several steps may be taken on the (m, m) matrix A = X X^T: the next A is P A P,
    and X is multiplied by the product of all P at once. That is a third fewer operations for n = 4
    m. Else a X is added to the product: as a number on P's diagonal, rounding would be 1.7 times as
    much.
    """
    growth = _GROWTH.get(x.dtype, 0.0) if x.shape[-1] >= 2 * x.shape[-2] else 0.0
    scales = [1.0] * (len(how.coefficients) - 1) + [scale]
    steps = [
        (a / out, b / scale**2 / out, c / scale**4 / out)
        for (a, b, c), out in zip(how.coefficients, scales, strict=True)
    ]
    for first, end in itertools.pairwise(_cut(how.coefficients, growth)):
        gram = symmetric(x, x, None, 1.0, 0.0)
        total: Tensor | None = None
        for i, (a, b, c) in enumerate(steps[first:end], first + 1):
            p = symmetric(gram, gram, gram, c, b)
            if end - first == 1:
                x = torch.baddbmm(x, p, x, beta=a)
                break
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            # all of these are polynomials of one matrix: they commute, and each product is
            # symmetric
            total = p if total is None else symmetric(p, total, None, 1.0, 0.0)
            if i < end:
                gram = symmetric(symmetric(p, gram, None, 1.0, 0.0), p, None, 1.0, 0.0)
        if total is not None:
            x = torch.bmm(total, x)
    return x


def _cut(steps: Sequence[Triple], growth: float) -> list[int]:
    """Where a group of steps begins, and at last their number. A group is one step, or as many as
    have a product of all a^2 of at most `growth`."""
    made, reached = [0], 1.0
    for i, (a, _, _) in enumerate(steps):
        if i > made[-1] and reached * a * a > growth:
            made.append(i)
            reached = 1.0
        reached *= a * a
    return [*made, len(steps)]


def symmetric_product(x: Tensor, backend: str) -> SymmetricProduct:
    """The fastest there is for matrices like `x`: a Triton kernel for 16 bits on CUDA (and where it
    is asked for), else torch's."""
    may = x.is_cuda and backend != "torch" and kernels.state("triton", x.device) == kernels.USABLE
    if x.dtype != torch.float32 and (backend == "triton" or may):
        from hdet.kernels.triton import symmetric_products

        return symmetric_products.product
    return _whole


def _whole(left: Tensor, right: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    if added is None:
        product = torch.bmm(left, right.mT)
        return product if alpha == 1.0 else product * alpha
    return torch.baddbmm(added, left, right.mT, beta=beta, alpha=alpha)
