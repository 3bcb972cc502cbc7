"""A trial that is made in the first steps of a training loop, on the batches of the loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from statistics import mean

import torch

from ..run.snapshot import Snapshot
from .arms import Arms
from .budget import FORWARD
from .displacement import Displacement, Ratios
from .rule import MULTIPLES, SCORES, STEPS, Arm, Trial, arm_factor
from .searched import Closure

__all__ = ["TrialSteps"]

LOOK = STEPS // 4
"""After so many steps arms are looked at, which waits for the device."""
FAR_BEHIND = 0.5
"""An arm stops if its training loss is above the first one, and above the best arm's, by so much of
it."""
STRAYED = 4.0
"""Factor by which an arm's first step may be longer or shorter than the run's, at the same rate and
on the same batch. More says that the closure or before_step does not do what the loop does."""
CEILING = 8.0
"""Factor by which the highest rate that ties may be too low, of arms on parts of a batch."""
INFINITE = 1e30
"""In the place of a loss that is not finite, so that ranks can add up losses."""
NO_LOSSES = "the closure returned no losses on any rank: return them"
FIRST = -1
"""The number of the first weights, among those of the arms."""

Losses = dict[int, torch.Tensor | None]
"""Of one batch, by number of the arm. None: this rank saw none."""


class TrialSteps:
    """Arms train on the batches of the first `STEPS` steps, all on the same ones, and are scored
    on those of the next `SCORES`. Every rank decides on the same numbers.

    With ``spread`` each replica trains arms of its own on its own part of the batch, and all are
    scored on whole batches: N replicas train an arm in the time of one. A part of a batch is
    noisier, so the rate that ties may be several times too low (`CEILING`).
    """

    def __init__(self, arms: Arms, displacement: Displacement, spread: bool = False) -> None:
        self._arms, self._displacement, self._spread = arms, displacement, spread
        self._run, self._rate = arms.run, arms.run.rate
        self._copies: dict[int, Snapshot] = {}
        self._live = list(range(len(MULTIPLES)))
        """Numbers of the arms that train, or that are scored."""
        self._trained: list[Losses] = []
        self._scored: list[Losses] = []
        self._ratios: dict[int, Ratios] = {}
        self._given_up = ""
        self.cost = 0.0
        """In steps of the run, so far."""

    def after_step(self, closure: Closure | None) -> Trial | None:
        """Makes one step of every arm, or one score. Returns the trial when it is over.

        Raises:
            TypeError: there is no closure.
        """
        if closure is None:
            raise TypeError(
                "AutoLR's trial needs the batch's losses again in each of its steps: call "
                "ensemble.step(loss, closure=lambda: losses_of(model, batch))"
            )
        part = 0.0 if self._trained or self._spread else self._part_in_force()
        own = self._displacement.ratios() if part else []
        with self._arms.keep_run():
            if len(self._trained) == STEPS:
                self._score(closure)
            else:
                self._train(closure)
                if len(self._trained) == 1 and not self._spread:
                    self._compare_steps(own, part)
        if self._given_up or len(self._scored) == SCORES or not self._live:
            return self._measured()
        return None

    # -- arms --------------------------------------------------------------------------------------

    def _arms_of(self, replica: int) -> list[int]:
        """Those that it trains; of more replicas than arms, two train the same one."""
        if not self._spread:
            return list(self._live)
        count = self._run.replicas.count
        own = [n for n in range(len(MULTIPLES)) if n % count == replica]
        return [n for n in own or [replica % len(MULTIPLES)] if n in self._live]

    def _train(self, closure: Closure) -> None:
        replicas = self._run.replicas
        mine = self._arms_of(replicas.index)
        if not self._trained:
            self._copies = {number: self._arms.begin() for number in mine}
        position, losses = len(self._trained) + 1, Losses()
        self.cost += max(len(self._arms_of(replica)) for replica in range(replicas.count))
        for number in mine:
            try:
                losses[number] = self._arms.train(
                    self._copies[number], closure, MULTIPLES[number] * arm_factor(position),
                    may_skip=position > 1,
                )  # fmt: skip
            except Exception as error:
                # A high rate may break in whatever way the model has. Of several ranks each would
                # have to know: there the error stands.
                stands = position == 1 or MULTIPLES[number] <= 1 or replicas.world_group is not None
                if stands or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._live.remove(number)
                warnings.warn(
                    f"AutoLR: {MULTIPLES[number]:g} times the rate counts as a rate that breaks: "
                    f"the closure raised {type(error).__name__}: {error}",
                    stacklevel=2,
                )
        self._trained.append(losses)
        if position % LOOK == 0:
            self._stop_arms()
        if position == STEPS:
            self._end_training()

    def _end_training(self) -> None:
        """Measures displacements; of spread arms, every replica gets the weights of every arm."""
        replicas = self._run.replicas
        for number in self._arms_of(replicas.index):
            self._ratios[number] = self._arms.ratios(self._copies[number], self._displacement)
        for number in self._live if self._spread else ():
            owner = number % replicas.count
            mine = self._copies[number] if owner == replicas.index else None
            self._copies[number] = self._arms.share(mine, owner)

    def _score(self, closure: Closure) -> None:
        losses = Losses()
        copies = {FIRST: self._arms.first, **{n: self._copies[n] for n in self._live}}
        for number, copy in copies.items():
            try:
                losses[number] = self._arms.score(copy, closure)
            except Exception as error:
                stands = self._scored or self._run.replicas.world_group is not None
                if stands or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._given_up = (
                    "the trial was given up: in eval mode the closure raised "
                    f"{type(error).__name__}: {error}"
                )
                return
            self.cost += FORWARD
        self._scored.append(losses)

    def _stop_arms(self) -> None:
        """Those that have broken or are far behind, on all ranks together."""
        firsts = self._mean_losses([0], self._trained[:1])[0]
        if not firsts:
            raise ValueError(NO_LOSSES)
        by_arm = self._mean_losses(self._live, self._trained[-LOOK:])
        # One batch may be easy by chance: what no arm is below does not count as behind.
        means = [mean(losses) for losses in by_arm.values() if losses]
        first = max(firsts + ([min(means)] if means else []))
        for number, losses in by_arm.items():
            broken = losses and max(losses) >= INFINITE
            behind = losses and mean(losses) > first + FAR_BEHIND * abs(first)
            if broken or (behind and len(self._trained) < STEPS):
                self._live.remove(number)

    # -- what ranks know together ------------------------------------------------------------------

    def _mean_losses(
        self, numbers: Sequence[int], batches: Sequence[Losses]
    ) -> dict[int, list[float]]:
        """Means over the ranks that see a loss, by arm and batch. A batch of which no arm has a
        loss is left out for all; an arm that has none where another has one is broken."""
        losses = [batch.get(number) for number in numbers for batch in batches]
        values = [torch.zeros(()) if loss is None else loss for loss in losses]
        row = torch.stack([value.to("cpu", torch.float64) for value in values])
        row = row.nan_to_num(nan=INFINITE, posinf=INFINITE, neginf=INFINITE).clamp(max=INFINITE)
        seen = torch.tensor([float(loss is not None) for loss in losses], dtype=torch.float64)
        total = self._run.replicas.sum_rows(torch.cat([row, seen])).sum(0).cpu()
        sums, counts = total.view(2, len(numbers), len(batches))
        means = (sums / counts).where((counts > 0) & (sums < INFINITE), INFINITE)
        return dict(zip(numbers, means[:, counts.sum(0) > 0].tolist(), strict=True))

    def _measured(self) -> Trial:
        """All of it: one collective of displacements, one of losses."""
        numbers = self._live or [0]
        ratios = [self._ratios.get(number, []) for number in numbers]
        moved = self._displacement.over_ranks(self._run.replicas, *ratios)
        medians = {number: each.median for number, each in zip(numbers, moved, strict=True)}
        by_arm: dict[int, list[float]] = {}
        if len(self._scored) == SCORES:
            by_arm = self._mean_losses([FIRST, *self._live], self._scored)
            if not by_arm[FIRST]:
                raise ValueError(NO_LOSSES)
        arms = []
        for number, multiple in enumerate(MULTIPLES):
            losses, median = tuple(by_arm.get(number, ())), medians.get(number)
            is_finite = bool(losses) and max(losses) < INFINITE
            distance = median if is_finite and median != math.inf else None
            arms.append(Arm(self._rate * multiple, losses if is_finite else (), distance))
        return Trial(
            self._rate, tuple(arms), tuple(by_arm.get(FIRST, ())),
            pretrained=moved[0].pretrained, given_up=self._given_up,
            ceiling=CEILING if self._spread else 1.0,
        )  # fmt: skip

    # -- does an arm do what the loop does? --------------------------------------------------------

    def _part_in_force(self) -> float:
        """The rate of the run's step, as a part of its peak. 0 if its length says nothing: groups
        have different parts, a schedule begins at 0, or weights of 16 bits are rounded."""
        groups, peaks = self._run.optimizer.param_groups, self._run.peaks()
        parts = [float(groups[number]["lr"]) / peak for number, peak in peaks if peak > 0]
        wide = all(tensor.element_size() >= 4 for tensor in self._run.weights())
        return parts[0] if wide and max(parts) <= 1.01 * min(parts) else 0.0

    def _compare_steps(self, own: Ratios, part: float) -> None:
        """Gives up if an arm does not do what the loop does.

        Args:
            own: of the run's step; empty on a rank that cannot compare.
            part: see `_part_in_force`.
        """
        copy = self._copies[MULTIPLES.index(1.0)]
        ratios = self._arms.ratios(copy, self._displacement) if own else []
        copied = [ratio * (part / arm_factor(1)) for ratio in ratios]
        moved = self._displacement.over_ranks(self._run.replicas, own, copied)
        run, arm = (each.median or 0.0 for each in moved)
        if not 0 < run < 100 or not 0 < arm < 100 or 1 / STRAYED < arm / run < STRAYED:
            return  # bins end at 256
        self._given_up = (
            "the trial was given up: on the same batch and at the same rate, a copy's first step "
            f"was {arm / run:.2g} times as long as the run's. Does the loop train on the sum of "
            "the losses (use the mean), or change gradients before optimizer.step() (pass "
            "before_step=)?"
        )

    def layers(self) -> Mapping[str, float]:
        """Of the arm at the run's rate, or the nearest below that has lasted: `AutoLR.layers`."""
        below = [number for number in self._ratios if MULTIPLES[number] <= 1]
        return self._displacement.by_layer(self._ratios[below[-1]]) if below else {}
