"""What HDET adds to a training step of the main job: observe + step, beside the step itself.

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

    steps, ours, theirs = [], [], []
    for index in range(options.repeats):
        tokens, targets = sample_batch(text, 8, config.context, seed=0, stream="bench", index=index)
        start = time.perf_counter()
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        ensemble.step(loss)
        done = time.perf_counter()
        plain.optimizer.step()
        before = time.perf_counter()
        plain.step()
        theirs.append(time.perf_counter() - before)
        steps.append(trained - start)
        ours.append(done - trained)
    step, engine, schedule = (1e6 * statistics.median(x[20:]) for x in (steps, ours, theirs))
    print(
        f"training step {step:.0f} us; observe + step {engine:.0f} us, of which the scheduler "
        f"alone {schedule:.0f} us: {100 * engine / step:.2f} % of a step"
    )
    emit(
        {
            "benchmark": "engine",
            "step_us": step,
            "ensemble_us": engine,
            "scheduler_us": schedule,
            "percent": 100 * engine / step,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
