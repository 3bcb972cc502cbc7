"""What hdet adds to a training step of the main job: observe + step, beside the step itself and
beside a plain scheduler's step, which a loop without hdet makes in the same place.

    python -m benchmarks.engine [--repeats 300] [--json FILE]

One process with the main job's model and batch; the Ensemble believes in 4 replicas but no
collective is made, so what is timed is the per-step host work (the goal is below 1 %). The end of a
cycle is not in it: see benchmarks.converge and the table of `hdet report`, which has it as a share
of the run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import hdet
from examples.bytes.data import load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy

from .harness import emit


class FourReplicas(hdet.Replicas):
    def __init__(self) -> None:
        super().__init__(0, 4, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", help="append the result to this file, as a JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = load_corpus().train
    config = GPTConfig()
    model = GPT(config)
    optimizer = hdet.FusedAdamW(model.parameter_groups(0.1), lr=3e-4, betas=(0.9, 0.95))
    total = 10 * options.repeats
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total, cycle_momentum=False)
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler,
        knobs=[hdet.LearningRate(0.3)],
        replicas=FourReplicas(),
        sync=hdet.Sync(total),
    )
    plain = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD(model.parameters(), lr=0.1), 3e-4, total, cycle_momentum=False
    )  # what a loop without HDET calls in the same place

    # In turn: a training step has used the caches for something else, and what comes next pays.
    steps: list[float] = []
    calls: list[list[float]] = [[], []]
    for index in range(options.repeats):
        tokens, targets = sample_batch(text, 8, config.context, seed=0, stream="bench", index=index)
        plain.optimizer.step()
        start = time.perf_counter()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        if index % 2:
            ensemble.step(loss)
        else:
            plain.step()
        calls[index % 2].append(time.perf_counter() - trained)
        steps.append(trained - start)
        if index % 2:
            plain.step()
        else:
            ensemble.step(loss)
    schedule, engine, step = (1e6 * statistics.median(x[10:]) for x in (*calls, steps))
    own = engine - schedule
    print(
        f"training step {step:.0f} us; observe + step {engine:.0f} us, {100 * engine / step:.2f} % "
        f"of a step; a plain scheduler's step {schedule:.0f} us, so hdet's own part is "
        f"{100 * own / step:.2f} %"
    )
    emit(
        {
            "benchmark": "engine",
            "step_us": step,
            "ensemble_us": engine,
            "scheduler_us": schedule,
            "percent": 100 * engine / step,
            "own_percent": 100 * own / step,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
