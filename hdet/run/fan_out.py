"""The multiplier exists inside optimizer.step() and nowhere else (Eq. 2)."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..core.validate import warn
from ..knobs import BoundKnob
from ..optim.snapshot import attach_hook, without_hooks
from ..tensors.dtensor import gradient_norm
from .setup import Setup

__all__ = ["FanOut"]

IDLE_CALLS = 20
"""of `Ensemble.step` without an optimizer step, and as many as with one: the loop makes too many"""


class FanOut:
    """Wraps ``optimizer.step`` of one instance.

    Hooks would not do: torch skips post-hooks when a step raises, and the multiplied value would
    stay behind. An optimizer with a ``multipliers`` list, [replica][group] (hdet's fused ones),
    takes those of rates through it, for all sets of parameters that it steps. Knobs of the forward
    pass are moved by `exploring` only.

    Checkpoint libraries make an optimizer's state by a step at rates that they have set to 0. That
    is no step of the run: it is passed through, and not counted.

    Args:
        run: whose knobs are moved. With local gradients replicas may skip a step each by itself,
            and count it nevertheless.
    """

    def __init__(self, run: Setup) -> None:
        optimizer = run.optimizer  # not all of ``run``, whose search holds `aside` in turn
        self.optimizer, self.schedule, self.knobs = optimizer, run.schedule, run.schedule.knobs
        self.multipliers: list[list[float]] = [[1.0] * len(self.knobs)]  # [replica][knob]
        self.explored: int | None = None
        """Number of the local replica whose values are in use outside of a step."""
        self.stepped = False
        """Has a step been done since `take_stepped`? Several calls of that count it once."""
        self.moved = True
        """Has one been done since the last average? Unknown at the beginning."""
        self.gradient_norm: torch.Tensor | None = None
        """Of this rank's gradients in the first step of their kind: 0-d float64. None before it."""
        self.is_fused = isinstance(getattr(optimizer, "multipliers", None), list)
        self._on_cycle_start: Callable[[], object] = _do_nothing
        self._skippable, self._needs_dense = run.is_local, run.replicas.count > 1
        self._first = run.replicas.local[0]  # by which a fused optimizer draws random numbers
        self._steps = self._idle_calls = 0  # done, and calls of `take_stepped` without one
        self._is_told = False  # that there are such calls
        self._is_first_step = True  # of a cycle, or after an average
        self._passes = False  # is the optimizer's step its own: within one, or `aside`?
        self._moves = False  # does any knob have another value in a step?
        self._wait_for_state: Callable[[], object] = _do_nothing  # ends the waiting
        self._rates = [knob for knob in self.knobs if knob.key == "lr"]
        self._are_rates_bounded = self.is_fused and any(k.scale.bounded for k in self._rates)
        in_step = [knob for knob in self.knobs if knob.meaning.acts == "step"]
        self._in_step = [knob for knob in in_step if not (self.is_fused and knob.key == "lr")]

    def attach(self, on_cycle_start: Callable[[], object]) -> None:
        """Let the optimizer's step be `step`. ``on_cycle_start`` is called before the first one
        after an average."""
        self._on_cycle_start = on_cycle_start
        optimizer: Any = self.optimizer
        if self.is_fused:
            optimizer.first_replica = self._first
        inner = optimizer.step

        @functools.wraps(inner)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Whoever has looked this up may still call it when another Ensemble has followed.
            driver: FanOut | None = optimizer._hdet_fan_out and optimizer._hdet_fan_out()
            return inner(*args, **kwargs) if driver is None else driver.step(inner, *args, **kwargs)

        # A bound method, because torch's schedulers take step.__func__ when they wrap it in turn.
        self._wrapper = optimizer.step = types.MethodType(step, optimizer)
        optimizer.add_param_group = _refuse_group
        # Nobody but the Ensemble holds this object, so that dropping it is enough.
        optimizer._hdet_fan_out = driver = weakref.ref(self)
        check = functools.partial(_check_not_bypassed, driver)
        self._stop_checks = attach_hook(optimizer.register_step_post_hook, check)

    # -- a step ------------------------------------------------------------------------------------

    def step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``inner``, which is the optimizer's step, at this replica's values."""
        if self._passes:
            return inner(*args, **kwargs)
        self._passes = True
        try:
            rate = self.optimizer.param_groups[0].get("lr", 1.0)
            if (not isinstance(rate, float) or rate == 0.0) and self._is_of_a_library():
                return inner(*args, **kwargs)
            self.schedule.check_unwritten()
            if self._is_first_step:
                self._begin(is_ready=not (args or kwargs))
            self.moved = True
            if self._moves:
                result = self._at_multipliers(inner, *args, **kwargs)
            else:
                result = inner(*args, **kwargs)
            if self.gradient_norm is None:  # a closure has made the gradients
                self.gradient_norm = self._norm()
            self.stepped = True
            return result
        finally:
            self._passes = False

    def _is_of_a_library(self) -> bool:
        """Are all rates 0, and is that nobody's schedule? A rate on a CUDA device is not read."""
        for group in self.optimizer.param_groups:
            rate = group.get("lr", 1.0)
            if rate.is_cuda or rate.any() if isinstance(rate, torch.Tensor) else rate != 0:
                return False
        written = (knob.find_foreign_write() is not None for knob in self._rates)
        return not self._rates or any(written)

    def _begin(self, is_ready: bool) -> None:
        """Before the first step of a cycle. ``is_ready``: are there gradients already?"""
        self._wait_for_state()
        if self._needs_dense:  # in each step it would cost too much
            _check_dense_gradients(self.optimizer)
        if self.gradient_norm is None and is_ready:
            self.gradient_norm = self._norm()
        self._on_cycle_start()
        self._is_first_step = False

    def _at_multipliers(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._are_rates_bounded:  # the schedule has moved, and what bounds leave of multipliers
            self._hand_on_multipliers()
        with ExitStack() as stack:
            for knob in self._in_step:
                stack.enter_context(knob.fanned_out(knob.multiplier))
            return inner(*args, **kwargs)

    def take_stepped(self) -> bool:
        """Is there a step to count since the last call?"""
        stepped, self.stepped = self.stepped, False
        self._steps += stepped
        self._idle_calls += not stepped
        if not stepped and not self._is_told:
            self._warn_of_idle_calls()
        if not stepped and self._skippable:
            if self._is_first_step:
                self._begin(is_ready=False)
            self.moved = True  # others may have done the step
        return stepped or self._skippable

    def _warn_of_idle_calls(self) -> None:
        if not self._steps:
            # torch would warn of its schedulers, which the loop does not step.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            what = "ensemble.step() was called, but no optimizer.step() before it:"
            but = "the schedule moves, and nothing is counted"
        elif self._idle_calls < max(IDLE_CALLS, self._steps):
            return
        elif not isinstance(self.schedule.scheduler, LRScheduler):
            return  # no schedule, or OneCycleAutoLR, which may be stepped as torch's
        else:
            what = f"ensemble.step() was called {self._steps + self._idle_calls} times,"
            but = f"but there were {self._steps} steps of the optimizer: the schedule runs ahead"
        self._is_told = True
        warn(
            f"{what} {but}. Call it once after each step() of the optimizer that the Ensemble was "
            "given. (A GradScaler may skip the first steps: then all is well.)"
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the optimizer's step is its own: at the values in its groups, not counted, and
        hooks of a step (an average of weights) do not see it."""
        before, self._passes = self._passes, True
        try:
            with without_hooks(self.optimizer):
                yield
        finally:
            self._passes = before

    def _norm(self) -> torch.Tensor:
        return gradient_norm(p for group in self.optimizer.param_groups for p in group["params"])

    # -- a cycle -----------------------------------------------------------------------------------

    def assign(self, *replicas: Sequence[float]) -> None:
        """rho for the cycle that begins, one per knob, of each set of parameters that this
        optimizer steps (a stock one has one)."""
        self.multipliers = [list(multipliers) for multipliers in replicas]
        self._is_first_step = True
        for knob, multiplier in zip(self.knobs, self.multipliers[0], strict=True):
            knob.multiplier = multiplier
        self._moves = self._are_rates_bounded or any(rho != 1.0 for rho in self.multipliers[0])
        if self.is_fused:
            self._hand_on_multipliers()

    def _hand_on_multipliers(self) -> None:
        """Those of rates, to a fused optimizer."""
        table = [[1.0] * len(self.optimizer.param_groups) for _ in self.multipliers]
        for row, multipliers in zip(table, self.multipliers, strict=True):
            for knob, multiplier in zip(self.knobs, multipliers, strict=True):
                for i, index in enumerate(knob.indices if knob.key == "lr" else ()):
                    row[index] = knob.acting(multiplier, i)
        self.optimizer.multipliers[:] = table  # type: ignore[attr-defined]

    def note_average(self, has_written: bool) -> None:
        """Replicas are equal until the next step, because they have been averaged, or were."""
        self.moved, self._is_first_step = False, self._is_first_step or has_written

    def note_load(self) -> None:
        """Parameters may have been loaded: nothing is known of them, and earlier steps do not
        count.
        If the optimizer's state is loaded later, this run's values are put back."""
        self.moved, self._is_first_step, self.stepped = True, True, False
        self._wait_for_state()
        register = self.optimizer.register_load_state_dict_post_hook
        self._wait_for_state = attach_hook(register, self._write)

    def _write(self, *_: Any) -> None:
        self.schedule.write()

    @contextmanager
    def exploring(self, slot: int, which: Callable[[BoundKnob], bool]) -> Iterator[None]:
        """Inside, those of the knobs of the forward pass have the values of this process's replica
        number ``slot``."""
        if self.explored is not None:
            if self.explored != slot:
                other = self._first + self.explored
                raise ValueError(
                    f"explore() was called inside that of replica {other}: leave it before the "
                    "next `use`"
                )
            yield
            return
        self.explored = slot
        try:
            with ExitStack() as stack:
                for knob, multiplier in zip(self.knobs, self.multipliers[slot], strict=True):
                    if knob.meaning.acts == "forward" and which(knob):
                        stack.enter_context(knob.fanned_out(multiplier))
                yield
        finally:
            self.explored = None

    def close(self) -> None:
        """Multipliers are 1 from now on, and the wrapper is gone; if somebody has wrapped it in
        turn it stays without effect."""
        self.assign(*[[1.0] * len(self.knobs)] * len(self.multipliers))
        self._on_cycle_start = _do_nothing  # the parts of the run hold this object in turn
        self._stop_checks()
        self._wait_for_state()
        optimizer: Any = self.optimizer
        del optimizer.add_param_group
        optimizer._hdet_fan_out = None
        if optimizer.step is self._wrapper:
            inner = self._wrapper.__func__.__wrapped__
            del optimizer.step
            if inner != optimizer.step:  # it was the instance's own
                optimizer.step = inner


def _do_nothing() -> None:
    pass


def _check_not_bypassed(driver: Callable[[], FanOut | None], optimizer: Optimizer, *_: Any) -> None:
    """A step has ended, of an optimizer or of what wraps it.

    Raises RuntimeError for one that came by another way than the wrapper.
    """
    found = driver()
    if found is not None and not found._passes and not found._is_of_a_library():
        raise RuntimeError(
            f"this step went past the Ensemble that drives this {type(optimizer).__name__}: it was "
            "done at base values, and no cycle would ever count it. Its `step` was looked up "
            "(captured, compiled, or wrapped by a profiler or another library) before the Ensemble "
            "was made: make the Ensemble first, or look optimizer.step up again after it"
        )


def _refuse_group(param_group: dict[str, Any]) -> None:
    """A group that is added later would not be averaged."""
    raise ValueError(
        "add_param_group: this optimizer is driven by an Ensemble, which would not average the "
        "new group: add all groups before, or converge(), close() the Ensemble and make a new one"
    )


def _check_dense_gradients(optimizer: Optimizer) -> None:
    """Raises ValueError for a sparse gradient: replicas' steps along it would differ in which rows
    they touch."""
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {i} in group {g} is {p.grad.layout}, whose steps "
                    "have no average: use dense gradients (Embedding(sparse=False)) and an "
                    "optimizer that takes them"
                )
