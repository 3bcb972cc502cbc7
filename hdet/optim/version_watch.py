"""Noticing what others write to tensors that a plan relies on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import lists


class VersionWatch:
    """Notices in-place changes by others to some tensors.

    Every write under autograd's eyes counts up the version of its tensor, also load_state_dict of a model. Versions only grow, so
    their sum tells. A write through `.data` or by a foreign kernel is not seen.
    """

    def __init__(self, params: Sequence[Tensor], per_step: int) -> None:
        """`per_step`: by how much a step of our own counts their versions up."""
        self.params, self.per_step = params, per_step
        self.sum = -1  # nothing is known yet

    def refresh(self) -> None:
        """What has been written up to now is known."""
        self.sum = sum(map(lists.version, self.params))

    def written(self) -> bool:
        """Has anything been written that is not known?"""
        return sum(map(lists.version, self.params)) != self.sum

    def wrote(self) -> None:
        """Our own step has counted up the versions of what it writes to by one."""
        self.sum += self.per_step

    def check(self) -> None:
        """Takes over what others have written, or refuses it. Before each step."""
        raise NotImplementedError
