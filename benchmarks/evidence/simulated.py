"""AutoLR in runs that are too long to be trained here, by simulation: the real engine and rule, on losses that follow a law. Seconds, no training.

    python -m benchmarks.evidence.simulated [--totals 100000 300000 1000000] [--seeds 20]

The law. Of a run of S steps, the best peak is 1. Of k steps from the first weights it is (S / k)^a: short runs prefer higher rates, as they do on most
workloads (`fixed_rates`: a is 0 to 0.6). An annealed run at d octaves from its best has learned ``1 - CURVED d^2`` of what it could have, which
is 1 - (1 + k / 30)^-0.35 of all there is; 6 octaves above its best it breaks. Half of what a check's arm ends with is the run's, until then at its own
rate. What the check prefers is `lean` octaves from the best of the whole run (`survey`: -1 to 1). Batches differ, by 3 % of a loss alike for all arms, and by
0.3 % for each by itself.

A table for each length: rows are laws, columns octaves from the best peak at which runs start, and cells where they end, as the median of the seeds and,
where it is another one, the worst.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from statistics import median

from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.core.evidence import Run
from hdet.core.rules.trial.protocol import BROKEN, TRIALS, Told, last
from hdet.core.rules.trial.rule import TrialRule

from .runs import spaced

STARTS = (-6, -4, -2, -1, 0, 1, 2, 4, 6)
EXPONENTS, LEANS = (0.15, 0.3, 0.45, 0.6), (-1.0, 0.0, 1.0)
FIRST, CURVED, BREAKS, ALIKE, OWN = 4.0, 0.01, 6.0, 0.03, 0.003
INTERVAL = 1000


def learned(steps: int, octaves: Sequence[float]) -> float:
    """Of all there is; ``octaves``: from the best of so many steps, of each part of the run."""
    part = sum(1 - CURVED * one**2 for one in octaves) / len(octaves)
    return max(0.0, part) * (1 - (1 + steps / 30) ** -0.35)


def ends(total: int, start: float, exponent: float, lean: float, seed: int) -> float:
    """Octaves from the best peak at which a run ends that starts so."""
    chance, rule = random.Random(f"{total} {start} {exponent} {lean} {seed}"), TrialRule()
    engine = Engine([KnobSpec("lr", 0.0)], 1, Clock(INTERVAL, 0, total), rule)
    rule.start(Run(engine.clock, engine.knobs, 1, [0.0], falls_to=[0.0]))
    while not rule.finished and engine.step < total:
        began = engine.step
        while not engine.tick():
            pass
        now, rows = start + math.log2(engine.corrections[0]), {}
        if TRIALS in engine.plan.measure:
            settings = engine.plan.measure[TRIALS]
            steps, arms = settings["steps"], []
            for number, multiple in enumerate(settings["multiples"]):
                scan = settings["origins"] is not None and settings["origins"][number] != ""
                of_run = exponent * math.log2(total / steps)
                octaves = now + math.log2(multiple) - of_run if scan else now + math.log2(multiple) - lean
                count, parts = (steps, [octaves]) if scan else (began + steps, [octaves, now - lean])
                arms.append(BROKEN if octaves > BREAKS else FIRST * (1 - learned(count, parts)))
            batches = max(settings["scores"], last(steps))
            alike = [chance.gauss(0, ALIKE) for _ in range(batches)]
            noisy = [[loss * (1 + one) * (1 + chance.gauss(0, OWN)) for one in alike] for loss in arms]
            scores, trained = ([row[:count] for row in noisy] for count in (settings["scores"], last(steps)))
            rows = {TRIALS: [Told(0.0, scores, trained, 1.0, 0.0, FIRST).row()]}
        engine.close([FIRST], rows, scheduled=[1.0], peak=[1.0])
    return start + math.log2(engine.corrections[0])


def table(total: int, seeds: int) -> str:
    lines = [f"| a | check leans by | {' | '.join(f'2^{start}' for start in STARTS)} |", "|---" * (2 + len(STARTS)) + "|"]
    for exponent in EXPONENTS:
        for lean in LEANS:
            cells = []
            for start in STARTS:
                found = [ends(total, start, exponent, lean, seed) for seed in range(seeds)]
                usual, worst = median(found), max(found, key=abs)
                cells.append(f"{usual:+.0f}" + (f" ({worst:+.0f})" if abs(worst) > abs(usual) else ""))
            lines.append(f"| {exponent} | {lean:+.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--totals", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args(arguments)
    for total in options.totals:
        print(f"{spaced(total)} steps\n\n{table(total, options.seeds)}")


if __name__ == "__main__":
    main()
