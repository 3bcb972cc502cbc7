"""Measurements in the first steps of a training loop, on the batches of the loop."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from ..tensors.profiling import ranged
from .arms import Arms, Beginning
from .budget import FORWARD
from .displacement import Ratios, medians
from .rule import FARTHEST, MULTIPLES, RATE_UNUSED, SCORES, STEPS, Arm, Trial, arm_factor
from .searched import Closure, Searched, mean_of

__all__ = ["OwnSteps", "TrialSteps"]

UNCERTAINTY = 2.0
"""A warm-up's small steps go further, in proportion to their rates, than a trial's. By this factor
a displacement may be overestimated (95 % of 699 runs: by 2.7 at most)."""
LOOK = STEPS // 4
"""After so many steps arms are looked at, which waits for the device."""
FAR_BEHIND = 0.5
"""An arm stops if its training loss is above the first one, and above the best arm's, by so much of
it."""
STRAYED = 4.0
"""Factor by which an arm's first step may be longer or shorter than the run's, at the same rate and
on the same batch. More says that the closure or before_step does not do what the loop does."""
COMMUNICATES = (
    "the trial was given up: what a step calls communicates in some steps only: pass "
    "spread_arms=False"
)
INFINITE = 1e30
"""In the place of a loss that is not finite, so that ranks can add up losses."""

OTHER_NUMBERS = 8.0
"""If the mean of what the closure returned differs from the loop's loss by this factor, it is no
table of losses."""

Loss = torch.Tensor | None
"""Of one batch. None: this rank saw none."""
LoopLoss = torch.Tensor | float | None
"""As a loop gives it."""


class OwnSteps:
    """Counts the first `STEPS` steps of a run: the free reading."""

    cost = seconds = num_bytes = 0

    def __init__(self, run: Searched, begun: Beginning) -> None:
        self._run, self._begun, self._position = run, begun, 0
        self._sum: Any = 0.0  # of rates, as parts of their peak; perhaps a tensor on the device

    def after_step(self, closure: Closure | None = None, loss: LoopLoss = None) -> Trial | None:
        """Returns what was measured after the last of them: a trial with one arm."""
        run, self._position = self._run, self._position + 1
        number, peak = max(run.peaks(), key=lambda pair: pair[1])
        if peak > 0:
            self._sum = self._sum + run.rate_in_force(number) / peak
        if self._position < STEPS:
            return None
        [distance] = medians(run.replicas, self._begun.displacement.ratios())
        done = float(self._sum)
        if distance is not None:
            whole = sum(arm_factor(position) for position in range(1, STEPS + 1))
            distance = min(distance * whole / done, FARTHEST) if done > 0 else None
        arm = Arm(run.rate, (), distance)
        return Trial(
            arm.rate, (arm,), pretrained=self._begun.displacement.is_pretrained(run.replicas),
            uncertainty=UNCERTAINTY, given_up=self._begun.why_given_up(),
        )  # fmt: skip


@dataclass(eq=False)
class _Copy:
    """An arm while it is measured."""

    multiple: float  # of the run's rate; 0: the first weights, which are scored beside arms
    owner: int = 0  # the replica that trains it, where arms are spread
    weights: Any = None  # a `Snapshot`; None: another replica trains it
    trained: list[Loss] = field(default_factory=list)  # by batch
    scored: list[Loss] = field(default_factory=list)
    ratios: Ratios = field(default_factory=dict)  # after the last step


class TrialSteps:
    """Arms train on the batches of the first `STEPS` steps, all on the same ones, and are scored
    on those of the next `SCORES`. Every rank decides on the same numbers.

    In the first step all replicas train every arm. From the second one on arms may be *spread*:
    each replica trains some of them on its own part of the batch, together with other replicas
    that have the same ones, and all are scored on whole batches. So five replicas train five arms
    in the time of one.

    Args:
        may_spread: are arms spread, unless `Communication` was seen in the first step?
    """

    def __init__(self, arms: Arms, may_spread: bool = False) -> None:
        self._arms, self._run, self._displacement = arms, arms.run, arms.begun.displacement
        self._rate, self._replicas = arms.run.rate, arms.run.replicas
        self._first = _Copy(0.0, weights=arms.begun.weights)
        self._may_spread, self._smaller_batch = may_spread, 1.0
        self._copies = [_Copy(multiple) for multiple in MULTIPLES]
        self._live = [*self._copies]  # those that train, or that are scored
        self._position = 0  # batches so far, on which arms were trained or scored
        self._given_up = self._error = ""
        self.cost = self.seconds = 0.0  # in steps of the run, which take as long
        self.num_bytes = 0  # the most that copies took

    def after_step(self, closure: Closure | None, loss: LoopLoss = None) -> Trial | None:
        """Makes one step of every arm, or one score. Returns the trial when it is over."""
        can_train = closure is not None and _takes_nothing(closure)
        self._replicas.meet("a step of the trial" if can_train else "a step without a closure")
        if closure is None or not can_train:
            raise TypeError(
                "AutoLR's trial needs the batch's losses again in each of its steps: call "
                "ensemble.step(loss, closure=lambda: losses_of(model, batch)), a function without "
                "arguments"
            )
        started = time.perf_counter()
        is_first = self._position == 0
        part = self._part_in_force() if is_first else 0.0
        own = self._displacement.ratios() if part else {}
        with self._arms.keep_run():
            if is_first and loss is not None:
                closure = _compare_losses(closure, loss)
            if self._position < STEPS:
                self._train(closure)
            else:
                self._score(closure)
            self._position += 1
            if self._position <= 2:  # optimizers have made their states, and no arm has stopped
                held = self._arms.num_bytes(copy.weights for copy in self._live)
                self.num_bytes = max(self.num_bytes, held)
            if is_first:
                self._compare_steps(own, part, is_loop=loss is not None)
                self._spread_arms()
            if self._position == STEPS:
                self._given_up = self._given_up or self._arms.begun.why_given_up()
                self._end_training()
        is_over = self._given_up or not self._live or self._position == STEPS + SCORES
        trial = self._trial() if is_over else None
        self.seconds += time.perf_counter() - started
        return trial

    # -- arms --------------------------------------------------------------------------------------

    def _spread_arms(self) -> None:
        """Each replica keeps its own, if they may be spread."""
        if self._may_spread and not self._communicates():
            count, own, arms = self._replicas.count, self._replicas.index, len(self._copies)
            self._arms.spread_over_replicas([*range(own % arms, count, arms)])
            self._smaller_batch = count / max(1, count // arms)
            for number, copy in enumerate(self._copies):
                copy.owner = number % count
            for copy in set(self._copies) - set(self._copies_of(own)):
                copy.weights = None

    def _communicates(self) -> bool:
        communication = self._arms.communication
        return communication is not None and communication.was_seen()

    def _copies_of(self, replica: int) -> list[_Copy]:
        """Those that it trains; of more replicas than arms, two train the same one."""
        owner = replica % len(self._copies) if self._arms.spread else 0
        return [copy for copy in self._live if copy.owner == owner]

    def _train(self, closure: Closure) -> None:
        mine, losses = self._copies_of(self._replicas.index), dict[_Copy, Loss]()
        most = max(len(self._copies_of(k)) for k in range(self._replicas.count))
        self.cost += most
        may_skip = self._position > 0 or self._replicas.world_group is not None
        for copy in mine:
            if self._position == 0:
                copy.weights = self._arms.begin()
            factor = copy.multiple * arm_factor(self._position + 1)
            try:
                losses[copy] = self._arms.train(copy.weights, closure, factor, may_skip)
            except Exception as error:  # a high rate may break in whatever way the model has
                if self._position == 0 or copy.multiple <= 1 or self._is_loops_own(error):
                    raise
                self._live.remove(copy)
                self._error = self._error or (
                    f"{copy.multiple:g} times the rate counts as broken: the closure raised "
                    f"{type(error).__name__}: {error}"
                )
        for _ in range(most - len(mine)):  # all replicas call the closure as often
            factor = arm_factor(self._position + 1)
            self._arms.train(self._first.weights, closure, factor, may_skip, is_kept=False)
        for copy in self._live:
            copy.trained.append(losses.get(copy))
        if (self._position + 1) % LOOK == 0:
            self._stop_arms(is_last=self._position + 1 == STEPS)

    def _stop_arms(self, is_last: bool) -> None:
        """Those that have broken or are far behind, on all ranks together."""
        seen = (copy.trained[0] for copy in self._copies if copy.trained[0] is not None)
        [firsts] = self._mean_losses([[next(seen, None)]])
        self._check_seen(firsts)
        losses = [copy.trained[-LOOK:] for copy in self._live]
        by_arm = self._mean_losses(losses, [copy.owner for copy in self._live])
        # One batch may be easy by chance: what no arm is below does not count as behind.
        first = max([*firsts, min(map(mean, filter(None, by_arm)), default=-math.inf)])
        for copy, means in zip([*self._live], by_arm, strict=True):
            is_broken = means and max(means) >= INFINITE
            is_behind = means and mean(means) > first + FAR_BEHIND * abs(first)
            if is_broken or (is_behind and not is_last):
                self._live.remove(copy)
        if self._arms.spread and self._communicates():
            self._given_up = COMMUNICATES

    def _end_training(self) -> None:
        """Measures displacements; of spread arms, every replica gets the weights of every arm."""
        for copy in self._copies_of(self._replicas.index):
            copy.ratios = self._ratios(copy)
        for copy in self._live if self._arms.spread else ():
            mine = copy.weights if copy.owner == self._replicas.index else None
            copy.weights = self._arms.share(mine, copy.owner)

    @ranged("hdet.trial.score")
    def _score(self, closure: Closure) -> None:
        losses = dict[_Copy, Loss]()
        for copy in (self._first, *self._live):
            self._run.restore(copy.weights)
            try:
                losses[copy] = self._run.score(closure)
            except Exception as error:
                if self._position > STEPS or self._is_loops_own(error):
                    raise
                self._given_up = (
                    "the trial was given up: in eval mode the closure raised "
                    f"{type(error).__name__}: {error}"
                )
                return
            self.cost += FORWARD
        for copy, loss in losses.items():
            copy.scored.append(loss)

    def _is_loops_own(self, error: Exception) -> bool:
        """Is it to be raised? Of several ranks each would have to know of it."""
        is_several = self._replicas.world_group is not None
        return is_several or isinstance(error, torch.OutOfMemoryError)

    def _ratios(self, copy: _Copy) -> Ratios:
        self._run.restore(copy.weights)
        return self._displacement.ratios()

    # -- what ranks know together ------------------------------------------------------------------

    def _mean_losses(
        self, of: Sequence[Sequence[Loss]], owners: Sequence[int] = ()
    ) -> list[list[float]]:
        """Means over the ranks that see a loss, by arm and batch. A batch of which no arm of an
        owner has a loss is left out for these; an arm that has none where another one of them has
        is broken. ``owners``: who trains an arm, where that is not everybody."""
        losses = [loss for own in of for loss in own]
        values = [torch.zeros(()) if loss is None else loss for loss in losses]
        row = torch.stack([value.to("cpu", torch.float64) for value in values])
        row = row.nan_to_num(nan=INFINITE, posinf=INFINITE, neginf=INFINITE).clamp(max=INFINITE)
        seen = torch.tensor([float(loss is not None) for loss in losses], dtype=torch.float64)
        total = self._replicas.sum_rows(torch.cat([row, seen]), purpose="losses of arms").sum(0)
        sums, counts = total.view(2, len(of), -1)
        means = (sums / counts).where((counts > 0) & (sums < INFINITE), INFINITE)
        own = torch.tensor(owners or [0] * len(of))
        known = [counts[own == owner].sum(0) > 0 for owner in own]
        return [mean[has].tolist() for mean, has in zip(means, known, strict=True)]

    def _trial(self) -> Trial:
        """All of it: one collective of displacements, one of losses."""
        moved = medians(self._replicas, *(copy.ratios for copy in self._live))
        by_copy = dict(zip(self._live, moved, strict=True))
        scores = dict[_Copy, list[float]]()
        if self._position == STEPS + SCORES:
            scored = [self._first, *self._live]
            means = self._mean_losses([copy.scored for copy in scored])
            scores = dict(zip(scored, means, strict=True))
            self._check_seen(scores[self._first])
        arms = []
        for copy in self._copies:
            losses, distance = tuple(scores.get(copy, ())), by_copy.get(copy)
            is_finite = bool(losses) and max(losses) < INFINITE
            distance = distance if is_finite and distance != math.inf else None
            arms.append(Arm(self._rate * copy.multiple, losses if is_finite else (), distance))
        return Trial(
            self._rate, tuple(arms), tuple(scores.get(self._first, ())),
            pretrained=self._displacement.is_pretrained(self._replicas), given_up=self._given_up,
            smaller_batch=self._smaller_batch, error=self._error,
        )  # fmt: skip

    def _check_seen(self, losses: Sequence[float]) -> None:
        if not losses:
            raise ValueError("the closure returned no losses on any rank: return them")

    # -- does an arm do what the loop does? --------------------------------------------------------

    def _part_in_force(self) -> float:
        """The rate of the run's step, as a part of its peak. 0 if its length says nothing: groups
        have different parts, a schedule begins at 0, or weights of 16 bits are rounded."""
        run = self._run
        parts = [float(run.rate_in_force(n)) / peak for n, peak in run.peaks() if peak > 0]
        is_wide = all(tensor.element_size() >= 4 for tensor in run.weights().values())
        return parts[0] if is_wide and max(parts) <= 1.01 * min(parts) else 0.0

    def _compare_steps(self, own: Ratios, part: float, is_loop: bool) -> None:
        """Gives up if they differ. ``own``: of the run's step, empty on a rank that cannot say.
        ``is_loop``: has the run made one? Not in `find_rate`."""
        same = self._ratios(self._copies[MULTIPLES.index(1.0)]) if own else {}
        scaled = {key: ratio * (part / arm_factor(1)) for key, ratio in same.items()}
        ends = (self._ratios(self._copies[number]) for number in (0, -1))
        found = medians(self._replicas, own, scaled, *ends)
        run, arm, low, high = (moved or 0.0 for moved in found)
        is_measured = 0 < run < 100 and 0 < arm < 100  # bins end at 256
        is_skippable = self._arms.scaler is not None  # an overflow skips the loop's step
        if is_loop and run == 0 < arm and not is_skippable:
            self._given_up = (
                "the trial was given up: the loop's first step moved no weight, and a copy's did. "
                "Does zero_grad() come before optimizer.step()?"
            )
        if is_measured and not 1 / STRAYED < arm / run < STRAYED:
            self._given_up = (
                "the trial was given up: on the same batch and at the same rate, a copy's first "
                f"step was {arm / run:.3g} times as long as the run's. Does the loop train on the "
                "sum of the losses (use the mean), change gradients before optimizer.step() (pass "
                "before_step=), or take several steps before ensemble.step()?"
            )
        if 0 < low == high < 100:
            self._given_up = RATE_UNUSED


def _takes_nothing(closure: Closure) -> bool:
    """Can it be called without arguments?"""
    try:
        # what a decorator has wrapped is not what is called
        inspect.signature(closure, follow_wrapped=False).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin does not say
        return True
    return True


def _compare_losses(closure: Closure, loss: torch.Tensor | float) -> Closure:
    """With the loop's own, of the same weights and the same batch: logits have several dimensions,
    as losses of tokens do, but not this mean."""

    def compared() -> Any:
        losses = closure()
        if isinstance(losses, torch.Tensor) and losses.dim() > 1 and losses.is_floating_point():
            found, own = (float(mean_of(torch.as_tensor(x)) or 0.0) for x in (losses, loss))
            is_known = math.isfinite(found) and math.isfinite(own) and own != 0
            if is_known and not 1 / OTHER_NUMBERS < found / own < OTHER_NUMBERS:
                raise TypeError(
                    f"the closure returned numbers of shape {tuple(losses.shape)} with mean "
                    f"{found:.3g}, where the loss of this batch is {own:.3g}: return the losses, "
                    'one for each example (reduction="none"), no logits'
                )
        return losses

    return compared
