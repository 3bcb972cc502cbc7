"""What was measured on a GPU, from the files in the repository: the tables of docs/evidence/gpu.md.

    python -m benchmarks.gpu_report [--results FOLDER] [--device NAME] [--write]

figures.jsonl has the lines of benchmarks.kernels and benchmarks.muon, to which `make gpu` appends;
of two lines of the same figure the last is shown. ncu.csv has columns of ncu's (docs/profiling.md).
`--write` puts the tables into the page, each between two comments that have its name.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compiled import KNOWN
from .kernels import FORMATS, GPT2, HOST, PREDICTED
from .tables import crossed, table, written

RESULTS = "benchmarks/results/gpu"
PAGE = "docs/evidence/gpu.md"
Lines = Sequence[dict[str, Any]]


def last(lines: Lines) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By operation, shapes and backend."""
    return {(x["operation"], x["shapes"], x["backend"]): x for x in lines if "operation" in x}


def operations(lines: Lines) -> str:
    """Those of GPT-2 124M that were timed beside torch; of single steps see `formats`."""
    rows = [
        [
            operation,
            f"{x['alone_ms']:.3f}" if "alone_ms" in x else "",
            *(f"{x[name]:.3f}" for name in ("hdet_ms", "torch_ms", "ratio")),
            f"{x['of_copy']:.2f}" if x.get("of_copy") and "cache" not in x else "",
        ]
        for (operation, shapes, _), x in last(lines).items()
        if "torch_ms" in x
        and (operation.startswith("muon") or shapes == GPT2)
        and not operation.startswith("adamw")
    ]
    heads = ["operation", "kernels alone, ms", "hdet, ms", "torch or peer, ms", "hdet / it",
             "of a copy's bandwidth"]  # fmt: skip
    return table(heads, rows)


def formats(lines: Lines) -> str:
    """A step of AdamW on GPT-2 124M, by number format and backend."""
    found = last(lines)
    peer = found["adamw, float32", GPT2, "cuda"]["torch_ms"]
    rows: list[list[str]] = [["`torch.optim.AdamW(fused=True)`", f"{peer:.2f}", "", "", ""]]
    for name in FORMATS:
        rows.append([name])
        for backend in ("cuda", "triton"):
            x = found[f"adamw, {name}", GPT2, backend]
            rows[-1] += [f"{x['alone_ms']:.2f}", f"{x['of_copy']:.2f}"]
    heads = ["numbers", "CUDA, ms", "of a copy's bandwidth", "Triton, ms", "of a copy's bandwidth"]
    return table(heads, rows)


def predictions(lines: Lines) -> str:
    """Of what has changed since it was measured."""
    found = last(lines)
    rows = [
        [of, backend, f"{found[of, GPT2, backend]['alone_ms']:.2f}", f"{ms:.2f}"]
        for (of, backend), ms in PREDICTED.items()
    ]
    return table(["step", "backend", "measured last, ms", "predicted, ms"], rows)


def newton_schulz(lines: Lines) -> str:
    """Milliseconds and errors of directions, by way."""

    def cell(way: str, shapes: str) -> str:
        x = found[way, shapes]
        return f"{x['alone_ms']:.2f}" + ("" if x["error"] is None else f" ({x['error']:.4f})")

    found = {cell[:2]: x for cell, x in last(lines).items() if cell[0].startswith("newton-schulz")}
    ways = {way.split(", ", 1)[1]: way for way, _ in found}
    return crossed("way", ways, {shapes: shapes for _, shapes in found}, cell)


def host(lines: Lines) -> str:
    found, rows = last(lines), []
    for case, meaning in HOST.items():
        x = found[f"host time of a step, {case}", "300 x 1", "cuda"]
        us = (f"{x[name]:.0f}" for name in ("host_us", "calls_us", "torch_us"))
        rows.append([meaning, *us, f"{x['ratio']:.2f}"])
    heads = ["gradients", "hdet, us", "of which torch's own part, us", "torch, us", "hdet / torch"]
    return table(heads, rows)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _counted(path: Path) -> list[dict[str, str]]:
    """ncu's rows, without what it says before them, and without that of units."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if "Kernel Name" in line)
    return list(csv.DictReader(lines[head:]))[1:]


def counters(rows: Sequence[dict[str, str]]) -> str:
    """The update kernels of one step of GPT-2 124M in each format."""
    cells = []
    for row in rows:
        found = re.search(
            r"(step|coded)_kernel<(?:\w+::)*Adam[Ww]Rule, 0, (?:\(\S+\))?(\d)", row["Kernel Name"]
        )
        if found is None:
            continue
        name = KNOWN[int(found[2])]
        if found[1] == "coded":
            name = "8 bits" if found[2] == "1" else "8 bits, bf16 split"
        time = float(row["gpu__time_duration.sum"].replace(",", "")) / 1e3
        cells.append(
            [
                name, row["launch__registers_per_thread"], f"{time:.0f}",
                f"{float(row['dram__throughput.avg.pct_of_peak_sustained_elapsed']):.0f} %",
                f"{float(row['smsp__issue_active.avg.pct_of_peak_sustained_active']):.0f} %",
            ]
        )  # fmt: skip
    return table(["AdamW", "registers", "us", "of the memory's peak", "of issue slots"], cells)


def report(folder: Path, device: str = "NVIDIA H100 80GB HBM3") -> dict[str, str]:
    """Tables by name."""
    lines = [x for x in _lines(folder / "figures.jsonl") if x["device"] == device]
    return {
        "Formats": formats(lines),
        "Predictions": predictions(lines),
        "Orthogonalise": newton_schulz(lines),
        "Operations": operations(lines),
        "Host": host(lines),
        "Counters": counters(_counted(folder / "ncu.csv")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", default=RESULTS, metavar="FOLDER", type=Path)
    parser.add_argument("--device", default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    tables = report(options.results, options.device)
    if options.write:
        page = Path(PAGE)
        page.write_text(written(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print("\n".join(f"## {name}\n\n{made}" for name, made in tables.items()), end="")


if __name__ == "__main__":
    main()
