"""What newcomers try first, with the default settings: does AutoLR help a wrong rate, or harm a
good one?

    python -m benchmarks.first_tries [--tries digits-mlp ...] [--all] [--jobs 2] [--json FILE]

Each try is trained at 1/100, 1/10, 1, 10 and 100 times the rate that one would write first, at that
fixed rate and with AutoLR (a closure) from there. Printed is the gap to the best of all these runs,
in percent of what that one learns, by the best checkpoint (40 validations a run), and by the last
loss beside it. ``--all`` adds runs of 4 000 and 10 000 steps, and the free level.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import hdet

from .harness import emit

RESULTS = "benchmarks/results/first-tries.jsonl"
STARTS = (0.01, 0.1, 1.0, 10.0, 100.0)
VALIDATIONS = 40
POOR, GOOD, WORSE = 20.0, 10.0, 5.0
"""Gaps in percent: of a start that needs help, of one that was helped, and of harm."""

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Try:
    """What somebody writes to try a library."""

    net: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    """(training, validation)"""
    batch: Callable[[Data, torch.Generator], Data]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    rate: float
    steps: int


# -- data ------------------------------------------------------------------------------------------


def split(x: Tensor, y: Tensor) -> tuple[Data, Data]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out = len(x) // 5
    return (x[order[held_out:]], y[order[held_out:]]), (x[order[:held_out]], y[order[:held_out]])


@cache
def digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return split(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))


@cache
def cancer() -> tuple[Data, Data]:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    table = torch.tensor(x, dtype=torch.float32)
    return split((table - table.mean(0)) / table.std(0), torch.tensor(y))


@cache
def friedman() -> tuple[Data, Data]:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(20_000, noise=0.5, random_state=0)
    values = torch.tensor(y, dtype=torch.float32)
    return split(
        torch.tensor(x, dtype=torch.float32), ((values - values.mean()) / values.std())[:, None]
    )


@cache
def sources() -> tuple[Data, Data]:
    """Bytes of Python's standard library, in windows of 33."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])[:1_000_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = windows[: len(windows) // 33 * 33].view(-1, 33)
    (train, _), (held_out, _) = split(windows, windows)
    held_out = held_out[:256]
    return (train[:, :-1], train[:, 1:]), (held_out[:, :-1], held_out[:, 1:])


def rows(number: int) -> Callable[[Data, torch.Generator], Data]:
    def batch(data: Data, generator: torch.Generator) -> Data:
        picked = torch.randint(len(data[0]), (number,), generator=generator)
        return data[0][picked], data[1][picked]

    return batch


# -- models ----------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.view(-1, 1, 8, 8))


class GRU(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(256, width), nn.Linear(width, 256)
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.table(x))[0])


class GPT(nn.Module):
    def __init__(self, width: int = 64, context: int = 32) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.table(x) + self.places.weight[: x.shape[1]]
        return self.out(self.norm(self.body(hidden, mask=mask, is_causal=True)))


def mlp(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)
    )


def of_classes(scores: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")


def of_values(given: Tensor, y: Tensor) -> Tensor:
    return mse_loss(given, y, reduction="none").mean(1)


def adamw(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate)


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


TRIES = {
    "digits-mlp": Try(mlp(64, 10), digits, rows(64), of_classes, adamw, 1e-3, 4000),
    "digits-conv": Try(Convolutions, digits, rows(64), of_classes, adamw, 1e-3, 1000),
    "digits-conv-sgd": Try(Convolutions, digits, rows(64), of_classes, sgd, 0.1, 1000),
    "table-mlp": Try(mlp(30, 2), cancer, rows(32), of_classes, adamw, 1e-3, 1000),
    "friedman-mlp": Try(mlp(10, 1), friedman, rows(64), of_values, adamw, 1e-3, 4000),
    "gru-bytes": Try(GRU, sources, rows(16), of_classes, adamw, 1e-3, 1000),
    "gpt-bytes": Try(GPT, sources, rows(16), of_classes, adamw, 1e-3, 1000),
}
MORE = {
    f"{name}-{steps}": (name, steps)
    for name in TRIES
    for steps in (1000, 4000, 10_000)
    if TRIES[name].steps != steps
}


def trained(name: str, multiple: float, level: str) -> dict[str, Any]:
    """One run. ``level``: "fixed", "trial" or "free"."""
    torch.set_num_threads(1)
    kind, steps = MORE.get(name, (name, TRIES.get(name, next(iter(TRIES.values()))).steps))
    tried, began = TRIES[kind], time.perf_counter()
    torch.manual_seed(0)
    model = tried.net()
    train, held_out = tried.data()
    optimizer = tried.optimizer(model.parameters(), tried.rate * multiple)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    auto = None if level == "fixed" else hdet.AutoLR(model)
    ensemble = None if auto is None else hdet.Ensemble(
        optimizer, scheduler, total_steps=steps, controller=auto
    )  # fmt: skip
    generator, losses = torch.Generator().manual_seed(1), list[float]()

    def validate() -> float:
        with torch.no_grad():
            return float(tried.loss(model(held_out[0]), held_out[1]).mean())

    untrained = validate()
    for step in range(1, steps + 1):
        x, y = tried.batch(train, generator)

        def losses_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            return tried.loss(model(x), y)

        loss = losses_of().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ensemble is None:
            scheduler.step()
        else:
            ensemble.step(loss.detach(), closure=losses_of if level == "trial" else None)
        if step % (steps // VALIDATIONS) == 0:
            losses.append(validate())
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    return {
        "benchmark": "first-tries",
        "try": name,
        "start": multiple,
        "level": level,
        "untrained": untrained,
        "best": min(untrained, *finite),
        "last": min(untrained, finite[-1]) if finite else untrained,
        "rate": tried.rate * multiple,
        "now": None if auto is None or auto.interval is None else auto.interval.suggestion,
        "seconds": time.perf_counter() - began,
    }


def gaps(records: Sequence[dict[str, Any]], by: str) -> dict[tuple[str, float, str], float]:
    """By try, start and level, in percent of what the best run learns; ``by``: "best" or "last"."""
    found = {}
    for name in dict.fromkeys(record["try"] for record in records):
        these = [record for record in records if record["try"] == name]
        best, untrained = min(record[by] for record in these), these[0]["untrained"]
        for record in these:
            cell = (name, record["start"], record["level"])
            found[cell] = 100 * (record[by] - best) / (untrained - best)
    return found


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Gaps of fixed rates and of AutoLR by the best checkpoint: a line for each try, a column for
    each start."""
    by_best = gaps(records, "best")
    levels = [level for level in ("trial", "free") if any(cell[2] == level for cell in by_best)]
    starts = sorted({start for _, start, _ in by_best})
    yield "| try | " + " | ".join(f"{start:g} times" for start in starts) + " |"
    yield "|---" * (1 + len(starts)) + "|"
    for name in dict.fromkeys(name for name, _, _ in by_best):
        cells = [
            " → ".join(f"{by_best[name, start, level]:.1f} %" for level in ("fixed", *levels))
            if (name, start, "fixed") in by_best
            else ""
            for start in starts
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    for level in levels:
        pairs = [
            (by_best[n, s, "fixed"], by_best[n, s, level]) for n, s, of in by_best if of == level
        ]
        poor = [auto for fixed, auto in pairs if fixed > POOR]
        harmed = [auto - fixed for fixed, auto in pairs if auto - fixed > WORSE]
        yield (
            f"AutoLR, {level}: of {len(poor)} starts that end more than {POOR:g} % from the best, "
            f"{sum(auto <= GOOD for auto in poor)} end within {GOOD:g} %; {len(harmed)} of "
            f"{len(pairs)} end worse by more than {WORSE:g} % (at most {max([0.0, *harmed]):.1f} %)"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", nargs="+", choices=[*TRIES, *MORE])
    parser.add_argument("--all", action="store_true", help="longer runs, and the free level")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="lines are appended")
    options = parser.parse_args(arguments)
    names = options.tries or [*TRIES, *(MORE if options.all else ())]
    levels = ("fixed", "trial", "free") if options.all else ("fixed", "trial")
    grid = [(name, start, level) for name in names for start in STARTS for level in levels]
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        records = []
        for record in pool.map(trained, *zip(*grid, strict=True)):
            records.append(record)
            if options.json:
                emit(record, options.json)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
