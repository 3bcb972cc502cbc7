"""Fan-out on a real optimizer: the multiplier exists inside optimizer.step() and nowhere else (Eq. 2)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..knobs import Bound, GroupKnob
from ..tensors.dtensor import gradient_norm

__all__ = ["FanOut", "without_hooks"]


class FanOut:
    """Wraps ``optimizer.step`` of one instance. The wrapper asks whichever FanOut the optimizer has, so it is put on once.

    Hooks would not do: torch skips post-hooks when a step raises, and the multiplied value would stay behind. An optimizer with a
    ``multipliers`` list, [replica][group] (hdet's fused ones), takes those of rates through it, for all sets of parameters that it steps.
    Knobs of the forward pass are moved by `exploring` only.

    A step in which every group's rate is 0 moves nothing and is passed through: checkpoint libraries make an optimizer's state so. It counts where
    the run's own schedule begins at 0, as a warm-up may.

    Args:
        first_replica: number of the (first) replica that the optimizer steps, by which a fused one draws random numbers.
        on_cycle_start: called before the first step after an average.
        skippable: replicas may skip a step each by itself, and count it nevertheless.
        check_unwritten: called before each step that is fanned out: raises ValueError where somebody else has written a value.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        knobs: Sequence[Bound],
        first_replica: int = 0,
        on_cycle_start: Callable[[], object] = lambda: None,
        skippable: bool = False,
        check_unwritten: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer, self.knobs = optimizer, knobs
        self.multipliers: list[list[float]] = [[1.0] * len(knobs)]  # [replica][knob]
        self._unchecked = True
        self._on_cycle_start, self._cycle_started, self._skippable, self._check_unwritten = (
            on_cycle_start,
            False,
            skippable,
            check_unwritten,
        )
        self._stepping = False
        self._still = True
        """Did all rates stand at 0 in the last call of `take_stepped`?"""
        self._stood = self._scheduled = False
        self._norm_there: torch.Tensor | None = None
        """Has a step been passed through since then, before any other? Were its rates of 0 nobody's but the schedule's?"""
        self.begun = False
        """Has there been a step at another rate than 0? Later ones at 0 count nothing."""
        self._awaits_state: Callable[[], None] = lambda: None  # ends the waiting
        self._first = first_replica
        self.explored: int | None = None
        """Number of the local replica whose values are in force outside of a step."""
        self.stepped = False
        """Has a step been done since `take_stepped`? The scheduler counts, so that several calls for one step count once."""
        self.moved = True
        """Has one been done since the last average? Unknown at the beginning."""
        self.gradient_norm: torch.Tensor | None = None
        """Of this rank's gradients in the first step: 0-d float64. None before it."""
        self.fused = isinstance(getattr(optimizer, "multipliers", None), list)
        self._held_back = self.fused and any(knob.key == "lr" and knob.scale.bounded for knob in knobs)
        if self.fused:
            optimizer.first_replica = first_replica  # type: ignore[attr-defined]
        _wrap(optimizer)
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign]
        optimizer._hdet_fan_out = self  # type: ignore[attr-defined]
        self._passed = optimizer.register_step_post_hook(self._check_passed)

    def step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``inner``, which is the optimizer's step, at this replica's values."""
        if self._stepping:  # called by a second wrapper
            return inner(*args, **kwargs)
        self._stepping = True
        try:
            if not self._stands_still():
                return self._fanned_out(inner, *args, **kwargs)
            rates = [knob for knob in self.knobs if knob.key == "lr"]
            self._stood, self._scheduled = not self.begun, bool(rates) and all(knob.find_foreign_write() is None for knob in rates)
            result = inner(*args, **kwargs)
            self._norm_there = self._norm() if self._stood else None
            return result
        finally:
            self._stepping = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the optimizer's step is its own: at the values in its groups, and not counted. Hooks of a step (an average of weights)
        are not told of it."""
        before, self._stepping = self._stepping, True
        try:
            with without_hooks(self.optimizer):
                yield
        finally:
            self._stepping = before

    def _fanned_out(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_unwritten()
        self._awaits_state()
        if self._unchecked:
            _check_dense_gradients(self.optimizer)
            self._unchecked = False
        if not (args or kwargs):
            self._note_gradient()
        self._leave()
        with ExitStack() as stack:
            self.moved = True
            if self._held_back:  # the schedule has moved, and with it what the bounds leave of multipliers
                self._pass_on()
            for knob, multiplier in zip(self.knobs, self.multipliers[0], strict=True):
                if knob.acts == "step" and not (self.fused and knob.key == "lr"):
                    stack.enter_context(knob.fanned_out(multiplier))
            result = inner(*args, **kwargs)
        self._note_gradient()  # where a closure has made them
        self.stepped = self.begun = True
        return result

    def _check_passed(self, *_: Any) -> None:
        """A step has ended. Raises RuntimeError for one that came by another way than the wrapper."""
        if not self._stepping and not self._stands_still():
            raise RuntimeError(
                f"this step went past the Ensemble that drives this {type(self.optimizer).__name__}: it was done at base values, and no cycle would "
                "ever count it. Its `step` was looked up (captured, compiled, or wrapped by a profiler or another library) before the Ensemble "
                "was made: make the Ensemble first, or look optimizer.step up again after it"
            )

    def _stands_still(self) -> bool:
        """Is every group's rate 0? A rate on a CUDA device is not looked at: it would wait for the device."""
        for group in self.optimizer.param_groups:
            rate = group.get("lr", 1.0)
            if rate != 0 if not isinstance(rate, torch.Tensor) else rate.is_cuda or rate.any():
                return False
        return True

    def _leave(self) -> None:
        if not self._cycle_started:
            self._on_cycle_start()
            self._cycle_started = True

    def _note_gradient(self) -> None:
        if self.gradient_norm is None:
            self.gradient_norm = self._norm()

    def _norm(self) -> torch.Tensor:
        return gradient_norm(p for group in self.optimizer.param_groups for p in group["params"])

    def averaged(self) -> None:
        """Replicas have been averaged: they are equal until the next step."""
        self.moved = self._cycle_started = False

    def unknown(self, rewrite: Callable[[], None]) -> None:
        """Parameters may have been loaded: nothing is known of them, and earlier steps do not count. If the optimizer's state is loaded later,
        ``rewrite`` replaces its values by those of this run."""
        self.moved, self._cycle_started, self.stepped, self._stood = True, False, False, False
        self._awaits_state()
        self._awaits_state = self.optimizer.register_load_state_dict_post_hook(lambda _: rewrite()).remove

    def assign(self, *replicas: Sequence[float]) -> None:
        """rho for the cycle that begins, one per knob, of each set that this optimizer steps (a stock one has one)."""
        self.multipliers = [list(multipliers) for multipliers in replicas]
        self._cycle_started = False  # also after a cycle at whose end nothing was averaged
        self._unchecked = True  # gradients are looked at once a cycle: each step would cost too much
        for knob, multiplier in zip(self.knobs, self.multipliers[0], strict=True):
            knob.rho = multiplier
        if self.fused:
            self._pass_on()

    def _pass_on(self) -> None:
        """The rates' multipliers to a fused optimizer."""
        table = [[1.0] * len(self.optimizer.param_groups) for _ in self.multipliers]
        for k, knob in enumerate(self.knobs):
            if isinstance(knob, GroupKnob) and knob.key == "lr":
                for row, multipliers in zip(table, self.multipliers, strict=True):
                    for i, index in enumerate(knob.indices):
                        row[index] = knob.effective(i, float(multipliers[k]))
        self.optimizer.multipliers[:] = table  # type: ignore[attr-defined]

    @contextmanager
    def exploring(self, place: int, which: Callable[[Bound], bool]) -> Iterator[None]:
        """Inside, those of the knobs of the forward pass have the values of this process's replica number ``place``."""
        if self.explored is not None:
            if self.explored != place:
                other = self._first + self.explored
                raise ValueError(f"explore() was called inside that of replica {other}: leave it before the next `use`")
            yield
            return
        self.explored = place
        try:
            with ExitStack() as stack:
                for knob, multiplier in zip(self.knobs, self.multipliers[place], strict=True):
                    if knob.acts == "forward" and which(knob):
                        stack.enter_context(knob.fanned_out(multiplier))
                yield
        finally:
            self.explored = None

    def take_stepped(self) -> bool:
        """Is there a step to count since the last call?"""
        stepped, self.stepped = self.stepped, False
        stood, self._stood = self._stood, False
        if stepped or not (stood or self._skippable):
            self._still = self._skippable and self._stands_still()
            return stepped
        # Of a step that was skipped nobody knows at which rate it would have been: the one that the last call has left, or today's.
        before, self._still = self._still, self._stands_still()
        if self._skippable:
            counts = not (before and self._still and self.begun)
        else:  # a checkpoint library has put its rates of 0 there, and the schedule's back
            counts = self._scheduled or self._still
        if counts:
            self._leave()
            self.moved = True  # others may have done the step
            self.begun = self.begun or not (stood or self._still)
            if self.gradient_norm is None:
                self.gradient_norm = self._norm_there
        return counts

    def close(self) -> None:
        """Multipliers are 1 from now on, and the wrapper is gone; if somebody has wrapped it in turn it stays without effect."""
        self.assign(*[[1.0] * len(self.knobs)] * len(self.multipliers))
        self._passed.remove()
        self._awaits_state()
        self.optimizer.__dict__.pop("add_param_group", None)
        self.optimizer._hdet_fan_out = None  # type: ignore[attr-defined]
        _unwrap(self.optimizer)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Inside, no hook is called before or after a step."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = type(before)(), type(after)()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after


def _wrap(optimizer: Optimizer) -> None:
    """Let ``optimizer.step`` ask the FanOut there is; once, however many come one after the other."""
    inner: Callable[..., Any] = optimizer.step
    if hasattr(inner, "_hdet_wrapper"):  # functools.wraps hands it on to whoever wraps ours in turn
        return

    @functools.wraps(inner)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        fan_out: FanOut | None = optimizer._hdet_fan_out  # type: ignore[attr-defined]
        return inner(*args, **kwargs) if fan_out is None else fan_out.step(inner, *args, **kwargs)

    step._hdet_wrapper = step  # type: ignore[attr-defined]
    # A bound method, because torch's schedulers take step.__func__ when they wrap it in turn.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _unwrap(optimizer: Optimizer) -> None:
    """Take the wrapper off where it is on top."""
    top: Any = optimizer.step
    if not hasattr(top, "_hdet_wrapper") or getattr(top, "__func__", None) is not top._hdet_wrapper:
        return
    inner = top.__wrapped__
    del optimizer.step
    if inner != optimizer.step:  # it was the instance's own
        optimizer.step = inner  # type: ignore[method-assign]


def _refuse_group(param_group: dict[str, Any]) -> None:
    """A group that is added later would not be averaged."""
    raise ValueError(
        "add_param_group: this optimizer is driven by an Ensemble, which would not average the new group: add all groups before, "
        "or converge(), close() the Ensemble and make a new one"
    )


def _check_dense_gradients(optimizer: Optimizer) -> None:
    """Raises ValueError for a sparse gradient: replicas' steps along it would differ in which rows they touch."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {i} in group {g} is {p.grad.layout}: use dense gradients (Embedding(sparse=False))"
                )
