"""What was measured on a GPU, from the files in the repository: the tables of docs/evidence/gpu.md.

    python -m benchmarks.gpu_report [--results FOLDER] [--write]

h100.json is what `make gpu` wrote, ncu.csv has columns of ncu's (docs/profiling.md), variants.jsonl is from an earlier form of
benchmarks/variants.py, and products.jsonl from one of benchmarks/products.py. `--write` puts the tables into the page, each between two
comments that have its name.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .compiled import BYTES, GPT2, KNOWN
from .evidence.report.tables import table, written

RESULTS = "benchmarks/results/gpu"
PAGE = "docs/evidence/gpu.md"
LANES = 32
PREDICTED = {1: 51, 2: 53, 3: 70, 0: 158}
"""instructions of an element at most, by Known, as python -m benchmarks.compiled told before the run"""


def operations(records: Sequence[dict[str, Any]]) -> str:
    """Those that were timed beside torch or a peer, or a copy."""
    rows = [
        [
            r["operation"],
            r["shapes"],
            f"{r['alone_ms']:.3f}" if "alone_ms" in r else "",
            f"{r['hdet_ms']:.3f}",
            f"{r['torch_ms']:.3f}",
            f"{r['ratio']:.3f}",
            f"{r['of_copy']:.2f}" if "of_copy" in r and "cache" not in r else "",
        ]
        for r in records
        if "hdet_ms" in r
    ]
    return table(
        [
            "operation",
            "tensors",
            "kernels alone, ms",
            "hdet, ms",
            "torch or peer, ms",
            "hdet / it",
            "of a copy's bandwidth",
        ],
        rows,
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


def counters(rows: Sequence[dict[str, str]], copy: float) -> str:
    """Kernels of a step of GPT-2 124M. `copy`: bytes a second of one, beside which times were predicted."""
    cells = []
    coded = iter(("8 bits", "8 bits, bf16 split"))  # their kernel did not know its formats
    for row in rows:
        number = {
            key: float(value.replace(",", ""))
            for key, value in row.items()
            if re.fullmatch(r"[\d,.]+", value)
        }
        plain = re.search(
            r"step_kernel<(?:\w+::)*AdamWRule, 0, (?:\(\S+\))?(\d)", row["Kernel Name"]
        )
        if plain is not None:
            kind = int(plain[1])
            name, least, most = (
                ("bf16 throughout, stochastic", *KNOWN[1:])[kind],
                BYTES["adamw"][kind],
                f"{PREDICTED[kind]} → ",
            )
        elif "coded_kernel" in row["Kernel Name"]:
            name, most = next(coded), ""
            least = 16 if name == "8 bits" else 14
        else:
            continue
        moved = number["dram__bytes_read.sum"] + number["dram__bytes_write.sum"]
        cells.append(
            [
                name,
                f"{number['launch__registers_per_thread']:.0f}",
                f"{most}{LANES * number['sm__inst_executed.sum'] / GPT2:.0f}",
                f"{least} → {moved / GPT2:.1f}",
                f"{1e6 * least * GPT2 / copy:.0f} → {number['gpu__time_duration.sum'] / 1e3:.0f}",
                f"{number['dram__throughput.avg.pct_of_peak_sustained_elapsed']:.0f} %",
                f"{number['smsp__issue_active.avg.pct_of_peak_sustained_active']:.0f} %",
            ]
        )
    return table(
        [
            "AdamW",
            "registers",
            "instructions an element",
            "bytes a parameter",
            "us",
            "of the memory's peak",
            "of issue slots",
        ],
        cells,
    )


def variants(lines: Sequence[dict[str, Any]], copy: float) -> str:
    rows = [
        [x["formats"], x["variant"], f"{x['ms']:.3f}", f"{1e9 * x['gb_s'] / copy:.2f}"]
        for x in lines
    ]
    return table(["numbers", "variant", "ms", "of a copy's bandwidth"], rows)


def products(lines: Sequence[dict[str, Any]]) -> str:
    """torch's whole products, and the kernel that computes half of them in tiles of several kinds. Milliseconds."""
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
    copy = 1e9 * max(r["copy_gb_s"] for r in records if "copy_gb_s" in r)
    return {
        "Operations": operations(records),
        "Host": host(records),
        "Counters": counters(_counted(folder / "ncu.csv"), copy),
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
