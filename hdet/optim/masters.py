"""Masters, the exact values behind parameters of 16 bits, and what others write to parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.kernels import numbers
from hdet.rules import WEIGHTS
from hdet.tensors import dtensor as shards

from . import lists

EMA_KEYS = ("ema", "ema_1", "ema_2")
"""averages of the weights over time (hdet/kernels/ema.py)"""
BESIDE_KEYS = (*WEIGHTS, *EMA_KEYS)
"""float32 weights beside the parameters, as which they begin; each replica has its own. They are
averaged as parameters are."""
REPLICA_KEYS = ("replica_params", "replica_masters", *(f"replica_{key}" for key in BESIDE_KEYS))
MASTER_KEYS = ("master_param", "remainder")
WEIGHT_KEYS = (*MASTER_KEYS, *REPLICA_KEYS, *EMA_KEYS, "ema_step")
"""what a state has of the weights, and no moments: masters, averages over time, and all of the
further replicas"""
LAST_NORM = "global_norm"
"""Where gradients are released: the last norm of all of them that was finite, by which the next
step clips; 0 where none was. 0-d float32, one tensor for all parameters."""

_version: Callable[[Tensor], int] = operator.attrgetter("_version")


def state_sets(state: Mapping[str, Any], param: Tensor) -> list[Tensor]:
    """The parameter in all its replicas, the parameter itself first."""
    return [param, *(state.get("replica_params") or ())]


def kept_masters(state: Mapping[str, Any]) -> list[Tensor]:
    """The masters of all replicas, as far as there are any."""
    first = next((state[name] for name in MASTER_KEYS if state.get(name) is not None), None)
    return [] if first is None else [first, *(state.get("replica_masters") or ())]


def kept_beside(state: Mapping[str, Any], key: str) -> list[Tensor]:
    """One of BESIDE_KEYS of all replicas, as far as there are any."""
    first = state.get(key)
    return [] if first is None else [first, *(state.get(f"replica_{key}") or ())]


MASTER_DTYPES: dict[str | None, torch.dtype] = {
    "fp32": torch.float32,
    "split": torch.int16,
    "split24": torch.int8,
}
"""of a bfloat16 parameter's master, by `master_weights`"""


def own_master(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A master that is the parameter's own value: float32, or a lower half."""
    values = param.detach()
    if dtype in numbers.LOWER:
        return torch.zeros_like(values, dtype=dtype)
    return values.to(dtype, copy=True)


def make_master(param: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A master in the wanted form: moved or converted from one there is, else the parameter's own
    value. To 24 bits it is rounded to nearest."""
    values = param.detach()
    if kept is None or (numbers.is_lower(kept) and param.dtype != torch.bfloat16):
        return own_master(param, dtype)
    kept = kept.to(param.device)
    if kept.dtype == dtype:
        return kept
    exact, was_split = numbers.value_of(values, kept).float(), numbers.is_lower(kept)
    # Parameters are rewritten: a split form rounds ties away from zero, a rounded copy to even.
    if dtype == torch.float32:
        if was_split:
            values.copy_(exact)
        return exact
    upper, lower = numbers.split(exact, dtype)
    current = (exact.to(torch.bfloat16) == values) | was_split
    values.copy_(torch.where(current, upper, values))
    return torch.where(current, lower, torch.zeros_like(lower))


def like_first(param: Tensor, first: Tensor, master: Tensor) -> Tensor:
    """A new replica's master: where it equals the first replica it is meant to, to the last bit.

    Of what lies on this rank.
    """
    return torch.where(param == first, master, own_master(param, master.dtype))


def reset_master(param: Tensor, master: Tensor) -> None:
    """The master becomes exactly the parameter."""
    master = shards.local(master)
    master.copy_(own_master(shards.local(param), master.dtype))


def adopt(param: Tensor, master: Tensor) -> None:
    """Takes over what was written to a parameter behind its float32 master: elements that no longer
    are the master, rounded."""
    param, master = shards.local(param), shards.local(master)
    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(torch.float32)))


def regain(param: Tensor, master: Tensor) -> None:
    """A parameter that was 16 bits wide and has been cast to float32 is its master again, unless it
    has been written to since."""
    if param.dtype == master.dtype == torch.float32 and any(
        torch.equal(master.to(dtype).float(), param) for dtype in (torch.bfloat16, torch.float16)
    ):
        param.copy_(master)


class Watch:
    """Notices in-place changes by others to parameters that have float32 masters.

    Every write under autograd's eyes counts up the version of its tensor, also load_state_dict of a
    model. Versions only grow, so their sum tells. A write through `.data` or by a foreign kernel is
    not seen. A DTensor and its shard count apart, and both are watched; a shard may move.

    Masters are written by `check` and `adopt` alone; the first check looks at all of them.
    """

    def __init__(self, states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
        """Parameters and their states."""
        self.pairs = [pair for param, state in states for pair in _watched(param, state)]
        self.params = [param for param, _ in self.pairs]
        self._sharded = [param for param in self.params if shards.is_sharded(param)]
        self._known: list[int] = []  # nothing yet

    def _versions(self) -> list[int]:
        parts = shards.locals_of(self._sharded)
        return [sum(map(_version, [*self.params, *parts])), *lists.addresses(parts)]

    def refresh(self) -> None:
        """What has been written up to now is known."""
        self._known = self._versions()

    def distrust(self) -> None:
        """Something may have been written that was not counted."""
        self._known = []

    def wrote(self, tensors: int) -> None:
        """A step of our own has counted up by one the versions of so many of these."""
        if self._known:
            self._known[0] += tensors

    def check(self) -> None:
        """Takes over what others have written. Before each step."""
        if self.pairs and self._versions() != self._known:
            for param, master in self.pairs:
                adopt(param, master)
            self.refresh()


def _watched(param: Tensor, state: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The parameter's sets that have a float32 master, with it."""
    pairs = zip(state_sets(state, param), kept_masters(state), strict=False)
    return [
        (tensor, master)
        for tensor, master in pairs
        if master.dtype == torch.float32 and not tensor.is_inference()
    ]


def with_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, and the shards of those that are DTensors: both have a version, and a write
    counts up one of them."""
    return [*tensors, *(shards.local(tensor) for tensor in tensors if shards.is_sharded(tensor))]
