"""The line on real tensors: anchor, average, and losses at any multiplier between and beyond (the rule: core/controllers/line.py)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .anchor import GroupNumbers, begin_anew
from .beginning import Beginning
from .converge import Masters
from .core.clock import Clock
from .core.controllers import Controller, Decision, Evidence, LineRule
from .core.controllers.base import RuledController, check_run, check_state, is_idle, needs_replicas, regresses, see, spreads
from .core.controllers.line import FEEL, SWEEP
from .core.controllers.peak import LARGEST_T
from .core.schema import Flag, Instance, read, unchanged_on_error
from .knobs.bound import ProductKnob
from .ranges import ranged
from .replicas import Replicas
from .replicas.layout import brief
from .sensor import Sensor
from .shards import reshard
from .undisturbed import undisturbed
from .way import Way, check_room

__all__ = ["LineController", "follower", "sensor_of"]

LARGEST_LOSS = 1e30
"""What a loss that is not finite is taken for."""

PATIENCE = 32
"""Steps in a row whose batches have less than two examples: a closure that gives one number for all, which it did not at first."""
LONGEST = 0.1
"""A cycle's longest part of the run: what was found is in force, and late intervals end, where cycles do."""
ADAMS = ({"exp_avg", "exp_avg_sq"}, {"state1", "state2"})
"""What the state of an optimizer like Adam has of each parameter: torch's names, and those of 8-bit ones."""

Closure = Callable[[], Any]


class LineController(RuledController):
    """Sweeps the rate upwards once until training breaks, begins again at a rate that follows from where, and listens twice more, or hands over
    to another controller. No probe data, no spread, N = 1 and every layout included.

    Losses at multipliers that no replica has come from the line through the interval's beginning: each rank calls the closure of
    ``ensemble.step(loss, closure=...)`` on its current batch at several points of it, and the differences, paired by example, are added up over
    ranks. Meanwhile the spread rests; with shared gradients, which it asks for where nothing follows, replicas train alike. Several rates (parameter
    groups) are swept together; other knobs may stand beside them for ``then``.

    **The first 5 to 9 % of the run are a search** (at most 160 steps), after which the weights, the model's buffers and the optimizer's state are
    those of the run's first step again, loaded ones included; state that the search has made is gone. Parameters of ``model`` that another
    optimizer has go back too, but their optimizer's state would not: where one moves in the search, it is refused. Put all parameters into
    one optimizer, or step the other one only when ``ensemble.sweeping`` is False.

    Args:
        model: whose losses the closure computes: it is in eval mode meanwhile, and buffers, modes and random states are afterwards what
            they were; and what it has beside this optimizer's parameters goes back after the search. None: the closure sees to all that.
        rule: turns losses into decisions; see `LineRule` for its settings, and for the intervals.
        place: "device" or "host": where anchor and average live.
        dtype: of anchor and average; None: float32, or the parameters' own if that is wider. torch.bfloat16 halves them (and the weights
            that are kept meanwhile are then a copy for themselves); weights that are taken back are rounded to it.
        freeze_after: see `BaseController`; of the line alone (a sweep then ends without a result; ``then`` has its own), and of a rule of
            your own it is the rule's.
        then: another controller, which takes over when the rate that the sweep has found has been reached (nothing is read late then). The
            sweep saves it from a start that is far off, to which the others come late or not at all; replicas part only when it acts.

    The closure returns the losses of this rank's current batch, one for each example or sequence, shape (examples,), without a graph; or one
    number, where there are several ranks: the error comes from the scatter. None where this rank sees no loss. The mean of the same losses is
    what ``step`` is given. Each call for one batch returns as many; batches may differ, and one of a single example is not read. It is called 20 to 30 times in a run, once in the first step: 0.7 to 1.8 % of 600 to 1 000 steps, less of longer
    ones. Memory: two copies of the parameters, given back when nothing is left to read; those of ``then`` come on top (a probe of single
    cycles takes its own at once). In the search also one of the model's buffers, of moments that were there before it (none in a new run), and of
    the model's parameters that this optimizer does not have, frozen ones only if they are no more than the trained ones.

    Needs the run's length, cycles of at most 10 % of it (its sweep has short ones of its own) and ``warmup_steps=0``. A checkpoint holds what
    has been learned; a sweep or an interval that was under way begins anew at the resumed step. See docs/controllers.md for the rule and what it rests on.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        rule: LineRule | None = None,
        place: str = "device",
        dtype: torch.dtype | None = None,
        freeze_after: float | None = None,
        then: Controller | None = None,
    ) -> None:
        if then is not None and (isinstance(then, (type, LineController)) or not isinstance(then, Controller)):
            raise TypeError(f"then must be another controller, such as hdet.ProbeController(...), or None, got {then!r}")
        if getattr(then, "decay", None) is not None:
            raise ValueError(
                f"then decays from where it takes over (decay={getattr(then, 'decay', None)!r}), in the place of the schedule whose peak the sweep has "
                "found: pass decay=None"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        if rule is not None and not isinstance(rule, LineRule):
            raise TypeError(f"rule must be a LineRule, got {type(rule).__name__}")
        if rule is not None and freeze_after is not None:
            raise ValueError(f"freeze_after is {freeze_after!r}, but a rule is given: pass it to the rule, LineRule(freeze_after=...)")
        check_room(place, dtype)
        self.model, self.place, self.dtype, self.then = model, place, dtype, then
        self.name = "line" if then is None else f"line, then {then.name}"
        self.needs_probe = then is not None and then.needs_probe
        self.needs_replicas = then is not None and needs_replicas(then)
        self.regresses = then is not None and regresses(then)
        self.handed_over = False
        """Does ``then`` decide from now on?"""
        self.unread = 0
        """Readings in a row that were left out, because the batch had less than two examples: the next step's is read in their place."""
        super().__init__(LineRule(freeze_after=freeze_after) if rule is None else rule)
        self._tried = self._compared = self._looked = False
        self._way: Way | None = None
        self._beginning: Beginning | None = None

    # -- a controller ----------------------------------------------------------------------------------------------------

    @property
    def spreads(self) -> bool:  # type: ignore[override]
        return self.handed_over and spreads(self.then)

    @property
    def listens(self) -> bool:
        """Is there something left to read on the line?"""
        return self.sweeping if self.then is not None else not self.rule.idle

    @property
    def idle(self) -> bool:
        return not self.listens and (self.then is None or is_idle(self.then))

    def cycle_steps(self, began: int, total_steps: int, sync_interval: int) -> int:
        """See `LineRule.cycle_steps`: the sweep has short cycles, whatever T is."""
        return 1 if self.unread else self.rule.cycle_steps(began, total_steps, sync_interval)

    def check_run(self, total_steps: int | None, floor: Sequence[float]) -> None:
        super().check_run(total_steps, floor)
        if self.then is not None:
            check_run(self.then, total_steps, floor)

    def update(self, evidence: Evidence) -> list[Decision]:
        """Of the rule; after its sweep, once the rate has risen, of ``then``."""
        if self.then is None:
            return self._asked(evidence)
        if self.handed_over:
            return self.then.update(evidence)
        see(self.then, evidence)
        decisions = [Decision()] * len(evidence.knobs)
        if self.sweeping:
            for k, decision in zip(self._rates, self._asked(evidence.only(self._rates)), strict=True):
                decisions[k] = decision
        else:
            self.handed_over = evidence.step >= self.rule.risen
        return decisions

    def _asked(self, evidence: Evidence) -> list[Decision]:
        """The rule's decisions. It compares what it is told with what it reads, so those had better be the same losses."""
        feeling, self.rule.felt = self.rule.feeling and not self._compared, None
        if evidence.line is not None and not self._looked:
            self._looked = True
            if not any(kind <= state.keys() for state in self._state().values() for kind in ADAMS):
                warnings.warn(
                    "a LineController's sweep was found and measured with Adam's two moments, which this optimizer has not: it may find nothing, or a rate "
                    "that is several times too high or too low. In runs of more than 2 000 steps try rule=LineRule(octave=16), and compare with a fixed "
                    "schedule (docs/controllers.md has figures)",
                    stacklevel=5,
                )
        decisions = self.rule.update(evidence)
        told = self.rule.felt
        if feeling and evidence.line is not None and told is not None and not self.rule.feeling:
            self._compared = True
            # What the octave began with and what it ended with: a rate that is far too high may have moved the loss meanwhile.
            (read, error), (begun, _) = evidence.line.mean(1.0), evidence.line.mean(0.0)
            beyond = max(told - max(read, begun), min(read, begun) - told)
            if beyond > max(abs(told), abs(read)) / 3 and beyond > 3 * error:
                warnings.warn(
                    f"step(loss) was {told:.4g} on the mean, but the closure's losses are {read:.4g}: give step the mean of the same losses (not "
                    "divided by the number of micro-batches, nor multiplied by a scaler), or the rate that is found will be wrong",
                    stacklevel=5,
                )
        return decisions

    def state_dict(self) -> dict[str, Any]:
        state = self.rule.state_dict()
        return state if self.then is None else {"sweep": state, "then": self.then.state_dict(), "handed_over": self.handed_over}

    def check_state(self, state: Any, knobs: int | None = None) -> Any:
        if self.then is None:
            return super().check_state(state, knobs)
        parts = read(state, {"sweep": Instance(Mapping), "then": Instance(Mapping), "handed_over": Flag()}, "LineController's")
        sweep = super().check_state(parts["sweep"])
        check_state(self.then, parts["then"], knobs)
        if parts["handed_over"] and (sweep or {}).get("phase") in (FEEL, SWEEP):
            raise ValueError("the LineController's state has handed over in the middle of its sweep: it is damaged")
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.then is None:
            self.rule.load_state_dict(state)
            return
        parts = self.check_state(state)
        with unchanged_on_error(self.then):
            self.then.load_state_dict(parts["then"])
            self.rule.load_state_dict(parts["sweep"])
        self.handed_over = parts["handed_over"]

    # -- called by the Ensemble ------------------------------------------------------------------------------------------

    def follow_run(
        self,
        optimizer: Optimizer,
        masters: Callable[[Sequence[torch.Tensor]], Masters],
        knobs: Sequence[Any],
        clock: Clock,
        copied: bool = False,
    ) -> None:
        """Once, before the first step. ``masters``: of some tensors. ``copied``: the optimizer has copies of the model's parameters.

        Raises:
            ValueError: a knob that is no learning rate (displacements do not scale with it) without ``then``, no knob that is one, cycles
                that are too long to sweep in, or a warm-up of the controller: what it has to find, it finds at the run's beginning.
        """
        self._rates = [k for k, knob in enumerate(knobs) if knob.key == "lr"]
        others = [knob.name for knob in knobs if knob.key != "lr"]
        if others and self.then is None:
            raise ValueError(
                f"knob {others[0]!r} is no learning rate, and the line scales with no other: use LineController(model, then=ProbeController(...)), "
                "which leaves it to the probe"
            )
        product = next((knob.name for knob in knobs if isinstance(knob, ProductKnob)), None)
        if product is not None:
            raise ValueError(
                f"the knob {product!r} is rate * decay, but a sweep moves rates by orders of magnitude, and decays would go the other way: pass "
                "product=False"
            )
        bounded = next((knobs[k].name for k in self._rates if knobs[k].scale.bounded), None)
        if bounded is not None and len(self._rates) > 1:
            raise ValueError(
                f"the knob {bounded!r} has bounds, but a LineController sweeps all rates together, and one that is held back would part from them: "
                "leave bounds out, or use one knob, LearningRate(groups=None)"
            )
        if not self._rates:
            raise ValueError(f"none of the knobs {others} is a learning rate, and a LineController sweeps nothing else: leave it out")
        total, interval = clock.total_steps or 0, clock.sync_interval
        if clock.warmup_steps:
            raise ValueError(
                f"warmup_steps (auto_lr_warmup_steps) is {clock.warmup_steps}, but a LineController finds the rate at the run's beginning: pass 0"
            )
        if interval > max(1, LONGEST * total):
            raise ValueError(
                f"sync_interval (model_sync_interval) is {interval} of {total} steps, but a LineController acts at the ends of cycles, in the first half of "
                f"a run: pass at most {max(1, int(LONGEST * total))}"
            )
        self._total, self._interval = total, interval
        owners = {index: i for i, k in enumerate(self._rates) for index in knobs[k].indices}
        # Those that no knob moves are trained in the sweep, too, and have to be taken back.
        listed = [(p, owners.get(g)) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
        tensors = [p for p, _ in listed]
        self._owner: list[int | None] = [k for _, k in listed]
        self._make_way = lambda: Way(tensors, masters(tensors), self.dtype, self.place)
        self._state: Callable[[], Mapping[Any, Mapping[str, Any]]] = lambda: optimizer.state
        self._begun: int | None = None
        self._seen = 0
        self.unread = 0
        self._tried = self._compared = self._looked = False
        self._groups = GroupNumbers(optimizer)
        self._begin_anew: Callable[[], None] = lambda: begin_anew(optimizer)
        self._beginning = Beginning(optimizer, self.model, self.place, copied)
        self._expect()

    @property
    def sweeping(self) -> bool:
        """Are the weights those of a sweep, which will be taken back?"""
        return self.rule.sweeping

    def check_closure(self, closure: Closure | None) -> bool:
        """Raises TypeError for a step without a closure while there is something left to decide. Returns whether it is the first one."""
        if closure is None and self.listens:
            raise TypeError("a LineController scores the current batch: call step(loss, closure=...)")
        first, self._tried = self.listens and not self._tried, True
        return first

    def try_closure(self, closure: Closure | None, replicas: Replicas) -> None:
        """On all ranks, at the weights as they are: raises ValueError for what will not do at the first octave's end either."""
        assert closure is not None
        with torch.no_grad():
            _Scores(lambda rho: None, self._evaluate(closure), replicas, len(self._rates)).mean(1.0)

    def begin_anew(self, step: int) -> None:
        """Parameters were loaded, or a cycle was taken back: what is under way begins anew, with the next step."""
        self._begun, self.unread = None, 0
        self.rule.anew(step)
        self._expect()

    def depart(self, step: int) -> None:
        """Before the first optimizer step after ``step`` of them."""
        if self._begun is None and self.listens:
            self._way = self._way or self._make_way()
            self._way.begin()
            self._begun = self._seen = step
            if self.sweeping and self._beginning is not None:
                self._beginning.take()

    def close(self) -> None:
        """The Ensemble is given up: the memory is free again, and the optimizer is not held."""
        self._way = self._begun = None
        if self._beginning is not None:
            self._beginning.leave()
        self._make_way, self._state, self._begin_anew, self._beginning = _closed, dict, _nothing, None

    def sample(self, step: int) -> None:
        """After an optimizer step, the schedule being at ``step``; for a late interval, which is read at the mean of its second half."""
        if self._begun is None or not self.listens or self.sweeping:
            return
        end = math.ceil(self.rule.next_end(self._total, self._interval) / self._interval) * self._interval
        length = max(1, end - self._begun)
        stride = max(1, length // 100)
        # A sample at end, end - stride, ...; or at the step after, where the schedule goes on by several between two of the optimizer.
        passed = math.ceil((end - step) / stride) < math.ceil((end - self._seen) / stride)
        self._seen = step
        if step > self._begun + length / 2 and passed:
            self._way_or_fail().add()

    def is_due(self, step: int) -> bool:
        due = self._begun is not None and step >= self.rule.next_end(self._total, self._interval)
        return due and (self.sweeping or self._way_or_fail().samples > 0)

    @contextmanager
    def scores(self, closure: Closure, replicas: Replicas) -> Iterator[_Scores | None]:
        """The line of the interval that ends, to be read inside; afterwards the weights are what they were. A sweep is read where it stands.

        None where the batch has less than two examples, over all ranks, so that nothing has an error: the interval goes on. Raises ValueError if that
        has been so for `PATIENCE` steps.
        """
        if self.sweeping:
            self._way_or_fail().begin_mean()
            self._way_or_fail().add()
            if self.rule.feeling and replicas.count > len(
                replicas.local
            ):  # what all go back to; they may have begun with different weights
                self._way_or_fail().share(replicas)
        with self._way_or_fail().scored() as put, torch.no_grad():
            # What no knob moves stays at the mean; in a sweep the line is that of the whole model from its beginning.
            scores = _Scores(
                lambda rho: put([(rho[0] if self.sweeping else 1.0) if k is None else rho[k] for k in self._owner]),
                self._evaluate(closure), replicas, len(self._rates),
            )  # fmt: skip
            self.unread = 0 if scores.count() >= 2 else self.unread + 1
            yield None if 0 < self.unread < PATIENCE else scores

    def _evaluate(self, closure: Closure) -> Callable[[], torch.Tensor | None]:
        def evaluate() -> torch.Tensor | None:
            # The same random numbers at all points: dropout, if the closure has any, then cancels.
            with undisturbed(self.model) if self.model is not None else torch.random.fork_rng():
                if self.model is not None:
                    reshard(self.model)
                losses = closure()
            if losses is None or (isinstance(losses, torch.Tensor) and losses.numel() == 0):
                return None
            if not isinstance(losses, torch.Tensor) or losses.dim() > 1 or not losses.is_floating_point():
                what = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else type(losses).__name__
                raise ValueError(f"closure must return losses as a tensor of shape (examples,), or one number as a tensor, got {what}")
            flat = losses.detach().reshape(-1).double()
            return torch.nan_to_num(flat, nan=LARGEST_LOSS, posinf=LARGEST_LOSS, neginf=LARGEST_LOSS).clamp(max=LARGEST_LOSS)

        return evaluate

    @ranged("hdet.line")
    def settle(self, step: int, decisions: Sequence[Decision]) -> bool:
        """After the decisions of `rule`: go on, or begin the next interval. Returns whether weights were taken back."""
        way = self._way_or_fail()
        back = any(decision.restart for decision in decisions)
        if back:
            self.take_back()
        if not self.sweeping and self._beginning is not None:
            self._beginning.close()
        if not self.listens:  # for good, and the memory is free again
            self._way = self._begun = None
            return back
        if not self.sweeping:
            if not back:
                way.begin()
            self._begun = self._seen = step
        way.begin_mean()
        return back

    def take_back(self) -> None:
        """To where the interval began, of a sweep that is the run's first step: with all that the run had then. Of a later one weights alone are
        known, and the optimizer's state begins anew. Other replicas of this process are not touched."""
        self._way_or_fail().take_back()
        if self._beginning is not None and self._beginning.taken:
            self._beginning.put_back()
        else:
            self._begin_anew()
            self._groups.put_back()

    def moved(self) -> str | None:
        """In a sweep, the name of a parameter of the model that another optimizer moves, on this rank."""
        return None if self._beginning is None else self._beginning.moved()

    def _expect(self) -> None:
        """A sweep's beginning is still to come; after it nothing has to be kept."""
        if self._beginning is not None:
            self._beginning.expect() if self.sweeping else self._beginning.close()

    def _way_or_fail(self) -> Way:
        assert self._way is not None, "follow_run comes first"
        return self._way


def _nothing() -> None:
    """In the place of what would hold the optimizer."""


def _closed() -> Way:
    raise RuntimeError("this LineController's Ensemble has been closed: give it to another one")


def follower(controller: Controller | None) -> Controller | None:
    """The one that follows the line's sweep; without one, the controller itself."""
    return controller.then if isinstance(controller, LineController) and controller.then is not None else controller


def sensor_of(controller: Controller | None) -> Sensor | None:
    """What measures during a cycle."""
    found = follower(controller)
    return found if isinstance(found, Sensor) else None


class _Scores:
    """`hdet.core.controllers.line.Line`: each point is evaluated once on this rank, each pair of points compared once over all ranks."""

    def __init__(
        self, put: Callable[[Sequence[float]], None], evaluate: Callable[[], torch.Tensor | None], replicas: Replicas, knobs: int
    ) -> None:
        self._put, self._evaluate, self._replicas, self._knobs = put, evaluate, replicas, knobs
        self._losses: dict[tuple[float, ...], torch.Tensor | None] = {}
        self._compared: dict[tuple[tuple[float, ...], tuple[float, ...]], tuple[float, float]] = {}
        self.examples = 0.0

    def difference(self, a: float, b: float, knob: int | None = None) -> tuple[float, float]:
        pair = (self._point(a, knob), self._point(b, knob))
        if pair not in self._compared:
            mean, error = self._mean_and_error(*map(self._at, pair))
            t = mean / error if error else math.copysign(LARGEST_T, mean) if mean else 0.0
            self._compared[pair] = mean, max(-LARGEST_T, min(LARGEST_T, t))
        return self._compared[pair]

    def mean(self, rho: float) -> tuple[float, float]:
        return self._mean_and_error(self._at(self._point(rho, None)))

    def count(self) -> float:
        """Of the examples, over all ranks."""
        return self._sums(self._at(self._point(1.0, None)))[0]

    def _point(self, rho: float, knob: int | None) -> tuple[float, ...]:
        return tuple(rho if knob in (None, i) else 1.0 for i in range(self._knobs))

    def _at(self, point: tuple[float, ...]) -> torch.Tensor | None:
        if point not in self._losses:
            self._put(point)
            self._losses[point] = self._evaluate()
        return self._losses[point]

    def _mean_and_error(self, a: torch.Tensor | None, *b: torch.Tensor | None) -> tuple[float, float]:
        """Of a's losses, or of their paired differences to b's, over all ranks."""
        n, total, squares = self._sums(a, *b)
        if n < 2:
            raise ValueError(
                f"the closure gave {n:g} losses over all ranks, but the error of a difference comes from the scatter over examples: return one loss for "
                "each example, e.g. cross_entropy(..., reduction='none').mean(-1)"
            )
        self.examples, mean = n, total / n
        return mean, math.sqrt(max(squares / n - mean * mean, 0.0) / (n - 1))

    def _sums(self, a: torch.Tensor | None, *b: torch.Tensor | None) -> tuple[float, float, float]:
        """Number, sum and squares of a's losses, or of their paired differences to b's. One all_reduce of five numbers a replica.

        The ranks of one replica may see the same examples (tensor parallel) or others (context parallel); their sums are taken for
        the same, which at worst overstates the error.
        """
        row = torch.zeros(5, dtype=torch.float64, device=self._device)
        if len({0 if x is None else len(x) for x in (a, *b)}) > 1:
            row[4] = 1.0  # told to all ranks, of which none may be left waiting
        elif a is not None:
            d = a - sum(x for x in b if x is not None)
            row[:4] = torch.stack([torch.ones_like(d[0]), d.new_tensor(float(len(d))), d.sum(), (d * d).sum()])
        rows = self._replicas.sum_rows(row).tolist()
        if any(row[4] for row in rows):
            raise ValueError(
                f"the closure gave another number of losses than before, in replica {brief([r for r, row in enumerate(rows) if row[4]])}, but losses are "
                "compared example by example: draw the batch outside of it, and return the losses of this one whenever it is called"
            )
        seen = [[x / row[0] for x in row[1:4]] for row in rows if row[0] > 0]
        n, total, squares = (sum(column) for column in zip(*seen, strict=True)) if seen else (0.0, 0.0, 0.0)
        return n, total, squares

    @property
    def _device(self) -> torch.device:
        return next((x.device for x in self._losses.values() if x is not None), torch.device("cpu"))
