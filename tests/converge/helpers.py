"""What tests of the ways of averaging share: tasks and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdet.converge import Task
from hdet.kernels import numbers
from hdet.replicas import Replicas

Tensors, Masters = Sequence[torch.Tensor], Sequence[torch.Tensor | None]
KINDS = (
    "float32", "float64", "bfloat16", "float16", "bfloat16 with fp32 master", "bfloat16 split",
    "float32 transposed", "bfloat16 with fp32 master transposed", "bfloat16 split transposed",
)  # fmt: skip


def held(values: Tensors, kinds: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """float64 values as tensors of these kinds, and their masters."""
    tensors, masters = [], []
    for value, kind in zip(values, kinds, strict=True):
        master, stored = None, kind.removesuffix(" transposed")
        if stored == "bfloat16 with fp32 master":
            master = value.float()
            tensor = master.bfloat16()
        elif stored == "bfloat16 split":
            tensor, master = numbers.split(value.float())
        else:
            tensor = value.to(getattr(torch, stored))
        if stored != kind and value.dim() == 2:
            turned = (None if t is None else t.t().contiguous().t() for t in (tensor, master))
            tensor, master = turned
        tensors.append(tensor)
        masters.append(master)
    return tensors, masters


def exact(tensors: Tensors, masters: Masters) -> list[torch.Tensor]:
    """The float64 values that `held` tensors stand for."""

    def value(tensor: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
        if master is not None and master.dtype == torch.int16:
            return numbers.join(tensor, master).double()
        return (tensor if master is None else master).double()

    return [value(*pair) for pair in zip(tensors, masters, strict=True)]


def written(tensors: Tensors, masters: Masters) -> list[torch.Tensor]:
    """All there is to compare bitwise."""
    return [t.clone() for t in (*tensors, *masters) if t is not None]


def equal(some: Tensors, others: Tensors) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def rounding_of(kind: str) -> float:
    """Half the spacing of a kind's exact values at 1, and a little for fp32 sums of four."""
    return {"float64": 1e-15, "bfloat16": 2.0**-8, "float16": 2.0**-11}.get(kind, 2.0**-22)


def task(tensors: Tensors, masters: Masters | None = None, **changes: Any) -> Task:
    """A task in the world's ranks; changes: fields of Task."""
    replicas = changes.pop("replicas", None) or Replicas.from_group()
    some = torch.nn.Parameter(torch.zeros(1))
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD([some], lr=0.1)
    settings = {"bucket_bytes": 1 << 14, **changes}
    return Task(tensors, replicas, optimizer, lambda: masters or [None] * len(tensors), **settings)
