"""What tests of the ways of averaging share: tasks, random tensors, and an account of what travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hdet.converge import Task
from hdet.kernels.spec import rounding
from hdet.replicas import Replicas

Held = tuple[list[torch.Tensor], list[torch.Tensor | None]]
KINDS = (
    "float32", "float64", "bfloat16", "float16", "bfloat16 with fp32 master", "bfloat16 split", "float32 transposed",
    "bfloat16 with fp32 master transposed", "bfloat16 split transposed",
)  # fmt: skip


def held(values: Sequence[torch.Tensor], kinds: Sequence[str]) -> Held:
    """float64 values as tensors of these kinds, and their masters."""
    tensors, masters = [], []
    for value, kind in zip(values, kinds, strict=True):
        master, stored = None, kind.removesuffix(" transposed")
        if stored == "bfloat16 with fp32 master":
            master = value.float()
            tensor = master.bfloat16()
        elif stored == "bfloat16 split":
            tensor, master = rounding.split(value.float())
        else:
            tensor = value.to(getattr(torch, stored))
        if stored != kind and value.dim() == 2:
            tensor, master = (
                None if t is None else t.t().contiguous().t() for t in (tensor, master)
            )
        tensors.append(tensor)
        masters.append(master)
    return tensors, masters


def exact(
    tensors: Sequence[torch.Tensor], masters: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The float64 values that `held` tensors stand for."""
    values = []
    for tensor, master in zip(tensors, masters, strict=True):
        if master is None:
            values.append(tensor.double())
        else:
            values.append(
                (rounding.join(tensor, master) if master.dtype == torch.int16 else master).double()
            )
    return values


def written(
    tensors: Sequence[torch.Tensor], masters: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """All there is to compare bitwise."""
    return [t.clone() for t in (*tensors, *masters) if t is not None]


def rounding_of(kind: str) -> float:
    """Half the spacing of a kind's exact values at 1, and a little for fp32 sums of four."""
    return {"float64": 1e-15, "bfloat16": 2.0**-8, "float16": 2.0**-11}.get(kind, 2.0**-22)


def task(
    tensors: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor | None] | None = None,
    **changes: Any,
) -> Task:
    """A task in the world's ranks; changes: fields of Task."""
    replicas = changes.pop("replicas", None) or Replicas.from_group()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(
        [torch.nn.Parameter(torch.zeros(1))], lr=0.1
    )
    settings = {"sync_interval": 4, "bucket_bytes": 1 << 14, **changes}
    return Task(tensors, replicas, optimizer, lambda: masters or [None] * len(tensors), **settings)


@contextmanager
def account() -> Iterator[list[tuple[str, float]]]:
    """Every collective inside: its name and the bytes that this rank has to send in it, at the least (a ring's)."""
    sent: list[tuple[str, float]] = []

    def watch(name: str, real: Any, payload: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)
            ]  # output first
            sent.append((name, payload(tensors, dist.get_world_size(kwargs.get("group")))))
            return real(*args, **kwargs)

        return call

    # torch 2.13 has new names for two of them
    names = [
        ("all_reduce",),
        ("all_to_all_single",),
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ]
    payloads = [
        lambda t, n: 2 * (n - 1) / n * t[0].nbytes, lambda t, n: (n - 1) / n * t[1].nbytes,
        lambda t, n: (n - 1) * t[1].nbytes, lambda t, n: (n - 1) / n * t[1].nbytes,
    ]  # fmt: skip
    chosen = [next(name for name in either if hasattr(dist, name)) for either in names]
    real = [getattr(dist, name) for name in chosen]
    try:
        for name, call, payload in zip(chosen, real, payloads, strict=True):
            setattr(
                dist,
                name,
                watch(
                    name.removesuffix("_single")
                    .removesuffix("_into_tensor")
                    .removesuffix("_tensor"),
                    call,
                    payload,
                ),
            )
        yield sent
    finally:
        for name, call in zip(chosen, real, strict=True):
            setattr(dist, name, call)
