"""A trial that is made in the first steps of a training loop, on the batches of the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import nn

from ..run.snapshot import Snapshot
from .arms import Arms, Closure, Searched
from .displacement import BINS, Displacement, are_pretrained
from .rule import MULTIPLES, SCORES, STEPS, Arm, Trial, arm_factor

__all__ = ["REPEATS", "TrialSteps", "trial_cost"]

FORWARD = 1 / 3
"""Cost of a forward pass alone, in steps."""
LOOKS = 4
"""How often arms are looked at, which waits for the device."""
FAR_BEHIND = 0.5
"""An arm stops if its training loss is above the first one, and above the best arm's, by so much of
it."""
STRAYED = 4.0
"""Factor by which an arm's first step may be longer or shorter than the run's, at the same rate and
on the same batch. More says that the closure or before_step does not do what the loop does."""
REPEATS = 3
"""How often a trial is repeated at a lower rate after every arm broke. If nothing helps, it is not
the rate, which goes back to where it was."""
NOT_THE_RATE = "far lower rates break too: it is not the rate"
PARTS = 8.0
"""Factor by which the highest rate that ties may be too low, of arms on parts of a batch."""
INFINITE = 1e30
"""In the place of a loss that is not finite, so that ranks can add up losses."""
NO_LOSSES = "the closure returned no losses on any rank: return them"


def trial_cost(arms: int = len(MULTIPLES)) -> float:
    """The most that a trial costs, in steps of the run: no arm stops early."""
    return arms * STEPS + FORWARD * SCORES * (arms + 1)


class TrialSteps:
    """Arms train on the batches of the first `STEPS` steps, each on the same ones, and are scored on
    those of the next `SCORES`. Every rank decides on the same numbers.

    With ``spread`` each replica trains arms of its own on its own part of the batch, and all are
    scored on whole batches: N replicas train an arm in the time of one. A part of a batch is
    noisier, so the rate that ties may be several times too low (`PARTS`).
    """

    def __init__(
        self,
        run: Searched,
        first: Snapshot,
        displacement: Displacement,
        before_step: Callable[[], object] | None,
        scaler: Any,
        place: str,
        spread: bool = False,
    ) -> None:
        self._run, self._first, self._displacement = run, first, displacement
        self._spread = spread and run.replicas.count > 1 and can_spread(run, scaler)
        self._parts = run.replicas.count if self._spread else 1
        self._arms = Arms(
            run, first, before_step=before_step, scaler=scaler, place=place,
            averages=False if self._spread else None,
        )  # fmt: skip
        self._rate = run.rate
        self._multiples = list(MULTIPLES)
        self._copies: dict[int, Snapshot] = {}
        self._stopped: dict[int, str] = {}
        """Arms that train no more, and why."""
        self._trained: list[dict[int, torch.Tensor | None]] = []
        """By step: training losses by arm."""
        self._scores: list[dict[int, torch.Tensor | None]] = []
        """By batch: losses by arm; that of the first weights is number -1."""
        self._ratios: dict[int, list[torch.Tensor]] = {}
        self.given_up = ""
        """Why the trial says nothing; empty if it does."""
        self.cost = 0.0
        """In steps of the run, so far."""

    def after_step(self, closure: Closure) -> Trial | None:
        """One step of every arm, or one score. Returns the trial when it is over."""
        if not self._trained:
            own = self._displacement.ratios() if self._can_compare_steps else []
            self._copies = {number: self._arms.begin() for number in self._mine}
        if len(self._trained) < STEPS:
            self._train(closure)
            if len(self._trained) == 1 and not self._spread:
                self._compare_steps(own)
            if len(self._trained) % (STEPS // LOOKS) == 0:
                self._look()
            if len(self._trained) == STEPS and self._spread:
                self._share()
        else:
            self._score(closure)
        if self.given_up or len(self._scores) == SCORES or not self._live:
            return self._finished()
        return None

    @property
    def _live(self) -> list[int]:
        return [n for n in range(len(self._multiples)) if n not in self._stopped]

    def _arms_of(self, index: int) -> list[int]:
        """Those that a replica trains; more replicas than arms train some of them twice."""
        own = {n for n in range(len(self._multiples)) if n % self._parts == index}
        own = own or {index % len(self._multiples)}
        return [n for n in self._live if n in own]

    @property
    def _mine(self) -> list[int]:
        return self._arms_of(self._run.replicas.index if self._spread else 0)

    def _share(self) -> None:
        """Every replica gets the weights of every arm."""
        with self._arms.run_kept():
            for number in self._live:
                owner = number % self._run.replicas.count
                mine = self._copies.get(number) if owner == self._run.replicas.index else None
                self._copies[number] = self._arms.share(mine, owner)

    # -- arms --------------------------------------------------------------------------------------

    def _train(self, closure: Closure) -> None:
        position = len(self._trained) + 1
        factor, losses = arm_factor(position), {}
        self.cost += max(len(self._arms_of(index)) for index in range(self._parts))
        with self._arms.run_kept():
            for number in self._mine:
                multiple = self._multiples[number]
                try:
                    losses[number] = self._arms.train(
                        self._copies[number], closure, multiple * factor, may_skip=position > 1
                    )
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    # A high rate may break in whatever way the model has. Of several ranks each
                    # would have to know: there the error stands.
                    alone = self._run.replicas.world_group is None
                    if position == 1 or multiple <= 1 or not alone:
                        raise
                    self._stopped[number] = f"{type(error).__name__}: {error}"
                if position == STEPS and number in self._live:
                    self._ratios[number] = self._arms.ratios(
                        self._copies[number], self._displacement
                    )
        self._trained.append(losses)

    def _score(self, closure: Closure) -> None:
        losses = {}
        with self._arms.run_kept():
            for number, copy in [(-1, self._first), *((n, self._copies[n]) for n in self._live)]:
                try:
                    losses[number] = self._arms.score(copy, closure)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    if self._scores or self._run.replicas.world_group is not None:
                        raise
                    self.given_up = (
                        f"in eval mode the closure raised {type(error).__name__}: {error}"
                    )
                    return
                self.cost += FORWARD
        self._scores.append(losses)

    def _look(self) -> None:
        """Arms stop that have broken or are far behind, on all ranks together."""
        window = self._trained[-(STEPS // LOOKS) :]
        rows = [self._trained[0].get(0), *(losses.get(n) for n in self._live for losses in window)]
        first, *found = self._mean_over_ranks(rows)
        if first is None:
            raise ValueError(NO_LOSSES)
        by_arm = self._by_arm(self._live, found, len(window))
        # One batch may be easy by chance: what no arm is below does not count as behind.
        means = [mean(losses) for losses in by_arm.values() if losses]
        first = max([first, *([min(means)] if means else [])])
        for number, losses in by_arm.items():
            if not losses:
                continue
            if max(losses) >= INFINITE or not math.isfinite(sum(losses)):
                self._stopped[number] = "the loss is not finite"
            elif mean(losses) > first + FAR_BEHIND * abs(first) and len(self._trained) < STEPS:
                self._stopped[number] = "far behind"

    def _mean_over_ranks(self, losses: Sequence[torch.Tensor | None]) -> list[float | None]:
        """Of the ranks that see a loss. None: no rank does."""
        device = self._run.device
        seen = torch.tensor([float(loss is not None) for loss in losses], dtype=torch.float64)
        values = [torch.zeros(()) if loss is None else loss for loss in losses]
        row = torch.stack([value.to("cpu", torch.float64) for value in values])
        row = row.nan_to_num(nan=INFINITE, posinf=INFINITE, neginf=INFINITE).clamp(max=INFINITE)
        total = self._run.replicas.sum_rows(torch.cat([row, seen]).to(_float64_on(device)))
        sums, counts = total.sum(0).cpu().view(2, -1).tolist()
        return [None if not count else value / count if value < INFINITE else INFINITE
                for value, count in zip(sums, counts, strict=True)]  # fmt: skip

    @staticmethod
    def _by_arm(
        numbers: Sequence[int], means: Sequence[float | None], batches: int
    ) -> dict[int, tuple[float, ...]]:
        """Mean losses by arm. A batch of which no arm has a loss is left out for all; an arm that
        has none where another has one is broken."""
        rows = [means[place * batches : (place + 1) * batches] for place in range(len(numbers))]
        seen = [any(row[batch] is not None for row in rows) for batch in range(batches)]
        return {number: tuple(INFINITE if loss is None else loss
                              for loss, kept in zip(row, seen, strict=True) if kept)
                for number, row in zip(numbers, rows, strict=True)}  # fmt: skip

    # -- does an arm do what the loop does? ----------------------------------------------------------

    @property
    def _can_compare_steps(self) -> bool:
        """A small step of 16 bits is rounding; a schedule may begin at rate 0."""
        wide = all(tensor.element_size() >= 4 for tensor in self._run.weights())
        return wide and not self._spread and self._part_in_force() > 0

    def _part_in_force(self) -> float:
        """The rate of the run's step, as a part of its peak; 0 where groups have different ones."""
        groups, peaks = self._run.optimizer.param_groups, self._run.peaks()
        parts = [float(groups[number]["lr"]) / peak for number, peak in peaks if peak > 0]
        return parts[0] if max(parts) <= 1.01 * min(parts) else 0.0

    def _compare_steps(self, own: list[torch.Tensor]) -> None:
        """``own``: ratios of the run's step; empty on a rank that cannot compare, which still takes
        part in the sum."""
        number, arm, part = self._multiples.index(1.0), list[torch.Tensor](), 0.0
        if own:
            with self._arms.run_kept():
                arm = self._arms.ratios(self._copies[number], self._displacement)
            part = self._part_in_force()
        rows = [self._displacement.row(ratios) for ratios in (own, arm)]
        rows.append(torch.tensor([part, float(part > 0)], dtype=torch.float64))
        total = self._run.replicas.sum_rows(torch.cat(rows)).sum(0).tolist()
        width = BINS + 3
        went = [self._displacement.read(total[i : i + width]).median for i in (0, width)]
        if not total[-1] or not all(x and x < 100 for x in went):
            return  # bins end at 256
        wanted = arm_factor(1) / (total[-2] / total[-1])
        far = went[1] / went[0] / wanted  # type: ignore[operator]
        if not 1 / STRAYED < far < STRAYED:
            self.given_up = (
                f"on the same batch and at the same rate, a copy's first step was {far:.2g} times "
                "as long as the run's. Does the loop train on the sum of the losses (use the mean), "
                "or change gradients before optimizer.step() (pass before_step=)?"
            )

    # -- at the end --------------------------------------------------------------------------------

    def _finished(self) -> Trial:
        """Sums over ranks what was measured: one collective of losses, one of displacements."""
        numbers = self._live or [0]
        rows = [self._displacement.row(self._ratios.get(n, [])) for n in numbers]
        counted = self._run.replicas.sum_rows(torch.cat(rows)).sum(0).tolist()
        width = BINS + 3
        moved = [self._displacement.read(counted[i * width : (i + 1) * width])
                 for i in range(len(rows))]  # fmt: skip
        medians = {n: found.median for n, found in zip(numbers, moved, strict=True)}
        scored = [-1, *self._live] if len(self._scores) == SCORES else []
        losses = [batch[number] for number in scored for batch in self._scores]
        means = self._mean_over_ranks(losses) if losses else []
        by_arm = self._by_arm(scored, means, SCORES)
        if scored and not by_arm[-1]:
            raise ValueError(NO_LOSSES)
        found = []
        for number, multiple in enumerate(self._multiples):
            scores = by_arm.get(number, ())
            finite = bool(scores) and max(scores) < INFINITE
            median = medians.get(number)
            distance = median if finite and median is not None and math.isfinite(median) else None
            found.append(Arm(self._rate * multiple, scores if finite else (), distance))
        return Trial(
            self._rate, tuple(found), by_arm.get(-1, ()), pretrained=are_pretrained(moved[0]),
            given_up=self.given_up, ceiling=PARTS if self._spread else 1.0,
        )  # fmt: skip

    def is_beyond_measure(self, trial: Trial) -> bool:
        """Is the rate so high that a lower one has to be tried?"""
        return trial.broke

    def layers(self) -> Mapping[str, float]:
        """Of the arm at the run's rate, or the nearest one below that has lasted: `AutoLR.layers`."""
        below = [n for n in self._ratios if self._multiples[n] <= 1]
        return self._displacement.by_layer(self._ratios[below[-1]]) if below else {}

    def check(self, what: str) -> None:
        """Raises RuntimeError while an arm is in the place of the run."""
        self._arms.in_place.check(what)

    def close(self) -> None:
        self._arms.close()


def can_spread(run: Searched, scaler: Any) -> bool:
    """Replicas train different numbers of arms, so nothing in a step may communicate."""
    return scaler is None and not any(
        isinstance(module, nn.SyncBatchNorm) for module in run.module.modules()
    )


def _float64_on(device: torch.device) -> torch.device:
    """Where ranks can add up float64."""
    return device if device.type == "cuda" else torch.device("cpu")
