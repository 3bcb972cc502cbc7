"""As which matrices FusedMuon reads a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet.tensors import dtensor as shards
from hdet.tensors import strides
from hdet.tensors.strides import Order

from .split_params import name_and_param

HIGHER_DIMS = (None, "stack", "flatten")


class Reading(NamedTuple):
    """Of a tensor whose dimensions are in the order of its memory."""

    flat: bool
    """(out, ...) is one matrix, (out, all else); or else the last two dimensions are a matrix's"""
    sizes: tuple[int, ...]
    """A matrix is cut into blocks of so many rows or columns; () leaves it whole."""
    dim: int = -2
    """that is cut"""
    transposed: bool = False
    """Are rows columns in memory?"""
    shapes: tuple[torch.Size, ...] = ()
    """of all its `matrices`, where it is cut over a mesh as well"""

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Views (..., m, n) of all of it. Blocks of equally many rows are one view."""
        if self.flat:
            tensor = tensor.flatten(1)
        if not self.sizes:
            return [tensor]
        if self.dim == -2 and len(set(self.sizes)) == 1:
            return [tensor.unflatten(-2, (len(self.sizes), self.sizes[0]))]
        return list(tensor.split(self.sizes, self.dim))

    def laid(self, param: Tensor, order: Order | None, place: int) -> Reading:
        """The same in memory's order. Raises ValueError where no view is a matrix, or a transposed
        one is cut over a mesh."""
        is_cut, made = shards.is_sharded(param), self
        if order is not None and (is_cut or not self.flat or order[0] != 0):
            if is_cut or self.flat or order[:-2] != tuple(range(len(order) - 2)):
                raise ValueError(
                    f"parameter {place} of shape {tuple(param.shape)} is not contiguous (strides "
                    f"{param.stride()}): use .contiguous()"
                )
            made = self._replace(dim=-3 - self.dim, transposed=True)
        whole = strides.laid(torch.empty(param.shape, device="meta"), order)
        return made._replace(shapes=tuple(view.shape for view in made.matrices(whole)))

    def adjustment(self, adjust: str | None, shape: Sequence[int]) -> float:
        """What the rate of a matrix (..., m, n) in memory is multiplied by. torch.optim.Muon's
        `adjust_lr_fn`."""
        rows, columns = shape[-2:][::-1] if self.transposed else shape[-2:]
        # Liu et al. 2025, Eq. 4: an orthogonal matrix has the root mean square 1 / sqrt(max(m, n))
        if adjust == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns, 1))
        return math.sqrt(max(1.0, rows / max(1, columns)))


def readings_of(group: Mapping[str, Any], what: str) -> list[Reading]:
    """Of each parameter of a group. Raises ValueError where it does not say what to read."""
    higher, splits, given = (group.get(key) for key in ("higher_dims", "splits", "params"))
    if higher not in HIGHER_DIMS:
        raise ValueError(
            f'higher_dims={higher!r} of {what} is unknown; choose "stack", "flatten" or None'
        )
    entries: Sequence[Any] = [given] if isinstance(given, Tensor) else list(given or ())
    said = group.get("param_names", [""] * len(entries))
    made = []
    for i, (entry, name) in enumerate(zip(entries, said, strict=True)):
        given_name, param = name_and_param(entry, f"parameter {i} of {what}")
        name = name or given_name
        sizes = splits
        if isinstance(splits, Mapping):  # of several ends the longest
            sizes = splits.get(max((k for k in splits if _names(k, name)), key=len, default=""))
        made.append(_read(param.shape, higher, sizes, f"{name or f'parameter {i}'} of {what}"))
    return made


def _names(key: str, name: str) -> bool:
    """Is the key a name, or its last parts?"""
    return f".{name}".endswith(f".{key}")


def check_names(groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuses names in `splits` that no matrix of any group has."""
    groups = list(groups)
    names = [name for group in groups for name in group.get("param_names", ())]
    splits = [group["splits"] for group in groups if isinstance(group.get("splits"), Mapping)]
    for key in dict.fromkeys(key for said in splits for key in said):
        if not any(_names(key, name) for name in names):
            raise ValueError(
                f"splits names {key!r}, which is no matrix of Muon's and no end of one's name: it "
                f"has {', '.join(names[:8]) or 'none with a name'}{', ...' if names[8:] else ''}"
            )


def _read(shape: Sequence[int], higher: str | None, sizes: Any, what: str) -> Reading:
    if len(shape) < 2 or (len(shape) > 2 and higher is None):
        ways = (
            'say higher_dims="stack" of a stack of matrices, "flatten" of a convolution\'s weight, '
            "or "
        )
        raise ValueError(
            f"{what} has the shape {tuple(shape)}, and use_muon=True is for matrices: "
            f"{ways if len(shape) > 2 else ''}put it into a group with use_muon=False"
        )
    flat = higher == "flatten" and len(shape) > 2
    rows, columns = (shape[0], math.prod(shape[1:])) if flat else shape[-2:]
    if sizes is None:
        return Reading(flat, ())
    fits = isinstance(sizes, Sequence) and all(isinstance(x, int) and x > 0 for x in sizes)
    if not fits or sum(sizes) not in (rows, rows if flat else columns):
        raise ValueError(
            f"splits={sizes} of {what}, of shape {tuple(shape)}, must be a list of whole numbers "
            f"that add up to its {rows} rows{'' if flat else f' or {columns} columns'}"
        )
    return Reading(flat, tuple(sizes), -2 if sum(sizes) == rows else -1)
