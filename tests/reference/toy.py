"""A least-squares problem with the same numbers everywhere: no library's random generator is
involved.

Step t, replica r sees `ROWS` rows x with targets y = x . truth + noise; loss = mean of (x . theta -
y)^2 / 2.
"""

import math

from tests.reference.method import Vector

SIZE, ROWS = 6, 4
Batch = tuple[list[Vector], Vector]


def uniforms(seed: int, count: int) -> Vector:
    """Numbers in (-1, 1) from a 64-bit multiplicative hash of (seed, index)."""
    out = []
    for index in range(count):
        word = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) % 2**64
        for _ in range(2):
            word ^= word >> 32
            word = word * 0xD6E8FEB86659FD93 % 2**64
        out.append((word >> 11) / 2**52 - 1)
    return out


def start() -> Vector:
    return uniforms(1, SIZE)


def batch(step: int, replica: int) -> Batch:
    numbers = uniforms(1000 + 64 * step + replica, ROWS * (SIZE + 1))
    truth = uniforms(2, SIZE)
    scales = [4 ** (-i / (SIZE - 1)) for i in range(SIZE)]
    rows = [
        [scale * x for scale, x in zip(scales, numbers[i * SIZE : (i + 1) * SIZE], strict=True)]
        for i in range(ROWS)
    ]
    noise = numbers[ROWS * SIZE :]
    targets = [
        math.fsum(x * t for x, t in zip(row, truth, strict=True)) + 0.1 * e
        for row, e in zip(rows, noise, strict=True)
    ]
    return rows, targets


def loss_and_gradient(theta: Vector, data: Batch) -> tuple[float, Vector]:
    rows, targets = data
    errors = [
        math.fsum(x * t for x, t in zip(row, theta, strict=True)) - y
        for row, y in zip(rows, targets, strict=True)
    ]
    loss = math.fsum(e * e for e in errors) / (2 * len(rows))
    gradient = [
        math.fsum(e * row[i] for e, row in zip(errors, rows, strict=True)) / len(rows)
        for i in range(len(theta))
    ]
    return loss, gradient
