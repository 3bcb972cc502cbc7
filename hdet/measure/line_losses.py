"""Losses of the current batch on a weight line, theta(rho) = origin + rho * (mean - origin) (method, section 4), on real tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..core.plan import Compare, Level, Question
from ..core.rules.line_rule import TOO_FEW
from ..core.rules.peak import LARGEST_T
from ..profiling import ranged
from ..replicas import Replicas
from ..replicas.layout import brief
from ..tensors.dtensor import reshard
from ..tensors.eval_mode import eval_mode
from .measurement import Closure, Measurement, Watched, settings_of
from .weight_line import WeightLine, check_room

__all__ = ["LineLosses"]

LARGEST_LOSS = 1e30
"""What a loss that is not finite is taken for."""
ADAMS = ({"exp_avg", "exp_avg_sq"}, {"state1", "state2"})
"""What the state of an optimizer like Adam has of each parameter: torch's names, and those of 8-bit ones."""


class LineLosses(Measurement):
    """Answers `Level` and `Compare`: each rank calls the closure of ``ensemble.step(loss, closure=...)`` on its current batch at points of the
    line, and the differences, paired by example, are added up over ranks.

    Args:
        model: whose losses the closure computes. It is in eval mode meanwhile; buffers, modes and random states are restored. None: the
            closure sees to that.
        place: "device" or "host": where the mean lives. Memory: one copy of the parameters, beside the snapshot.
        dtype: of the mean; None: float32, or the parameters' own if that is wider. torch.bfloat16 halves it, but then the weights need a
            copy of their own while points are scored.

    Settings in a plan: ``origin``, a snapshot's name; ``since`` and ``until``, steps of the schedule over whose second half the mean is taken,
    or none: then the line ends at the weights; ``share``: origin and mean become those over all replicas, which may have begun apart.

    The closure returns the losses of this rank's current batch without a graph, shape (examples,), or one number where there are several
    ranks, because the error comes from the scatter. None where this rank sees no loss. All calls for one batch return equally many losses.
    """

    needs_closure = True

    def __init__(self, model: nn.Module | None = None, place: str = "device", dtype: torch.dtype | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module or None, got {type(model).__name__}")
        check_room(place, dtype)
        self.model, self.place, self.dtype = model, place, dtype
        self._settings: dict[str, Any] = {}
        self._line: WeightLine | None = None
        self._looked = False
        self._seen: int | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [] if self.model is None else [self.model]

    def watch(self, watched: Watched) -> None:
        """Raises ValueError if none of the optimizer's parameters is the model's."""
        if self.model is not None and not watched.copied:
            trained = {id(p) for p in watched.sets[0]}
            if not any(id(p) in trained for p in self.model.parameters()):
                raise ValueError(
                    "the LineController's model has no parameter of this optimizer: pass the module that it trains (or refresh=..., if the optimizer "
                    "has copies of them)"
                )
        self.release()
        self._watched = watched
        rates = [knob for knob in watched.knobs if knob.key == "lr"]
        self._owners = watched.owners(rates)  # those that no knob moves are trained too
        self._knobs = len(rates)

    def on_cycle_start(self, settings: Any) -> None:
        settings = settings_of(settings, origin="", since=None, until=None, share=False)
        if self._line is None or settings["origin"] != self._settings.get("origin"):
            origin = self._watched.snapshot(settings["origin"])
            self._line = WeightLine(self._watched.sets[0], self._watched.masters[0], self.dtype, self.place, origin)
            self._seen = None
        self._settings = settings

    def release(self) -> None:
        self._line, self._seen = None, None

    restart = release

    def sample(self, position: int, length: int, schedule_step: int) -> None:
        """A sample of the mean after each hundredth of the second half of the interval, and at its end."""
        since, until = self._settings["since"], self._settings["until"]
        if self._line is None or since is None:
            return
        whole = max(1, until - since)
        stride = max(1, whole // 100)
        # A sample at until, until - stride, ...; or at the step after, where the schedule goes on by several between two of the optimizer.
        seen = since if self._seen is None else self._seen
        passed = math.ceil((until - schedule_step) / stride) < math.ceil((until - seen) / stride)
        self._seen = schedule_step
        if schedule_step > since + whole / 2 and passed:
            self._line.mean.add()

    def try_closure(self, closure: Closure) -> None:
        with torch.no_grad():
            losses = _Scores(lambda rho: None, self._evaluate(closure), self._watched.replicas, self._knobs).level(1.0)[2]
        if losses < 2:
            raise ValueError(TOO_FEW.format(losses))

    @contextmanager
    def answering(self, closure: Closure | None) -> Iterator[Callable[[Question], Any]]:
        """(mean, error, losses) of a `Level`, (mean, t) of a `Compare`."""
        assert self._line is not None and closure is not None, "on_cycle_start and a closure come first"
        replicas, whole = self._watched.replicas, self._settings["since"] is None
        self._warn_of_other_optimizers()
        if whole:
            self._line.mean.reset()
            self._line.mean.add()
            if self._settings["share"] and replicas.count > len(replicas.local):
                self._line.share(replicas)
        with self._line.scored() as put, torch.no_grad():
            # What no knob moves stays at the mean; a line that ends at the weights moves the whole model.
            scores = _Scores(
                lambda rho: put([(rho[0] if whole else 1.0) if k is None else rho[k] for k in self._owners]),
                self._evaluate(closure), replicas, self._knobs,
            )  # fmt: skip

            @ranged("hdet.line")
            def answer(question: Question) -> Any:
                if isinstance(question, Level):
                    return scores.level(question.rho)
                if isinstance(question, Compare):
                    return scores.difference(question.a, question.b, question.knob)
                raise ValueError(f"a weight line answers Level and Compare, got {question!r}")

            yield answer

    def _warn_of_other_optimizers(self) -> None:
        """Once, when there is a state to look at."""
        if self._looked:
            return
        self._looked = True
        state: Mapping[Any, Mapping[str, Any]] = self._watched.optimizer.state
        if not any(kind <= values.keys() for values in state.values() for kind in ADAMS):
            warnings.warn(
                "a LineController's sweep was found and measured with Adam's two moments, which this optimizer has not: it may find nothing, or a "
                "rate that is several times too high or too low. In runs of more than 2 000 steps try rule=LineRule(doubling_steps=16), and "
                "compare with a fixed schedule (docs/choosing.md has figures)",
                stacklevel=5,
            )

    def _evaluate(self, closure: Closure) -> Callable[[], torch.Tensor | None]:
        def evaluate() -> torch.Tensor | None:
            # The same random numbers at all points: dropout, if the closure has any, then cancels.
            with eval_mode(self.model) if self.model is not None else torch.random.fork_rng():
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


class _Scores:
    """Each point is evaluated once on this rank, each pair of points compared once over all ranks."""

    def __init__(
        self, put: Callable[[Sequence[float]], None], evaluate: Callable[[], torch.Tensor | None], replicas: Replicas, knobs: int
    ) -> None:
        self._put, self._evaluate, self._replicas, self._knobs = put, evaluate, replicas, knobs
        self._losses: dict[tuple[float, ...], torch.Tensor | None] = {}
        self._compared: dict[tuple[tuple[float, ...], tuple[float, ...]], tuple[float, float]] = {}

    def difference(self, a: float, b: float, knob: int | None = None) -> tuple[float, float]:
        pair = (self._point(a, knob), self._point(b, knob))
        if pair not in self._compared:
            mean, error = _mean_and_error(*self._sums(*map(self._at, pair)))
            t = mean / error if error else math.copysign(LARGEST_T, mean) if mean else 0.0
            self._compared[pair] = mean, max(-LARGEST_T, min(LARGEST_T, t))
        return self._compared[pair]

    def level(self, rho: float) -> tuple[float, float, float]:
        """Mean loss, its standard error (0 for fewer than two losses), and how many losses there are over all ranks."""
        n, total, squares = self._sums(self._at(self._point(rho, None)))
        return (*_mean_and_error(n, total, squares), n) if n >= 2 else (total / n if n else 0.0, 0.0, n)

    def _point(self, rho: float, knob: int | None) -> tuple[float, ...]:
        return tuple(rho if knob in (None, i) else 1.0 for i in range(self._knobs))

    def _at(self, point: tuple[float, ...]) -> torch.Tensor | None:
        if point not in self._losses:
            self._put(point)
            self._losses[point] = self._evaluate()
        return self._losses[point]

    def _sums(self, a: torch.Tensor | None, *b: torch.Tensor | None) -> tuple[float, float, float]:
        """Number, sum and squares of a's losses, or of their paired differences to b's. One all_reduce of five numbers a replica.

        The ranks of one replica may see the same examples (tensor parallel) or others (context parallel); their sums are taken for
        the same, which at worst overstates the error.
        """
        row = torch.zeros(5, dtype=torch.float64, device=self._device)
        if len({0 if x is None else len(x) for x in self._losses.values()}) > 1:
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


def _mean_and_error(n: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / n
    return mean, math.sqrt(max(squares / n - mean * mean, 0.0) / (n - 1))
