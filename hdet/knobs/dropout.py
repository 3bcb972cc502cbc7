"""Dropout rates as a knob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from .bound import Bound
from .cells import AttributeCell
from .param_groups import Bounds
from .scalar import scalar_knob

__all__ = ["Dropout"]


_PLACES: tuple[tuple[type[nn.Module], str], ...] = ((_DropoutNd, "p"), (nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout"))
"""Modules of torch that drop something out, and where they keep the rate."""


@dataclass(frozen=True)
class Dropout:
    """The dropout rates of a model, moved together by one knob named ``name``.

    ``modules`` None: of everything of torch's that has one above 0 (nn.Dropout in all dimensions, alpha dropout, nn.MultiheadAttention,
    recurrent modules); else of the modules with these names, also others with a number ``p``. On a log scale rates are multiplied;
    ``scale="linear"`` adds unit * (rho - 1) and can reach 0. A functional dropout in a forward of your own is a `Scalar`.

    Training losses always vote for less: it needs a `ProbeController` with ``held_out=True``, and ``gradients="local"``.
    """

    model: nn.Module
    spread: float = 0.3
    modules: Sequence[str] | None = None
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = (0.0, 0.9)
    name: str = "dropout"

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for a module that does not exist or has no rate, or a model without dropout."""
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, got {type(self.model).__name__}")
        by_name = dict(self.model.named_modules())
        for name in self.modules or ():
            if name not in by_name or _cell(by_name[name]) is None:
                raise ValueError(f"modules names {name!r}, which is no module with a dropout rate of this {type(self.model).__name__}")
        chosen = by_name.values() if self.modules is None else [by_name[name] for name in self.modules]
        cells = [cell for cell in map(_cell, chosen) if cell is not None]
        if self.modules is None:
            cells = [cell for cell in cells if isinstance(cell.owner, _KINDS) and (cell.get() > 0 or self.scale == "linear")]
        if not cells:
            raise ValueError(f"{type(self.model).__name__} has no dropout above 0: set one, name other modules, or use scale='linear'")
        return [scalar_knob(self.name, self.spread, cells, self.scale, self.unit, self.bounds, valid_on_train_loss=False)]


_KINDS = tuple(kind for kind, _ in _PLACES)


def _cell(module: nn.Module) -> AttributeCell | None:
    attribute = next((attribute for kind, attribute in _PLACES if isinstance(module, kind)), "p")
    return AttributeCell(module, attribute) if isinstance(getattr(module, attribute, None), (int, float)) else None
