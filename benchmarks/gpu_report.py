"""What was measured on a GPU, from the files in the repository: the tables of docs/evidence/gpu.md.

    python -m benchmarks.gpu_report [--results FOLDER] [--write]

one_gpu.jsonl and triton.jsonl are of November 27, by benchmarks/one_gpu.py; ncu.csv has columns of
ncu's (docs/profiling.md) from the same run. h100.json is what `make gpu` wrote before that,
variants.jsonl is from both runs, and products.jsonl from benchmarks/products.py. `--write` puts the
tables into the page, each between two comments that have its name.
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
from .tables import table, written

RESULTS = "benchmarks/results/gpu"
PAGE = "docs/evidence/gpu.md"


def operations(records: Sequence[dict[str, Any]]) -> str:
    """Those of GPT-2 124M that were timed beside torch or a copy; of single steps see `formats`."""
    rows = [
        [
            r["operation"],
            f"{r['alone_ms']:.3f}" if "alone_ms" in r else "",
            f"{r['hdet_ms']:.3f}",
            f"{r['torch_ms']:.3f}",
            f"{r['ratio']:.3f}",
            f"{r['of_copy']:.2f}" if "of_copy" in r and "cache" not in r else "",
        ]
        for r in records
        if "hdet_ms" in r
        and ("GPT-2" in r["shapes"] or "muon" in r["operation"])
        and not re.search("^adamw|rank one|displacement", r["operation"])
    ]
    return table(
        [
            "operation",
            "kernels alone, ms",
            "hdet, ms",
            "torch or peer, ms",
            "hdet / it",
            "of a copy's bandwidth",
        ],
        rows,
    )


def formats(lines: Sequence[dict[str, Any]]) -> str:
    """A step of AdamW on GPT-2 124M, by number format and backend."""
    these = [x for x in lines if x["section"] == "formats"]
    peer = next(x for x in these if x["name"].startswith("torch"))
    rows = [[f"`{peer['name']}`", f"{peer['ms']:.2f}", "", "", ""]]
    for name in dict.fromkeys(x["name"] for x in these if "backend" in x):
        cells = {x["backend"]: x for x in these if x["name"] == name}
        rows.append([name])
        for backend in ("cuda", "triton"):
            rows[-1] += [f"{cells[backend]['ms']:.2f}", f"{cells[backend]['of_copy']:.2f}"]
    heads = ["numbers", "CUDA, ms", "of a copy's bandwidth", "Triton, ms", "of a copy's bandwidth"]
    return table(heads, rows)


def newton_schulz(lines: Sequence[dict[str, Any]]) -> str:
    """Milliseconds and errors of directions, by way."""
    these = [x for x in lines if x["section"] == "newton-schulz"]
    sizes = list(dict.fromkeys(tuple(x["size"]) for x in these))
    rows = []
    for way in dict.fromkeys(x["way"] for x in these):
        of = {tuple(x["size"]): x for x in these if x["way"] == way}
        rows.append([way])
        for size in sizes:
            error = of[size]["error"]
            rows[-1].append(f"{of[size]['ms']:.2f}" + ("" if error is None else f" ({error:.4f})"))
    return table(["way", *(f"{b} of {m} x {n}" for b, m, n in sizes)], rows)


def triton_ways(lines: Sequence[dict[str, Any]]) -> str:
    """The same kernels with and without hints, and with chunks of several lengths."""
    names = list(dict.fromkeys(x["name"] for x in lines))
    cells = {(x["way"], x["name"]): x for x in lines}
    return table(
        ["Triton, ms", *names],
        [
            [way, *(f"{cells[way, name]['ms']:.3f}" for name in names)]
            for way in dict.fromkeys(x["way"] for x in lines)
        ],
    )


def host(records: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            r["gradients"],
            f"{r['host_us']:.0f}",
            f"{r['calls_us']:.0f}",
            f"{r['torch_us']:.0f}",
            f"{r['ratio']:.2f}",
        ]
        for r in records
        if "calls_us" in r
    ]
    return table(
        ["gradients", "hdet, us", "of which torch's own part, us", "torch, us", "hdet / torch"],
        rows,
    )


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


def variants(lines: Sequence[dict[str, Any]], copy: float) -> str:
    rows = [
        [x["formats"], x["variant"], f"{x['ms']:.3f}", f"{1e9 * x['gb_s'] / copy:.2f}"]
        for x in lines
    ]
    return table(["numbers", "variant", "ms", "of a copy's bandwidth"], rows)


def products(lines: Sequence[dict[str, Any]]) -> str:
    """torch's whole products, and the kernel that computes half of them in tiles of several kinds.

    Milliseconds.
    """
    keys = ("way", "tile", "depth", "warps", "stages")
    return table(
        [*keys, *lines[0]["ms"]],
        [
            [*(str(x.get(key, "")) for key in keys), *(f"{ms:.3f}" for ms in x["ms"].values())]
            for x in lines
        ],
    )


def report(folder: Path) -> dict[str, str]:
    """Tables by name."""
    kept = json.loads((folder / "h100.json").read_text(encoding="utf-8"))
    records = kept["records"]
    latest = _lines(folder / "one_gpu.jsonl")
    copy = 1e9 * max(r["copy_gb_s"] for r in records if "copy_gb_s" in r)
    return {
        "Formats": formats(latest),
        "Orthogonalise": newton_schulz(latest),
        "Triton": triton_ways(_lines(folder / "triton.jsonl")),
        "Operations": operations(records),
        "Host": host(records),
        "Counters": counters(_counted(folder / "ncu.csv")),
        "Variants": variants(_lines(folder / "variants.jsonl"), copy),
        "Products": products(_lines(folder / "products.jsonl")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", default=RESULTS, metavar="FOLDER", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    tables = report(options.results)
    if options.write:
        page = Path(PAGE)
        page.write_text(written(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
    print("\n".join(f"## {name}\n\n{made}" for name, made in tables.items()), end="")


if __name__ == "__main__":
    main()
