"""Any scalar as a knob: a getter, a setter, a scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from ..core.spread import check_spread
from .bound import Bound
from .cells import CallCell, Cell
from .param_groups import Bounds, scale_of

__all__ = ["ModuleValue", "Scalar", "scalar_knob"]


@dataclass(frozen=True)
class Scalar:
    """Any scalar of the training step that leaves the architecture unchanged. It acts inside ``with ensemble.explore():``.

    Args:
        name: in records and states; unique in an Ensemble.
        get, set: read and write it, as a float. ``set`` is called for new values only; ``get`` a few times a step, so it should not wait
            for a device. Neither: the knob keeps the value itself, beginning with ``value``, and the loop reads ``ensemble.value(name)``.
        spread: alpha in [0, 1).
        scale: "log" (value * rho, for values above 0) or "linear" (value + unit * (rho - 1); a correction c adds unit * ln c).
        unit: of the linear scale, in the value's own unit: what a factor of e amounts to. Needed there.
        bounds: (low, high), hard for the base value and for every replica's.
        valid_on_train_loss: may training losses judge it? False, the safe answer, asks for a `ProbeController` with ``held_out=True``: training losses
            always vote for less of a regulariser, of augmentation, or of a task's weight.
        affects_eval_loss: the loss depends on it at given weights also in eval mode (a temperature), so a probe scores each replica at its own value.
        on_gradients: it acts on the gradients between backward and step (clipping), not in the forward pass.

    With ``gradients="shared"`` a scalar that has neither ``affects_eval_loss`` nor ``on_gradients`` is refused: all replicas step with the same gradient,
    whatever their own forward passes were.

    >>> model.temperature = 1.0
    >>> knob = hdet.Scalar("temperature", lambda: model.temperature, lambda x: setattr(model, "temperature", x), bounds=(0.1, 10.0), valid_on_train_loss=True, affects_eval_loss=True)
    """

    name: str
    get: Callable[[], float] | None = None
    set: Callable[[float], object] | None = None
    spread: float = 0.3
    scale: str = "log"
    unit: float | None = None
    bounds: Bounds = None
    valid_on_train_loss: bool = False
    affects_eval_loss: bool = False
    on_gradients: bool = False
    value: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a text that is not empty, got {self.name!r}")
        check_spread(self.spread)
        if self.scale not in ("log", "linear"):
            raise ValueError(f"scale of {self.name!r} must be 'log' or 'linear', got {self.scale!r}")
        if (self.unit is None) == (self.scale == "linear"):
            raise ValueError(
                f"unit of {self.name!r} is {self.unit!r} with scale={self.scale!r}: the linear scale needs one (what a factor of e amounts "
                "to, in the value's own unit), the log scale has none"
            )
        scale_of(self.bounds, self.scale, self.unit or 1.0)
        held = self.get is None and self.set is None and self.value is not None
        if not held and not (callable(self.get) and callable(self.set) and self.value is None):
            raise ValueError(f"{self.name!r} needs get and set, or neither of them and a value that the knob keeps itself")

    def bind(self, optimizer: Optimizer) -> list[Bound]:
        """Raises ValueError for a value outside of the bounds, or one that is not above 0 on a log scale."""
        cell = _Held(float(self.value)) if self.value is not None else CallCell(self.get, self.set)  # type: ignore[arg-type]
        return [
            scalar_knob(
                self.name, self.spread, [cell], self.scale, self.unit, self.bounds,
                valid_on_train_loss=self.valid_on_train_loss, affects_eval_loss=self.affects_eval_loss, on_gradients=self.on_gradients,
            )
        ]  # fmt: skip


ModuleValue = Scalar
"""The same by another name, under which a scalar of a module is looked for: ``ModuleValue(name, get, set, spread)``."""


def scalar_knob(
    name: str,
    spread: float,
    cells: Sequence[Cell],
    scale: str = "log",
    unit: float | None = None,
    bounds: Bounds = None,
    *,
    valid_on_train_loss: bool,
    affects_eval_loss: bool = False,
    on_gradients: bool = False,
) -> Bound:
    """A knob that acts inside ``explore()``. Raises ValueError for values that are not finite, that no factor moves, or outside of the bounds."""
    for value in (float(cell.get()) for cell in cells):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}: begin with a finite number")
    still = [float(cell.get()) for cell in cells if not float(cell.get()) > 0]
    if scale == "log" and still:
        raise ValueError(f"{name} is {still[0]:g}, and scale='log' multiplies: begin above 0, or use scale='linear' with a unit")
    return Bound(
        name, spread, cells, scale_of(bounds, scale, unit or 1.0),
        acts="forward", valid_on_train_loss=valid_on_train_loss, affects_eval_loss=affects_eval_loss, on_gradients=on_gradients, moments_diverge=on_gradients,
    )  # fmt: skip


class _Held:
    """A value that nobody else keeps."""

    def __init__(self, value: float) -> None:
        self.held = value

    @property
    def place(self) -> tuple[str, int]:
        return "value", id(self)

    def get(self) -> float:
        return self.held

    def set(self, value: float) -> None:
        self.held = value
