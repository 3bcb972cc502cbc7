"""What was measured on a GPU, from the files in the repository: the tables of docs/evidence/gpu.md.

    python -m benchmarks.gpu_report [--results FOLDER] [--device NAME] [--write]

figures.jsonl has the lines of benchmarks.kernels and benchmarks.muon, to which `make gpu` appends;
of two lines of the same figure the last is shown. ncu.csv has columns of ncu's (docs/profiling.md).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compiled import KNOWN
from .harness import parser_of
from .kernels import FORMATS, GPT2, HOST, PREDICTED, key_of
from .tables import crossed, read, show, table

RESULTS = "benchmarks/results/gpu"
PAGE = "docs/evidence/gpu.md"
DEVICE = "NVIDIA H100 80GB HBM3"
Lines = Sequence[dict[str, Any]]


def last(lines: Lines) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By operation, shapes and backend."""
    return {key_of(x): x for x in lines if "operation" in x}


def operations(lines: Lines) -> str:
    """Those of GPT-2 124M that were timed beside torch; of single steps see `formats`."""
    rows = []
    for (operation, shapes, _), x in last(lines).items():
        is_whole = operation.startswith("muon") or shapes == GPT2
        if "torch_ms" in x and is_whole and not operation.startswith("adamw"):
            alone = f"{x['alone_ms']:.3f}" if "alone_ms" in x else ""
            copied = f"{x['of_copy']:.2f}" if x.get("of_copy") and "cache" not in x else ""
            times = (f"{x[name]:.3f}" for name in ("hdet_ms", "torch_ms", "ratio"))
            rows.append([operation, alone, *times, copied])
    heads = ["operation", "kernels alone, ms", "hdet, ms", "torch or peer, ms", "hdet / it",
             "of a copy's bandwidth"]  # fmt: skip
    return table(heads, rows)


def formats(lines: Lines) -> str:
    """A step of AdamW on GPT-2 124M, by number format and backend; in brackets what is predicted of
    kernels that have changed since."""
    found = last(lines)
    peer = found["adamw, float32", GPT2, "cuda"]["torch_ms"]
    rows: list[list[str]] = [["`torch.optim.AdamW(fused=True)`", f"{peer:.2f}", "", "", ""]]
    for name in FORMATS:
        rows.append([name])
        for backend in ("cuda", "triton"):
            operation = f"adamw, {name}"
            x, now = found[operation, GPT2, backend], PREDICTED.get((operation, backend))
            predicted = f" ({now:.2f})" if now else ""
            rows[-1] += [f"{x['alone_ms']:.2f}{predicted}", f"{x['of_copy']:.2f}"]
    heads = ["numbers", "CUDA, ms", "of a copy's bandwidth", "Triton, ms", "of a copy's bandwidth"]
    return table(heads, rows)


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
        us = (f"{x[name]:.0f}" for name in ("host_us", "torch_us"))
        rows.append([meaning, *us, f"{x['ratio']:.2f}"])
    return table(["gradients", "hdet, us", "torch, us", "hdet / torch"], rows)


def _counted(path: Path) -> list[dict[str, str]]:
    """ncu's rows, without what it says before them, and without that of units."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next(i for i, line in enumerate(lines) if "Kernel Name" in line)
    return list(csv.DictReader(lines[head:]))[1:]


KERNEL = re.compile(r"(step|coded)_kernel<(?:\w+::)*Adam[Ww]Rule, 0, (?:\(\S+\))?(\d)")


def counters(rows: Sequence[dict[str, str]]) -> str:
    """The update kernels of one step of GPT-2 124M in each format."""
    cells = []
    for row in rows:
        found = KERNEL.search(row["Kernel Name"])
        if found is None:
            continue
        name = KNOWN[int(found[2])]
        if found[1] == "coded":
            name = "8 bits" if found[2] == "1" else "8 bits, bf16 split"
        time = float(row["gpu__time_duration.sum"].replace(",", "")) / 1e3
        parts = ("dram__throughput.avg.pct_of_peak_sustained_elapsed",
                 "smsp__issue_active.avg.pct_of_peak_sustained_active")  # fmt: skip
        used = (f"{float(row[part]):.0f} %" for part in parts)
        cells.append([name, row["launch__registers_per_thread"], f"{time:.0f}", *used])
    return table(["AdamW", "registers", "us", "of the memory's peak", "of issue slots"], cells)


def report(folder: Path, device: str = DEVICE) -> dict[str, str]:
    """Tables by name."""
    lines = [x for x in read(folder / "figures.jsonl") if x["device"] == device]
    return {
        "Formats": formats(lines),
        "Orthogonalise": newton_schulz(lines),
        "Operations": operations(lines),
        "Host": host(lines),
        "Counters": counters(_counted(folder / "ncu.csv")),
    }


if __name__ == "__main__":
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--results", default=RESULTS, metavar="FOLDER", type=Path)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE}")
    options = parser.parse_args()
    show(report(options.results, options.device), [PAGE] if options.write else [])
