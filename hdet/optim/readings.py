"""As which matrices FusedMuon reads a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hdet.tensors import dtensor as shards
from hdet.tensors.strides import Order

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
        is_cut = shards.is_sharded(param)
        if order is None or (self.flat and order[0] == 0 and not is_cut):
            return self
        if self.flat or is_cut or order[:-2] != tuple(range(len(order) - 2)):
            raise ValueError(
                f"parameter {place} of shape {tuple(param.shape)} is not contiguous (strides "
                f"{param.stride()}): use .contiguous()"
            )
        return self._replace(dim=-3 - self.dim, transposed=True)


def adjustment(adjust: str | None, rows: int, columns: int) -> float:
    """What the rate of an (m, n) matrix is multiplied by. torch.optim.Muon's `adjust_lr_fn`."""
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
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    said = group.get("param_names", [e[0] if isinstance(e, tuple) else None for e in entries])
    if isinstance(splits, Mapping) and None in said:
        raise ValueError(
            f"splits of {what} names parameters, and these have no names: give (name, parameter) "
            "pairs, or the sizes alone, which are those of all of its matrices"
        )
    sizes_of = [_sizes_of(name, splits) for name in said]
    places = [f"{name or f'parameter {i}'} of {what}" for i, name in enumerate(said)]
    return [
        _read(param.shape, higher, sizes, place)
        for param, sizes, place in zip(params, sizes_of, places, strict=True)
        if isinstance(param, Tensor)  # torch refuses others
    ]


def _sizes_of(name: str, splits: Any) -> Any:
    if not isinstance(splits, Mapping):
        return splits or ()
    return next((sizes for key, sizes in splits.items() if _names(key, name)), ())


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
                f"splits names {key!r}, which is no matrix of Muon's and no end of one's name; "
                f"these are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
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
    if not sizes:
        return Reading(flat, ())
    fits = isinstance(sizes, Sequence) and all(isinstance(x, int) and x > 0 for x in sizes)
    if not fits or sum(sizes) not in (rows, rows if flat else columns):
        raise ValueError(
            f"splits={sizes} of {what}, of shape {tuple(shape)}, must be whole numbers that add up "
            f"to its {rows} rows{'' if flat else f' or {columns} columns'}"
        )
    return Reading(flat, tuple(sizes), -2 if sum(sizes) == rows else -1)
