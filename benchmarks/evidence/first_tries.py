"""What newcomers try first, with the default settings: does AutoLR help a wrong rate, or harm a
good one?

    python -m benchmarks.evidence.first_tries [--workloads digits-mlp ...] [--levels fixed ...]

Each try is trained at 1/100, 1/10, 1, 10 and 100 times the rate that one would write first, at that
fixed rate and with AutoLR (a closure) from there. Printed is the gap to the best of all these runs,
in percent of what that one learns, by the best checkpoint (40 validations a run).
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import hdet

from ..tables import gap, grouped
from ..tables import table as markdown
from .experiment import Column, Experiment, Record
from .workloads.kit import encoder, mlp

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
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    steps: int


# -- data ------------------------------------------------------------------------------------------


def split(x: Tensor, y: Tensor) -> tuple[Data, Data]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held_out = len(x) // 5
    return (x[order[held_out:]], y[order[held_out:]]), (x[order[:held_out]], y[order[:held_out]])


@cache
def digits() -> tuple[Data, Data]:
    x, y = datasets.load_digits(return_X_y=True)
    return split(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))


@cache
def cancer() -> tuple[Data, Data]:
    x, y = datasets.load_breast_cancer(return_X_y=True)
    table = torch.tensor(x, dtype=torch.float32)
    return split((table - table.mean(0)) / table.std(0), torch.tensor(y))


@cache
def friedman() -> tuple[Data, Data]:
    x, y = datasets.make_friedman1(20_000, noise=0.5, random_state=0)
    rows, values = (torch.tensor(part, dtype=torch.float32) for part in (x, y))
    return split(rows, ((values - values.mean()) / values.std())[:, None])


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
        self.body = encoder(width, 4 * width)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.table(x) + self.places.weight[: x.shape[1]]
        return self.out(self.norm(self.body(hidden, mask=mask, is_causal=True)))


def of_classes(scores: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, -2), y.flatten(), reduction="none")


def of_values(given: Tensor, y: Tensor) -> Tensor:
    return mse_loss(given, y, reduction="none").mean(1)


adamw, sgd = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)
TRIES = {
    "digits-mlp": Try(
        lambda: mlp(64, 128, 128, 10), digits, rows(64), of_classes, adamw, 1e-3, 4000
    ),
    "digits-conv": Try(Convolutions, digits, rows(64), of_classes, adamw, 1e-3, 1000),
    "digits-conv-sgd": Try(Convolutions, digits, rows(64), of_classes, sgd, 0.1, 1000),
    "table-mlp": Try(lambda: mlp(30, 128, 128, 2), cancer, rows(32), of_classes, adamw, 1e-3, 1000),
    "friedman-mlp": Try(
        lambda: mlp(10, 128, 128, 1), friedman, rows(64), of_values, adamw, 1e-3, 4000
    ),
    "gru-bytes": Try(GRU, sources, rows(16), of_classes, adamw, 1e-3, 1000),
    "gpt-bytes": Try(GPT, sources, rows(16), of_classes, adamw, 1e-3, 1000),
}


def run(workload: str, start: float, level: str, seed: int) -> Record:
    """``level``: "fixed", "trial" or "free"."""
    torch.set_num_threads(1)
    tried = TRIES[workload]
    steps, rate = tried.steps, tried.rate * start
    torch.manual_seed(0)
    model = tried.net()
    train, held_out = tried.data()
    optimizer = tried.optimizer(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    auto = ensemble = None
    if level != "fixed":
        auto = hdet.AutoLR(model)
        ensemble = hdet.Ensemble(optimizer, scheduler, total_steps=steps, search=auto)
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
        "untrained": untrained,
        "best": min(untrained, *finite),
        "last": min(untrained, finite[-1]) if finite else untrained,
        "rate": rate,
        "now": None if auto is None or auto.interval is None else auto.interval.suggestion,
    }


def table(records: Sequence[Record]) -> str:
    """Gaps of fixed rates and of AutoLR, in percent of what the best run learns, by the best
    checkpoint: a line for each try, a column for each start."""
    gaps: dict[tuple[str, float, str], float] = {}
    for name, lines in grouped(records, "workload").items():
        best, untrained = min(line["best"] for line in lines), lines[0]["untrained"]
        for line in lines:
            gaps[name, line["start"], line["level"]] = gap(line["best"], best, untrained)
    levels = [level for level in ("trial", "free") if any(cell[2] == level for cell in gaps)]
    starts = sorted({start for _, start, _ in gaps})
    rows, said = [], []
    for name in dict.fromkeys(name for name, _, _ in gaps):
        of = ([gaps.get((name, start, level)) for level in ("fixed", *levels)] for start in starts)
        shown = [[f"{one:.1f}" for one in cell if one is not None] for cell in of]
        rows.append([name, *map(" → ".join, shown)])
    for level in levels:
        pairs = [(gaps[n, s, "fixed"], one) for (n, s, of), one in gaps.items() if of == level]
        poor = [auto for fixed, auto in pairs if fixed > POOR]
        harmed = [auto - fixed for fixed, auto in pairs if auto - fixed > WORSE]
        said.append(
            f"AutoLR, {level}: of {len(poor)} starts that end more than {POOR:g} % from the best, "
            f"{sum(auto <= GOOD for auto in poor)} end within {GOOD:g} %; {len(harmed)} of "
            f"{len(pairs)} end worse by more than {WORSE:g} % (at most {max([0.0, *harmed]):.1f} %)"
        )
    heads = ["try", *(f"{start:g} times" for start in starts)]
    return markdown(heads, rows) + "\n" + "\n".join(said) + "\n"


EXPERIMENT = Experiment(
    "first-tries", __doc__, run,
    (
        Column("workload", list(TRIES), ["digits-conv-sgd"], TRIES),
        Column("start", STARTS, [0.01]),
        Column("level", ("fixed", "trial"), ["fixed", "trial"], ("fixed", "trial", "free")),
    ),
    table,
    same=("workload", "start", "level"),
)  # fmt: skip

if __name__ == "__main__":
    EXPERIMENT.main()
