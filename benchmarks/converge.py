"""The converge beside its floor: one flat all_reduce of the same bytes, which no average of K replicas can beat.

    python benchmarks/converge.py [--processes 4] [--repeats 15] [--json FILE]

Candidates, on 24 tensors of 2^20 and on 3 000 of 1 000 fp32 elements: ours (BucketedAverage), torch's
PeriodicModelAverager, and one all_reduce per parameter as simple averaging code does it.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from harness import alternate, emit, spawn, summary
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from hdet import Replicas
from hdet.converge import BucketedAverage

CASES = {"24 x 2^20": [1 << 20] * 24, "3000 x 1000": [1000] * 3000}


def measure(rank: int, world_size: int, sizes: list[int], repeats: int) -> dict[str, dict[str, float]]:
    def parameters() -> list[torch.nn.Parameter]:
        # A set for each candidate: torch's averager moves the parameters it is given to new memory in every call.
        return [torch.nn.Parameter(torch.randn(size)) for size in sizes]

    flat = torch.randn(sum(sizes))
    ours = BucketedAverage(parameters(), Replicas.from_group())
    torchs, torchs_own, loops_own = PeriodicModelAverager(period=1, warmup_steps=0), parameters(), parameters()
    for parameter in torchs_own:
        parameter.grad = torch.zeros_like(parameter)  # it takes only parameters that have one

    def loop() -> None:
        for parameter in loops_own:
            dist.all_reduce(parameter.data)
            parameter.data.div_(world_size)

    candidates = {
        "flat all_reduce (floor)": lambda: dist.all_reduce(flat),
        "ours": ours,
        "torch PeriodicModelAverager": lambda: torchs.average_parameters(iter(torchs_own)),
    }
    result = summary(alternate(candidates, repeats, barrier=True), "flat all_reduce (floor)")
    # The loop is slow enough to disturb the others, and a few rounds of it suffice.
    few = alternate(
        {"floor": candidates["flat all_reduce (floor)"], "one all_reduce per parameter": loop}, max(3, repeats // 5), barrier=True, warmup=1
    )
    result["one all_reduce per parameter"] = summary(few, "floor")["one all_reduce per parameter"]
    result["ours"]["extra_mib"] = ours.extra_bytes / 2**20
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    options = parser.parse_args()
    for case, sizes in CASES.items():
        rows = spawn(measure, options.processes, sizes, options.repeats)
        print(f"\n{case} fp32, {options.processes} processes, {4 * sum(sizes) / 1e6:.0f} MB each")
        for name, row in rows.items():
            print(f"  {name:30} {row['median_ms']:9.1f} ms (best {row['best_ms']:8.1f})   {row['ratio']:8.2f} x floor")
        emit({"benchmark": "converge", "case": case, "processes": options.processes, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
