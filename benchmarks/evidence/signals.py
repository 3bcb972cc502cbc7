"""Signal quality: does a controller know, at some moment of a run, whether a higher or a lower rate would end better?

    python -m benchmarks.evidence.signals [--problems cnn-digits ...] [--exponents -4 -2 0 2 4] [--seeds 5] [--jobs 2] [--quick]
                                          [--json FILE] [--hero FILE]

The truth is forks: the same run from the same seed on the same mini-batches, whose schedule is multiplied by 0.7 or by 1.4 from the moment
on, trained to the end; runs are deterministic, so a fork is the run until then, to the bit. Beside it each controller hears a run at the
unchanged schedule, in which nothing is corrected, and says which way it would go.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.core.rules.softmax import signal, softmax_weights

from . import command
from .hero import RESULTS as HERO
from .hero import best_fixed, untrained
from .problems import PROBLEMS, Problem
from .replicated import INTERVALS, probe, replicated
from .report.signal import FACTORS, MOMENTS, SEEDS, STARTS, signal_tables
from .runs import Record, Task, finite, identity
from .training import BETAS, Method, Parts, plain, scheduled, train, wsd_schedule, wsd_shape

RESULTS = "benchmarks/results/evidence/signal.jsonl"
QUICK = 80
"""steps: a cycle has four, the least of the hypergradient"""

Said = dict[str, Any]


def run(problem: str, method: str, moment: float, exponent: int, rate: float, seed: int, steps: int) -> Record:
    """One line of the results: a fork, or what a run has let controllers hear."""
    began, chosen = time.perf_counter(), replace(PROBLEMS[problem], steps=steps)
    said: list[Said] = []
    if method in LISTENERS:
        validation = listen(chosen, method, rate, seed, said)
    else:
        build = partial(fork, factor=FACTORS[method], start=round(moment * steps))
        validation = train(chosen, Method(method, build, rate, None), rate, seed).validation
    return {
        "benchmark": "signal", "problem": problem, "method": method, "moment": moment, "exponent": exponent, "rate": rate, "seed": seed,
        "steps": steps, "validation": validation, "untrained": untrained(problem, seed), "said": said, "seconds": time.perf_counter() - began,
    }  # fmt: skip


key = identity("problem", "method", "moment", "seed", "steps", "rate")


# -- the truth -------------------------------------------------------------------------------------------------------------


def fork(problem: Problem, model: nn.Module, rate: float, seed: int, *, factor: float, start: int) -> Parts:
    """The fixed schedule, times ``factor`` once ``start`` steps are done."""
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    values = [value * (factor if step >= start else 1.0) for step, value in enumerate(wsd_shape(problem.steps))]
    return scheduled(problem, model, optimizer, LambdaLR(optimizer, lambda step: values[min(step, problem.steps - 1)]))


# -- what controllers say --------------------------------------------------------------------------------------------------


class Ears(hdet.Controller):
    """Gives rules the evidence of every cycle, lets none of them act, and writes down what they say at the moments."""

    name = "ears"

    def __init__(self, rules: Sequence[Any], moments: Mapping[int, float], said: list[Said], suffix: str = "") -> None:
        super().__init__()
        self.rules, self.moments, self.said, self.suffix = rules, moments, said, suffix
        self.measures = [name for rule in rules for name in rule.measures]

    def learn(self, evidence: hdet.Evidence) -> hdet.Learned:
        for rule in self.rules:
            decision = rule.learn(evidence).decisions[0]
            if evidence.step in self.moments:
                slope = published(evidence, rule.temperature) if isinstance(rule, hdet.SoftmaxController) else decision.slope
                self.said.append(_said(rule.name + self.suffix, self.moments[evidence.step], slope, decision.error, decision.t))
        return _nothing(evidence)


def _nothing(evidence: hdet.Evidence) -> hdet.Learned:
    return hdet.Learned([hdet.Decision() for _ in evidence.knobs])


def published(evidence: hdet.Evidence, temperature: float) -> float | None:
    """Eq. 5 with the sign of a slope, in multiples of the base value. It has no error."""
    losses = [loss for loss in evidence.losses if loss is not None]
    if len(losses) < len(evidence.losses):
        return None
    return -signal(softmax_weights(losses, temperature), evidence.multipliers[0])


def _said(name: str, moment: float, slope: float | None, error: float | None, t: float | None) -> Said:
    return {"signal": name, "moment": moment, "slope": slope, "error": error, "t": t}


def hear_hypergradient(
    problem: Problem, model: nn.Module, rate: float, seed: int, moments: Mapping[int, float], said: list[Said]
) -> Parts:  # fmt: skip
    """One replica with the whole batch."""
    controller = hdet.HypergradientController(rule=Ears([hdet.HypergradientRule()], moments, said))
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    schedule = wsd_schedule(optimizer, problem.steps)
    sync = hdet.Sync(_cycle(problem.steps))
    ensemble = hdet.Ensemble(optimizer, schedule, total_steps=problem.steps, sync=sync, controller=controller, seed=seed)
    return Parts(optimizer, plain(problem, model), lambda batch: ensemble.step())


def hear_replicas(problem: Problem, model: nn.Module, rate: float, seed: int, moments: Mapping[int, float], said: list[Said]) -> Parts:
    """Four replicas: the probe at cycle averages, and what goes by training losses."""
    rules = [hdet.ProbeRule(), hdet.SlopeController(), hdet.RankController(), hdet.SoftmaxController(decay=None)]
    length = _cycle(problem.steps)
    return replicated(
        problem, model, rate, seed, lambda probed: probe(problem, model, seed, probed, length, rule=Ears(rules, moments, said))
    )


def hear_last(problem: Problem, model: nn.Module, rate: float, seed: int, moments: Mapping[int, float], said: list[Said]) -> Parts:
    """The same probe at the last weights of the cycle: sampled at its end only."""
    ears, length = Ears([hdet.ProbeRule()], moments, said, suffix=" (last weights)"), _cycle(problem.steps)
    return replicated(
        problem, model, rate, seed, lambda probed: probe(problem, model, seed, probed, length, rule=ears, average_every=length)
    )


LISTENERS: dict[str, Callable[..., Parts]] = {
    "hear-hypergradient": hear_hypergradient,
    "hear-replicas": hear_replicas,
    "hear-last": hear_last,
}


def listen(problem: Problem, name: str, rate: float, seed: int, said: list[Said]) -> float | None:
    """Train up to the last moment; returns the held-out loss there, None after a crash. What was heard until then is in ``said``."""
    moments = {round(moment * problem.steps): moment for moment in MOMENTS}
    model = problem.build(seed)
    parts = LISTENERS[name](problem, model, rate, seed, moments, said)
    with contextlib.suppress(*parts.crashes):
        for step in range(max(moments)):
            batch = problem.batch(seed, step)
            if not math.isfinite(parts.backward(batch)):
                return None
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            parts.after(batch)
        return finite(problem.validate(model))
    return None


def _cycle(steps: int) -> int:
    return max(1, steps // INTERVALS)


# -- the command -----------------------------------------------------------------------------------------------------------


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Seed by seed, so that a benchmark that is stopped has something of everything."""
    best = {problem: best_fixed(problem, options) for problem in options.problems}
    forks = [(method, moment) for moment in (MOMENTS[0], MOMENTS[-1]) if options.quick for method in FACTORS]
    forks = forks or [(method, moment) for moment in MOMENTS for method in FACTORS]
    for seed in range(options.seeds):
        for problem in options.problems:
            for e in options.exponents:
                for method, moment in [*forks, *((method, MOMENTS[-1]) for method in LISTENERS)]:
                    yield {
                        "problem": problem, "method": method, "moment": moment, "exponent": e, "rate": best[problem] * 2.0**e, "seed": seed,
                        "steps": QUICK if options.quick else PROBLEMS[problem].steps,
                    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command.parser(__doc__, RESULTS, f"one seed, {QUICK} steps on cnn-digits, two moments", seeds=SEEDS, problems=["cnn-digits"])
    parser.add_argument("--exponents", type=int, nargs="+", default=list(STARTS))
    parser.add_argument("--hero", default=HERO, metavar="FILE", help="where the best fixed rates are")
    options = command.parsed(parser, arguments, problems=["cnn-digits"], exponents=[0], seeds=1)
    print(signal_tables(command.complete(run, tasks(options), key, options)), end="")


if __name__ == "__main__":
    main()
