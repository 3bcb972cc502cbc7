"""The quality that matters: does a run from a wrong learning rate end as if it had been right?

    python -m benchmarks.quality [--seeds 0 1 2] [--grid 3e-3 1e-2 3e-2] [--starts 3e-4 1e-2 3e-2 1e-1]
                                 [--controllers probe] [--set steps=2000 width=64 ...] [--json FILE] [--table FILE ...]

Every start is trained with the fixed schedule and with each controller: same steps, batches and seeds, four gloo processes.
``--grid`` adds fixed runs that look for the best rate. Results are JSON lines, one per run; runs already in ``--json`` with
the same settings are not repeated, so an interrupted benchmark goes on. At the end, and with ``--table`` from files alone:

    recovered = (fixed(start) - hdet(start)) / (fixed(start) - best fixed on the grid)       goal: >= 85 % from 3e-4
    loss at the best rate = hdet(best) - fixed(best)                                         goal: <= 0.03 nats per byte
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hdet.cli.job.config import TrainConfig
from hdet.cli.job.processes import Workers
from hdet.cli.job.training import RunSpec

from .harness import emit

IRRELEVANT = {"log_interval", "validation_interval", "checkpoint_interval", "device", "data"}
"""settings that do not change the result"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--grid", type=float, nargs="*", default=[3e-3, 1e-2, 3e-2])
    parser.add_argument("--starts", type=float, nargs="*", default=[3e-4, 1e-2, 3e-2, 1e-1])
    parser.add_argument("--controllers", nargs="*", default=["probe"])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of hdet.cli.job.config.TrainConfig")
    parser.add_argument("--json", default="benchmarks/results/quality.jsonl")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="only print the table of these result files")
    options = parser.parse_args()
    if options.table:
        return print_table([json.loads(line) for name in options.table for line in Path(name).read_text().splitlines()])
    extra = {name: _value(value) for name, value in (item.split("=", 1) for item in options.set)}
    wanted = [
        TrainConfig(mode="fixed", max_lr=lr, seed=seed, **extra) for seed in options.seeds for lr in dict.fromkeys([*options.starts, *options.grid])
    ] + [
        TrainConfig(controller=controller, max_lr=lr, seed=seed, **extra)
        for seed in options.seeds for controller in options.controllers for lr in options.starts
    ]  # fmt: skip
    path = Path(options.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = [_key(record["config"]) for record in done]
    for config in wanted:
        if _key(config.to_dict()) not in keys:
            done.append(run(config, options.json))
    print_table([record for record in done if _key(record["config"]) in [_key(config.to_dict()) for config in wanted]])


def run(config: TrainConfig, path: str) -> dict[str, Any]:
    """Train once; returns (and appends to ``path``) the final record with the settings and where the rate went."""
    with tempfile.TemporaryDirectory() as folder, Workers([RunSpec(config, Path(folder))], "cpu") as workers:
        events = list(workers.events())
    end = next(event for event in events if event["event"] == "end")
    corrections = [next(iter(event["corrections"].values())) for event in events if event["event"] == "cycle"]
    record = {
        "benchmark": "quality", "config": config.to_dict(), "validation": end["validation"], "seconds": end["seconds"],
        "probe_percent": end["probe_percent"], "converge_percent": end["converge_percent"],
        "corrections": [round(c, 4) for c in corrections],
    }  # fmt: skip
    emit(record, path)
    return record


def _key(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    config = TrainConfig.from_dict(config).to_dict()  # a setting that an older record lacks had its default
    # A fixed run has no controller: settings of the exploration do not distinguish it.
    ignored = IRRELEVANT | ({"controller", "spread", "probe_batches", "average_every"} if config["mode"] == "fixed" else set())
    return tuple(sorted((name, value) for name, value in config.items() if name not in ignored))


def _value(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def print_table(records: list[dict[str, Any]]) -> None:
    """A markdown table of means over seeds, with the range where there are several."""
    losses: dict[tuple[str, float], dict[int, float]] = {}
    ends: dict[tuple[str, float], list[float]] = {}
    for record in records:
        config = record["config"]
        column = "fixed" if config["mode"] == "fixed" else config["controller"]
        losses.setdefault((column, config["max_lr"]), {})[config["seed"]] = record["validation"]
        if record["corrections"]:
            ends.setdefault((column, config["max_lr"]), []).append(config["max_lr"] * record["corrections"][-1])
    mean = {key: statistics.mean(values.values()) for key, values in losses.items()}
    best = min((lr for column, lr in mean if column == "fixed"), key=lambda lr: mean["fixed", lr])
    controllers = sorted({column for column, _ in losses} - {"fixed"})
    print(f"\nbest fixed rate of the grid: {best:g} at {mean['fixed', best]:.3f}; seeds {sorted(losses['fixed', best])}\n")
    heads = [f"{c} | {c} - fixed | gap recovered | peak rate at the end" for c in controllers]
    print("| start max_lr | fixed OneCycle | " + " | ".join(heads) + " |")
    print("|" + "---|" * (2 + 4 * len(controllers)))
    for lr in sorted({lr for _, lr in losses}):
        cells = [f"{lr:g}" + (" (best)" if lr == best else ""), _range(losses.get(("fixed", lr), {}))]
        for controller in controllers:
            values = losses.get((controller, lr))
            if not values:
                cells += ["", "", "", ""]
                continue
            gap = mean["fixed", lr] - mean["fixed", best]
            gained = mean["fixed", lr] - mean[controller, lr]
            cells += [_range(values), f"{-gained:+.3f}", f"{100 * gained / gap:.0f} %" if gap > 0.02 else "-"]
            cells.append(f"{min(ends[controller, lr]):.2g} ... {max(ends[controller, lr]):.2g}")
        print("| " + " | ".join(cells) + " |")


def _range(values: dict[int, float]) -> str:
    if not values:
        return ""
    text = f"{statistics.mean(values.values()):.3f}"
    return text if len(values) == 1 else f"{text} ({min(values.values()):.3f} ... {max(values.values()):.3f})"


if __name__ == "__main__":
    main()
