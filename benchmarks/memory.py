"""Bytes a parameter of AdamW in several libraries, and the memory of a training run of Llama 3 8B
line by line.

    python -m benchmarks.memory [--tokens 8192] [--card 80]

hdet's figures are those of its own rules, which a test compares with a state. Others' are in their
sources: bitsandbytes 0.50 and torchao 0.18 keep two moments in codes of 8 bits with float32 scales
of 256 elements; FlashOptim (github.com/databricks/flashoptim, flashoptim/optimizers.py) has float16
scales of 32 elements, and 8 bits of correction.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch

from hdet.kernels.numbers import CODES, count_scales
from hdet.optim.masters import MASTER_DTYPES
from hdet.optim.moment_storage import EIGHT_BIT, dtype_for

from .tables import table

BF16 = torch.bfloat16
LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY = 32, 4096, 14336, 1024, 128256
Shapes = list[tuple[int, ...]]


def llama_3_8b() -> Shapes:
    block = [(WIDTH, WIDTH)] * 2 + [(KEYS, WIDTH)] * 2 + [(HIDDEN, WIDTH)] * 2
    block += [(WIDTH, HIDDEN), (WIDTH,), (WIDTH,)]
    return [(VOCABULARY, WIDTH), *(block * LAYERS), (WIDTH,), (VOCABULARY, WIDTH)]


class Bytes(NamedTuple):
    """Of some parameters in bfloat16 under hdet's AdamW with moments in 8 bits."""

    weights: int
    corrections: int
    moments: int
    scales: int
    gradients: int
    largest_gradient: int


def bytes_of(shapes: Iterable[tuple[int, ...]], master_weights: str | None = "split24") -> Bytes:
    sizes = [prod(shape) for shape in shapes]
    count, moments, scales = sum(sizes), 0, 0
    for size in sizes:
        kept = dtype_for(EIGHT_BIT, torch.empty(size, device="meta"))
        moments += 2 * kept.itemsize * size
        scales += 2 * 4 * count_scales(size) if kept == CODES else 0
    correction = MASTER_DTYPES[master_weights].itemsize if master_weights else 0
    return Bytes(2 * count, correction * count, moments, scales, 2 * count, 2 * max(sizes))


PEERS = {  # parameter, master, moments, gradient
    "torch AdamW, float32": (4.0, 0.0, 8.0, 4.0),
    "bitsandbytes, torchao: float32 parameters, 8 bits": (4.0, 0.0, 2 + 8 / 256, 4.0),
    "bitsandbytes, torchao: bfloat16, 8 bits, no master": (2.0, 0.0, 2 + 8 / 256, 2.0),
    "FlashOptim, 24 bits": (2.0, 1.0, 2 + 4 / 32, 2.0),
}


def parameter_rows() -> list[list[str]]:
    rows = dict(PEERS)
    for title, master in (("no master", None), ("split", "split"), ("split24", "split24")):
        b = bytes_of([(1 << 20,)], master)
        kept = [one / (1 << 20) for one in b[:-1]]
        rows[f"hdet, {title}"] = (kept[0], kept[1], kept[2] + kept[3], kept[4])
    *kept, _ = rows["hdet, split24"]
    rows["the same, gradients released"] = (*kept, 0.0)
    return [[name, *(f"{x:.2f}" for x in (*row, sum(row)))] for name, row in rows.items()]


def run_lines(tokens: int) -> dict[str, float]:
    """GB of one process. Blocks are recomputed in the backward pass (activation checkpointing), and
    the loss is taken of all tokens at once."""
    b = bytes_of(llama_3_8b())
    block = 2 * tokens * (8 * WIDTH + 2 * KEYS + 4 * HIDDEN)
    lines = {
        "weights, bfloat16": b.weights,
        "corrections, 8 bits": b.corrections,
        "two moments, codes of 8 bits": b.moments,
        "scales of blocks of 256": b.scales,
        "gradients, released: the largest": b.largest_gradient,
        f"inputs of {LAYERS} blocks, {tokens} tokens": 2 * tokens * WIDTH * LAYERS,
        "activations of one block, and their gradients": 2 * block,
        "logits in bfloat16, and in float32 with their gradient": tokens * VOCABULARY * (2 + 4 + 4),
        "CUDA context, libraries' workspaces, fragments (assumed)": 3e9,
    }
    return {name: value / 1e9 for name, value in lines.items()}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    made.add_argument("--card", type=float, default=80.0, help="GB")
    options = made.parse_args()
    heads = ["AdamW", "parameter", "master", "moments", "gradient", "bytes a parameter"]
    print(table(heads, parameter_rows()))
    lines = run_lines(options.tokens)
    total, count = sum(lines.values()), sum(map(prod, llama_3_8b()))
    lines["sum"] = total
    print(f"\nLlama 3 8B, {count:,} parameters\n")
    print(table(["", "GB"], [[name, f"{value:.2f}"] for name, value in lines.items()]))
    fits = "fits" if total <= options.card else "does not fit"
    kept = 2 * count / 1e9 - lines["gradients, released: the largest"]
    print(f"\n{total:.1f} GB {fits} into {options.card:g}; with all gradients {total + kept:.1f}")


if __name__ == "__main__":
    main()
