"""Trials: copies of the run that train beside it for some steps, each at a rate of its own that falls to zero, and are scored then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..converge.health import all_finite
from ..core.rules.trial.protocol import BROKEN, RUN, Told, arm, by_arm, last
from ..profiling import ranged
from ..tensors.dtensor import gradient_norm, local_parts, reshard
from ..tensors.eval_mode import random_states_kept
from .measurement import Closure, Measurement, Watched
from .scoring import NO_LOSSES, Judge, Scorer, finite, mean_loss
from .seen import Seen, part_of_data

__all__ = ["Trials"]

RISE = 0.2
"""The part of a trial in which its rate rises from the run's to its own."""
LOOKS = 8
"""How often it is looked whether an arm has broken, which waits for the device."""


class Trials(Measurement):
    """[replica]: a row of `Told`.

    An arm begins as the run is then, or as a snapshot is. In each of the first ``steps`` steps it trains on the batch that the run has just
    trained on: the closure is called on its weights, with gradients, and the optimizer steps it. The rate of each group rises from the run's (from
    0, in an arm that begins with a snapshot of before) to ``multiple`` times its reference over the first fifth, then falls to zero in a straight
    line, or to a part of that. A group whose rate is 0, beside others', stays there; where all are 0 the schedule begins so, and all rise. In the
    ``scores`` steps that follow, nothing of the arms moves, and the closure computes the losses of batches that no arm has seen (in eval mode,
    without gradients), the first arm's snapshot among those whose losses are computed, if there is one; or those of the judge, at the cycle's end.

    Arguments are those of `hdet.AutoLR`, and what keeps the examples that it has seen.

    Settings in a plan: ``trial``, its number: with another one a new trial begins, with the same one it goes on from cycle to cycle;
    ``multiples``, one for each arm; ``origins``, the snapshots with which they begin, by arm ("": the run; None: all as the run); ``of``, the
    reference: "peak" (of the base value in the run) or "base" (the one in force when it begins); ``steps``; ``scores``; ``ends``, the parts to which
    the arms' rates fall, by arm (None: all to 0). The plan names the snapshots of `core.rules.trial.protocol.snapshots` too. Losses are told at the
    end of the cycle in which it has lasted ``steps + scores`` steps.

    Each arm costs a step of the run's compute in each of its steps, and memory for all that is trained: parameters, masters, moments, buffers.
    The run is left bit for bit as it was, random states included. A closure whose losses have no graph has done the backward pass itself; it returns None
    on a rank that sees no loss. Gradients that still differ between replicas are averaged.
    """

    needs_closure = True

    def __init__(
        self, model: nn.Module, judge: Judge | None = None, before_step: Callable[[], object] | None = None, seen: Seen | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if before_step is not None and not callable(before_step):
            raise TypeError(f"before_step must be callable without arguments, got {before_step!r}")
        self.model, self.before_step = model, before_step
        self._bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._settings: dict[str, Any] = {}
        self._seen = seen or Seen()
        self.scorer = Scorer(self._bare, judge)
        self._begin()

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self._bare]

    def watch(self, watched: Watched) -> None:
        """Raises ValueError for a run whose arms could not be trained, or not without a trace."""
        reshard(self._bare)  # an evaluation before may have left gathered parameters in the place of the optimizer's
        own, trained = {id(p) for p in self._bare.parameters()}, {id(p) for p in watched.sets[0]}
        others = [] if watched.copied else [p for p in self._bare.parameters() if id(p) not in trained]
        if not watched.copied and not trained <= own:
            raise ValueError(
                "the AutoLR's model has no parameter of this optimizer, or not all of them: pass the module that it trains, such as "
                "nn.ModuleList([encoder, decoder]), so that arms have all of it"
            )
        if isinstance(watched.optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss inside its step, which arms cannot follow: choose another controller")
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in others):
            raise ValueError(
                "a parameter of the AutoLR's model is not this optimizer's and has a hook that runs after its gradient (an optimizer inside the "
                "backward pass?), which arms would set off: put all parameters into one optimizer"
            )
        if len(watched.sets) > 1:
            raise ValueError(
                "AutoLR trains copies of the run beside it, for which replicas in one process are of no use: leave replicas out, or choose another "
                "controller for them (docs/choosing.md)"
            )
        self._watched, self._parameters = watched, watched.sets[0]
        self.scorer.parameters = [*watched.sets[0], *others]
        self.scorer.device = local_parts(watched.sets[0][:1])[0].device

    def on_cycle_start(self, settings: Any) -> None:
        settings = {"trial": 0, "multiples": [], "of": "peak", "origins": None, "steps": 1, "scores": 2, "ends": None, **(settings or {})}
        if settings == self._settings:  # it goes on
            return
        self._settings = settings
        self._begin()
        snapshots, multiples = self._watched.snapshots, self._settings["multiples"]
        origins = self._settings["origins"] or [""] * len(multiples)
        self._from_here.update(number for number, origin in enumerate(origins) if not origin or origin in snapshots.fresh)
        with self._run_kept():
            for number, origin in enumerate(origins):
                snapshots.restore(origin or RUN)
                snapshots.take(arm(number))

    def _begin(self) -> None:
        self._position = 0
        self._losses: dict[tuple[int, int], torch.Tensor | None] = {}  # by score and arm
        self._trained: dict[tuple[int, int], torch.Tensor | None] = {}  # by position and arm
        self._broken: set[int] = set()
        self._from_here: set[int] = set()
        """Arms that begin with what the run begins the cycle with: the run's first step is one of theirs."""
        self._went = torch.zeros(2, dtype=torch.float64)
        """Squares of what the first step moved: the run's, and that of an arm at its rate."""
        self._began: list[torch.Tensor | None] = []
        """Losses of the weights with which the first arm began: the judge's, or of the batches that score arms, or of the first one."""
        self._averages: bool | None = None
        self._rates: list[tuple[Any, list[float], list[float]]] = []
        self._seen.forget()

    def release(self) -> None:
        self._settings = {}
        self._begin()

    restart = release

    # -- beside the run ------------------------------------------------------------------------------------------------------

    @ranged("hdet.trials")
    def beside(self, closure: Closure) -> None:
        if not self._settings:  # parameters were loaded after the cycle's beginning
            return
        self._position += 1
        position, steps = self._position, self._settings["steps"]
        training, scores = position <= steps, 0 if self.scorer.judge is not None else self._settings["scores"]
        if position > steps + scores:
            return
        if position == 1:
            self._rates = self._rates_now()
        weights = [value.clone() for value in self._values()] if position == 1 and self._from_here else []
        act = partial(self._train, closure, position) if training else lambda number: self.scorer.score(closure)
        arms = [number for number in range(len(self._settings["multiples"])) if number not in self._broken]
        found: dict[int, torch.Tensor | None] = {}
        origin = (self._settings["origins"] or [""])[0]
        with self._gradients_kept(), self._run_kept():
            if position == 1 and self.scorer.judge is not None and arms:
                self._watched.snapshots.restore(arm(arms[0]))
                self._began = self.scorer.judged()
            elif not training and origin:
                self._watched.snapshots.restore(origin)
                self._began.append(self.scorer.score(closure))
            for number in arms:
                self._watched.snapshots.restore(arm(number))
                looking = self._seen.looking_at(self._bare) if number == arms[0] else nullcontext()  # the others are given the same
                with looking, self._first_step(number, weights):
                    found[number] = self._tried(number, act)
                if training:
                    self._trained[position, number] = found[number]
                    self._watched.snapshots.take(arm(number))
                else:
                    self._losses[position - steps - 1, number] = found[number]
        if position == 1 and self.scorer.judge is None and not origin and arms:
            self._began = [found[arms[0]]]
        if training and (position % max(1, steps // LOOKS) == 0 or position == steps):
            self._look(found)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        # DDP's gradients may be views of its buckets, into which the arms' are written too.
        shared = getattr(self.model, "gradient_as_bucket_view", False)
        gradients = [(p, p.grad, p.grad.clone() if shared and p.grad is not None else None) for p in self.scorer.parameters]
        try:
            yield
        finally:
            for parameter, gradient, values in gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)

    @contextmanager
    def _run_kept(self) -> Iterator[None]:
        """The run's next forward pass finds nothing of an arm's weights: neither gathered shards, which scoring leaves, nor cast copies."""
        self._watched.snapshots.take(RUN)
        try:
            yield
        finally:
            self._watched.snapshots.restore(RUN)
            self._forget_casts()

    def _forget_casts(self) -> None:
        reshard(self._bare)
        torch.clear_autocast_cache()

    @contextmanager
    def _first_step(self, number: int, weights: list[torch.Tensor]) -> Iterator[None]:
        """Around the first step of an arm at the run's rate: how far it goes, and how far the run went. ``weights``: the run's after that step, which
        are written over; none: nothing to compare with."""
        factors = [self._value(number, 1, at, top) / at for _, *cells in self._rates for at, top in zip(*cells, strict=True) if at > 0]
        alike = bool(factors) and max(factors) <= min(factors) * (1 + 1e-6)  # else a step's length tells nothing
        if not weights or number not in self._from_here or self._settings["multiples"][number] != 1 or not alike:
            yield
            return
        values = self._values()
        run = _square_between(weights, values)
        torch._foreach_copy_(weights, values)
        yield
        self._went = torch.stack([run, _square_between(weights, values) / factors[0] ** 2])

    def _values(self) -> list[torch.Tensor]:
        """What steps move in 32 bits or more; in fewer a small step is rounding."""
        masters = self._watched.masters[0]()
        held = [p if m is None else m for p, m in zip(self._parameters, masters, strict=True)]
        return [part.detach() for part in local_parts(held) if part.is_floating_point() and part.element_size() >= 4 and part.numel()]

    def _rates_now(self) -> list[tuple[Any, list[float], list[float]]]:
        """(a knob of rates, what its cells hold now, their references)."""
        rates = [
            (knob, [float(cell.get()) for cell in knob.cells], peaks)
            for knob, peaks in zip(self._watched.knobs, self._watched.peaks(), strict=True)
            if knob.key == "lr"
        ]
        if self._settings["of"] == "base":
            return [(knob, values, values) for knob, values, _ in rates]
        begins_at_0 = not any(value > 0 for _, values, _ in rates for value in values)
        return [
            (knob, values, [peak if begins_at_0 or value > 0 else 0.0 for value, peak in zip(values, peaks, strict=True)])
            for knob, values, peaks in rates
        ]

    def _tried(self, number: int, act: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
        """What an arm does, which may break in whatever way the model has: an error that neither its first step nor the run's own rate makes is
        taken for that. Of several ranks each would have to know: there the error stands."""
        try:
            return act(number)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self._position == 1 or self._settings["multiples"][number] == 1 or self._watched.replicas.world_group is not None:
                raise
            self._broken.add(number)
            return torch.full((), math.nan)

    def _train(self, closure: Closure, position: int, number: int) -> torch.Tensor | None:
        with random_states_kept(self._bare):
            self.scorer.clear()
            with torch.enable_grad():
                losses = self.scorer.losses(closure)
                if losses is not None and losses.requires_grad:
                    try:
                        losses.mean().backward()
                    except RuntimeError as error:
                        if "backward through the graph a second time" not in str(error):
                            raise
                        raise ValueError(
                            "the closure gave the loop's own losses, whose graph is gone: compute the batch's losses anew inside it"
                        ) from error
        if all(p.grad is None for p in self._parameters):
            raise ValueError(
                "the closure gave losses without a graph, and left no gradients: compute the batch's losses anew inside it, without no_grad or detach, "
                "or call backward inside" + (" (it returned no losses: is a return missing?)" if losses is None else "")
            )
        self._average_gradients()
        if self.before_step is not None:
            self.before_step()
        with ExitStack() as stack:
            for knob, *cells in self._rates:
                stack.enter_context(knob.holding([self._value(number, position, at, top) for at, top in zip(*cells, strict=True)]))
            stack.enter_context(self._watched.aside())
            self._watched.optimizer.step()
        self.scorer.clear()
        return mean_loss(losses)

    def _value(self, number: int, position: int, begins: float, reference: float) -> float:
        """The rate of a group in the arm of this number."""
        steps, top = self._settings["steps"], self._settings["multiples"][number] * reference
        rise = max(1, round(RISE * steps))
        if number not in self._from_here:
            begins = 0.0  # the run's rate may be far along
        if position <= rise:
            return begins + (top - begins) * (position / rise)
        end = 0.0 if self._settings["ends"] is None else self._settings["ends"][number]
        return float(top * (end + (1.0 - end) * ((steps - position + 1) / (steps - rise + 1))))

    def _average_gradients(self) -> None:
        """Those of a loop that all-reduces them by hand are still this rank's own."""
        replicas, group = self._watched.replicas, self._watched.replicas.peer_group
        if replicas.count == 1 or group is None or self._watched.local:
            return
        if self._averages is None:
            squares = replicas.sum_rows(gradient_norm(self._parameters).square().reshape(1).to(self.scorer.device)).flatten().tolist()
            self._averages = max(squares) > 1.002 * min(squares)
        if self._averages:
            for gradient in local_parts([p.grad for p in self._parameters if p.grad is not None]):
                dist.all_reduce(gradient, group=group)
                gradient.div_(replicas.count)

    def _look(self, losses: Mapping[int, torch.Tensor | None]) -> None:
        """At the losses by arm. All ranks leave an arm together: in it they may communicate."""
        if losses:
            lost = torch.stack([torch.tensor(False) if loss is None else ~torch.isfinite(loss).cpu() for loss in losses.values()])
            counts = self._watched.replicas.sum_rows(lost.double().to(self.scorer.device)).sum(0).tolist()
            self._broken |= {number for number, count in zip(losses, counts, strict=True) if count}

    # -- at the end ------------------------------------------------------------------------------------------------------------

    def measure(self, cycle: int, place: int = 0) -> torch.Tensor | None:
        """(9 + arms * (scores + `last` steps),) float64: is the run broken? 1, the losses, those in training, and that before the first step, zeros where
        this rank sees none; what that moved; and what `Seen.share` gives."""
        steps = self._settings["steps"]
        if self._position < steps + self._settings["scores"] * (self.scorer.judge is None):
            return None
        if self.scorer.judge is not None:
            self._judge()
        arms = range(len(self._settings["multiples"]))
        scores = self._settings["scores"] if self.scorer.judge is None else len(self.scorer.judge[1])
        told = [(score, number) for number in arms for score in range(scores)]
        trained = [self._trained.get((position, number)) for number in arms for position in range(steps - last(steps) + 1, steps + 1)]
        expected = [of for of in told if of[1] not in self._broken]
        if any(of not in self._losses for of in expected):
            return None  # a score has raised, and the loop has gone on
        mark = 1 - all_finite(local_parts(self._parameters)).reshape(1).to(self.scorer.device)
        went = torch.nan_to_num(self._went.to(mark), nan=0.0, posinf=BROKEN, neginf=0.0)
        began = torch.nan_to_num(_mean_over(self._began).to(mark), nan=BROKEN, posinf=BROKEN)
        more = torch.cat([began, went, mark.new_tensor(self._seen.share())])
        if any(self._losses[of] is None for of in expected):
            return torch.cat([mark, mark.new_zeros(1 + len(told) + len(trained)), more])
        losses = [*(self._losses.get(of) for of in told), *trained]
        row = torch.stack([mark.new_tensor(BROKEN) if loss is None else loss.to(mark) for loss in losses])
        return torch.cat([mark, mark.new_ones(1), finite(row), more])

    def _judge(self) -> None:
        with self._run_kept():
            for number in range(len(self._settings["multiples"])):
                if number not in self._broken:
                    self._watched.snapshots.restore(arm(number))
                    self._losses |= {(score, number): loss for score, loss in enumerate(self.scorer.judged())}

    def held_out(self, number: int) -> torch.Tensor:
        """(1 + number,) float64: 1, and losses of the run's own weights by so many of the judge's mini-batches; zeros where this rank sees none."""
        with self._gradients_kept():
            losses = self.scorer.judged(number)
        self._forget_casts()
        seen = [loss for loss in losses if loss is not None]
        if len(seen) < len(losses):
            return torch.zeros(1 + len(losses), dtype=torch.float64, device=self.scorer.device)
        return finite(torch.stack([seen[0].new_ones(()), *seen]).to(self.scorer.device))

    def split(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """[replica]: `Told`, means over the ranks that have seen losses. Raises ValueError where none of a replica's has."""
        if not all(row[1] for row in rows):
            raise ValueError(NO_LOSSES)
        found = []
        for broken, seeing, *losses, began, run, own, again, examples, chance, error in rows:
            far = math.sqrt(own / run) if min(run, own) > 0 else 1.0
            part = seeing * part_of_data(again, examples, chance, error)  # each of several ranks has looked at its own part alone
            means, arms = [min(loss / seeing, BROKEN) for loss in losses], len(self._settings["multiples"])
            scores = len(means) - arms * last(self._settings["steps"])
            parts = by_arm(means[:scores], arms), by_arm(means[scores:], arms)
            found.append(Told(broken, *parts, far, part, min(began / seeing, BROKEN)).row())
        return found


def _mean_over(losses: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """(1,): of batches; 0, where one is not seen."""
    seen = [loss for loss in losses if loss is not None]
    return torch.stack(seen).mean().reshape(1) if seen and len(seen) == len(losses) else torch.zeros(1)


@torch.no_grad()
def _square_between(ones: list[torch.Tensor], others: list[torch.Tensor]) -> torch.Tensor:
    """0-d float64: the square of the distance of two sets of weights. The first set is written over."""
    torch._foreach_sub_(ones, others)
    return torch.stack([norm.double() for norm in torch._foreach_norm(ones)]).square().sum()
