"""Batches of products that are symmetric: X X^T, and products of polynomials of one matrix
(Newton-Schulz). Half of the tiles are computed.

The only kernel here that multiplies matrices, on tensor cores: sums are float32, in an order of the
hardware's own.
"""

import triton
import triton.language as tl


@triton.jit
def lower_tile(t):
    """(row, column) of the t-th tile of a lower triangle, row by row."""
    row = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > t, row - 1, row)  # the root is rounded
    row = tl.where((row + 1) * (row + 2) // 2 <= t, row + 1, row)
    return row, t - row * (row + 1) // 2


@triton.jit
def tile_product(left, right, rows, columns, m, length, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Rows of `left` times rows of `right`, both (m, length): (BLOCK, BLOCK), float32."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    # rows beyond the last are read from the beginning, and what they give is not stored
    rows = (rows % m).to(tl.int64)  # a matrix may have more elements than an int can count
    columns = (columns % m).to(tl.int64)
    for start in range(0, length, DEPTH):
        live = start + depth < length
        x = tl.load(
            left + rows[:, None] * length + (start + depth)[None, :], mask=live[None, :], other=0.0
        )
        y = tl.load(
            right + columns[:, None] * length + (start + depth)[None, :],
            mask=live[None, :],
            other=0.0,
        )
        total = tl.dot(x, tl.trans(y), total)
    return total


@triton.jit(do_not_specialize=["alpha", "beta", "tiles"])
def symmetric_product(
    left,
    right,
    added,
    made,
    m,
    length,
    tiles,
    alpha,
    beta,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """made = beta * added + alpha * left @ right^T for each matrix of a batch, where the caller
    knows that the product is symmetric.

    `left`, `right`: (B, m, length); `added`, `made`: (B, m, m); contiguous, of one type of 16 bits.
    `tiles`: of one lower triangle. A program computes one tile, and stores it and its mirror image.
    ADDED: is there an `added`? It is read where the tile lies, so it is symmetric as well.
    """
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    row, column = lower_tile(program % tiles)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    total = (
        tile_product(
            left + batch * m * length,
            right + batch * m * length,
            rows,
            columns,
            m,
            length,
            BLOCK,
            DEPTH,
        )
        * alpha
    )
    square = batch * m * m
    inside = (rows[:, None] < m) & (columns[None, :] < m)
    place = rows[:, None].to(tl.int64) * m + columns[None, :]
    if ADDED:
        total += beta * tl.load(added + square + place, mask=inside, other=0.0).to(tl.float32)
    value = total.to(made.dtype.element_ty)
    tl.store(made + square + place, value, mask=inside)
    if row != column:
        mirrored = columns[:, None].to(tl.int64) * m + rows[None, :]
        tl.store(
            made + square + mirrored,
            tl.trans(value),
            mask=(columns[:, None] < m) & (rows[None, :] < m),
        )
