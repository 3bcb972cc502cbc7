"""Where the time of a trial's step goes, beside a plain step of the same run.

    python -m benchmarks.trial [--json FILE]

The main job's model and batch, hdet.FusedAdamW, one thread. Each arm is put in the place of the
run, makes a forward and a backward pass and one optimizer step, a kernel call of its own, and is
taken out again. One call for the steps of all arms could save a part of "optimizer step".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import hdet
from examples.bytes.data import load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy
from hdet.optim.snapshot import Snapshot
from hdet.trial.arms import Arms
from hdet.trial.rule import STEPS

from .harness import emit
from .tables import table

PARTS: dict[str, tuple[Any, str]] = {
    "all": (Arms, "train"),
    "put in place": (Snapshot, "restore"),
    "forward, backward": (Arms, "_backward"),
    "optimizer step": (hdet.FusedAdamW, "step"),
    "taken out": (Snapshot, "take"),
}


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            seconds.append(time.perf_counter() - start)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="append the result to this file, as a JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in PARTS}
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(getattr(owner, method), found[name]))
    text, config = load_corpus().train, GPTConfig()
    model = GPT(config)
    optimizer = hdet.FusedAdamW(model.parameter_groups(0.1), lr=3e-4, betas=(0.9, 0.95))
    auto = hdet.AutoLR(model)
    ensemble = hdet.Ensemble(optimizer, total_steps=10_000, search=auto)
    plain: list[float] = []
    for step in range(STEPS):
        tokens, targets = sample_batch(text, 8, config.context, seed=0, stream="bench", index=step)
        losses_of = lambda x=tokens, y=targets: cross_entropy(model(x), y)
        start = time.perf_counter()
        loss = losses_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(time.perf_counter() - start)
        ensemble.step(loss, closure=losses_of)
    ms = {"plain step": 1e3 * median(plain)} | {n: 1e3 * median(x) for n, x in found.items()}
    row = {"an arm's step" if name == "all" else name: f"{x:.2f} ms" for name, x in ms.items()}
    print(table([*row], [[*row.values()]]))
    counts = {name: len(seconds) for name, seconds in found.items()}
    print(
        f"{counts['all']} steps of arms in {STEPS} steps of the run; kernel calls: "
        f"{counts['optimizer step'] - STEPS} beside the run's own"
    )
    emit({"benchmark": "trial", "ms": ms, "counts": counts}, options.json)


if __name__ == "__main__":
    main()
