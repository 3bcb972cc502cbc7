"""The converge beside its floor: one flat all_reduce of the same bytes, which no average of K
replicas can beat.

    python -m benchmarks.converge [--processes 4] [--repeats 15] [--json FILE]
    python -m benchmarks.converge --way all [--processes 4] [--repeats 15] [--json FILE]

Candidates, on 24 tensors of 2^20 and on 3 000 of 1 000 fp32 elements: ours (Buckets), torch's
PeriodicModelAverager, and one all_reduce per parameter as simple averaging code does it. Then 48
bf16 tensors of 2^20, which travel as fp32: without masters, packed into two buckets in turn, and
into one after the other as before; and with fp32 masters, which are reduced in place.

With --way: the ways of hdet.converge (or one of them) beside Plain(), what each does at a
cycle's end, in turn. Bytes are what a rank has to send at the least (a ring's), counted
in torch's collectives; they do not depend on the machine. Over gloo on one machine a network costs
as much as memory does, so times show each way's own work rather than what it saves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import hdet
from hdet import Replicas
from hdet.converge import (
    Averaging,
    Compressed,
    ExactLocal,
    Outer,
    Plain,
    Task,
)
from hdet.converge.buckets import Buckets, Part

from .harness import alternate, counted, emit, spawn, summary

CASES = {"24 x 2^20": [1 << 20] * 24, "3000 x 1000": [1000] * 3000}
OF_16_BITS = {"48 x 2^20": [1 << 20] * 48}


def measure(
    rank: int, world_size: int, sizes: list[int], repeats: int
) -> dict[str, dict[str, float]]:
    def parameters() -> list[torch.nn.Parameter]:
        # A set for each candidate: torch's averager moves the parameters it is given to new memory
        # in every call.
        return [torch.nn.Parameter(torch.randn(size)) for size in sizes]

    flat = torch.randn(sum(sizes))
    parts = [Part(parameter) for parameter in parameters()]
    ours, replicas = Buckets(lambda: parts, in_place=True), Replicas.from_group()
    torchs, torchs_own, loops_own = (
        PeriodicModelAverager(period=1, warmup_steps=0),
        parameters(),
        parameters(),
    )
    for parameter in torchs_own:
        parameter.grad = torch.zeros_like(parameter)  # it takes only parameters that have one

    def loop() -> None:
        for parameter in loops_own:
            dist.all_reduce(parameter.data)
            parameter.data.div_(world_size)

    candidates = {
        "flat all_reduce (floor)": lambda: dist.all_reduce(flat),
        "ours": lambda: ours.average(replicas),
        "torch PeriodicModelAverager": lambda: torchs.average_parameters(iter(torchs_own)),
    }
    result = summary(alternate(candidates, repeats, barrier=True), "flat all_reduce (floor)")
    # The loop is slow enough to disturb the others, and a few rounds of it suffice.
    few = alternate(
        {"floor": candidates["flat all_reduce (floor)"], "one all_reduce per parameter": loop},
        max(3, repeats // 5),
        barrier=True,
        warmup=1,
    )
    result["one all_reduce per parameter"] = summary(few, "floor")["one all_reduce per parameter"]
    result["ours"]["extra_mib"] = ours.extra_bytes / 2**20
    return result


def measure_16_bits(
    rank: int, world_size: int, sizes: list[int], repeats: int
) -> dict[str, dict[str, float]]:
    def averaged(*parts: Part) -> Buckets:
        return Buckets(lambda: parts, in_place=True)

    values, replicas = [torch.randn(size) for size in sizes], Replicas.from_group()
    packed = averaged(*(Part(value.bfloat16()) for value in values))
    masters = averaged(*(Part(value.bfloat16(), value) for value in values))
    flat = torch.randn(sum(sizes))

    def one_after_the_other() -> None:
        for filling in packed.plan():
            dist.all_reduce(filling.pack(1 / world_size))
            filling.unpack()

    candidates = {
        "flat all_reduce (floor)": lambda: dist.all_reduce(flat),
        "packed, two buckets in turn": lambda: packed.average(replicas),
        "packed, one after the other": one_after_the_other,
        "fp32 masters in place": lambda: masters.average(replicas),
    }
    return summary(alternate(candidates, repeats, barrier=True), "flat all_reduce (floor)")


# -- the ways --------------------------------------------------------------------------------------

WAYS: dict[str, Averaging] = {
    "plain": Plain(),
    "bf16": Compressed("bf16"),
    "int8": Compressed("int8"),
    "exact-local": ExactLocal(check_every=10),
    "outer": Outer(),
}


def cycle_of(way: Averaging, sizes: list[int], bucket_bytes: int = 64 << 20) -> Callable[[], None]:
    """All that a way does in a cycle, apart from the optimizer's steps."""
    replicas, parameters = (
        Replicas.from_group(),
        [torch.nn.Parameter(torch.randn(size)) for size in sizes],
    )
    optimizer = hdet.FusedAdamW(parameters, lr=1e-3, weight_decay=0.0)
    gradients = "local" if isinstance(way, Outer) else "shared"
    average = way.build(
        Task(
            parameters,
            replicas,
            optimizer,
            lambda: [None] * len(parameters),
            bucket_bytes,
            gradients,
        )
    )

    def cycle() -> None:
        average.on_cycle_start()
        average.end_cycle([1 / replicas.count] * replicas.count)

    cycle()  # the first average is exact, or compares
    return cycle


def measure_ways(
    rank: int, world_size: int, sizes: list[int], repeats: int, names: list[str]
) -> dict[str, dict[str, float]]:
    cycles = {name: cycle_of(WAYS[name], sizes) for name in names}
    volume = {}
    for name, cycle in cycles.items():
        cycle()
        with counted() as calls:
            cycle()
        volume[name] = {"bytes": sum(call.sent for call in calls), "collectives": len(calls)}
    rows = summary(alternate(dict(cycles), repeats, barrier=True), "plain")
    return {name: {**row, **volume[name]} for name, row in rows.items()}


def report_ways(options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(["plain", *(WAYS if options.way == "all" else [options.way])]))
    for case, sizes in CASES.items():
        rows = spawn(measure_ways, options.processes, sizes, options.repeats, names)
        print(
            f"\n{case} fp32, {options.processes} processes, {4 * sum(sizes) / 1e6:.0f} MB each; a "
            "rank and cycle"
        )
        for name, row in rows.items():
            print(
                f"  {name:14} {row['bytes'] / 1e6:9.3f} MB sent "
                f"({row['bytes'] / rows['plain']['bytes']:6.4f} x plain) in "
                f"{row['collectives']:4.0f} collectives {row['median_ms']:9.1f} ms "
                f"{row['ratio']:8.2f} x plain"
            )
        emit(
            {
                "benchmark": "converge_ways",
                "case": case,
                "processes": options.processes,
                "rows": rows,
            },
            options.json,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    parser.add_argument(
        "--way", choices=["all", *WAYS], help="ways of averaging beside the plain one"
    )
    options = parser.parse_args()
    if options.way is not None:
        report_ways(options)
        return
    cases: list[tuple[str, list[int], Callable[..., Any]]] = [
        *((f"{case} fp32", sizes, measure) for case, sizes in CASES.items()),
        *((f"{case} bf16", sizes, measure_16_bits) for case, sizes in OF_16_BITS.items()),
    ]
    for case, sizes, function in cases:
        rows = spawn(function, options.processes, sizes, options.repeats)
        print(f"\n{case}, {options.processes} processes, {4 * sum(sizes) / 1e6:.0f} MB each")
        for name, row in rows.items():
            print(
                f"  {name:30} {row['median_ms']:9.1f} ms (best {row['best_ms']:8.1f})   "
                f"{row['ratio']:8.2f} x floor"
            )
        emit(
            {"benchmark": "converge", "case": case, "processes": options.processes, "rows": rows},
            options.json,
        )


if __name__ == "__main__":
    main()
