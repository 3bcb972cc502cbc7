"""The README's code is run as it stands, with toy names for the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .distributed import run_ranks

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def run_the_loop(rank: int, world: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(100)]
    names = {
        "model": model,
        "ddp_model": torch.nn.parallel.DistributedDataParallel(model),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0),
        "loss_fn": lambda m, batch: torch.nn.functional.mse_loss(m(batch[0]), batch[1]),
        "probe_batches": data[:8],
        "loader": data,
    }
    exec(BLOCKS[0], names)  # noqa: S102 - running the README is the point
    scheduler = names["scheduler"]
    return {"cycle": scheduler.ensemble.cycle, "rate": scheduler.get_last_lr(), "slopes": scheduler.ensemble.history["slopes"]}  # type: ignore[attr-defined]


def test_the_four_line_change_runs_as_written() -> None:
    ranks = run_ranks(run_the_loop, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0]["cycle"] == 2 and ranks[0]["slopes"]["lr"] is not None


def run_the_engine(rank: int, world: int) -> bool:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    names = {
        "hdet": __import__("hdet"),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "loss": torch.tensor(1.0),
        "tokens": 64,
    }
    exec(BLOCKS[1].replace("controller=...", "controller=None"), names)  # noqa: S102
    return bool(names["ensemble"].in_sync)  # type: ignore[attr-defined]


def test_the_engines_calls_exist_as_written() -> None:
    assert run_ranks(run_the_engine, 2) == [True, True]


def test_the_loop_of_the_line_runs_as_written() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    names = {
        "hdet": __import__("hdet"),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0),
        "losses_of": lambda m, batch: (m(batch[0]) - batch[1]).square().flatten(),
        "loader": [(x := torch.randn(8, 4), x.sum(1, keepdim=True)) for _ in range(400)],
    }
    exec(BLOCKS[2], names)  # noqa: S102
    ensemble = names["scheduler"].ensemble  # type: ignore[attr-defined]
    assert ensemble.cycle == 25 and ensemble.engine.position == 0  # those of the sweep are of 8 steps
    assert not ensemble.sweeping
    assert ensemble.corrections["lr"] > 1  # 3e-4 is far too low for this


def test_the_loop_with_coresident_replicas_runs_as_written() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(8)]
    names = {
        "model": torch.nn.Linear(4, 1),
        "loss_fn": lambda m, batch: torch.nn.functional.mse_loss(m(batch[0]), batch[1]),
        "probe_batches": data,
        "loader": [data[:4]] * 500,
    }
    exec(BLOCKS[3], names)  # noqa: S102
    ensemble = names["ensemble"]
    assert ensemble.cycle == 10 and ensemble.in_sync  # type: ignore[attr-defined]
    assert ensemble.history["slopes"]["lr"] is not None  # type: ignore[attr-defined]
