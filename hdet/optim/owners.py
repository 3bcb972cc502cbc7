"""Matrices that are cut over a mesh: each is put together on one rank, its owner, and its direction is cut again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hdet.tensors import dtensor as shards

if TYPE_CHECKING:
    from .matrices import Matrix, MatrixStep


def is_cut(param: Tensor) -> bool:
    """Does a rank hold less than whole matrices? A stack that is cut between its matrices (Shard(0) of three dimensions) is not."""
    given = param
    return any(given.placements[dim].dim % param.ndim >= param.ndim - 2 for dim in shards.sharding_dims(param, "a matrix"))  # type: ignore[attr-defined]


class Exchanges:
    def run(self, step: MatrixStep, matrices: Sequence[Matrix]) -> None:
        if matrices:
            raise NotImplementedError
