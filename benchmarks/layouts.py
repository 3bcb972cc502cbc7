"""The converge in three parallel layouts: time and volume against bytes, beside what else averages
parameters.

    python -m benchmarks.layouts [--processes 2 4 8] [--repeats 9] [--json FILE] [--quick]
    python -m benchmarks.layouts --fit FILE

Layouts: DDP; HSDP (`fully_shard` on a two-dimensional mesh); tp x pp x dp with shards made by hand.
The model is a transformer's list of weights, 4 layers, of 3, 13 and 50 MB in fp32. Sides, in turn
in every round, on the tensors of this rank and over its peer group:

- floor: one flat all_reduce of the same bytes, which no average can undercut;
- ours: Buckets;
- torch: PeriodicModelAverager (on the local shards: DTensors it cannot average);
- per parameter: clone, one all_reduce for each, divide, copy back, as torchft's LocalSGD does;
  written here.

gloo processes of one thread each. More processes than cores slow each other, here as in the model's
`slowdown`. Volume is what a rank has to send at the least (a ring's), counted in torch's
collectives. --fit takes the cost model's alpha and B from the DDP points of a file and prints what
the model gives for the others beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hdet import Replicas
from hdet.converge.buckets import Buckets, parts_of
from hdet.tensors.dtensor import local_parts

from .harness import alternate, counted, emit, spawn, summary
from .scaling import Link, Traffic

LAYERS = 4
WIDTHS = (128, 256, 512)
Local = tuple[list[torch.Tensor], Replicas]


# -- layouts: the tensors of this rank, and its replicas -------------------------------------------


class Block(nn.Module):
    """The weights of a transformer's layer; ``tp`` ranks divide the columns of the first of each
    pair and the rows of the second."""

    def __init__(self, width: int, tp: int = 1) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width // tp, bias=False)
        self.out = nn.Linear(width // tp, width, bias=False)
        self.up = nn.Linear(width, 4 * width // tp, bias=False)
        self.down = nn.Linear(4 * width // tp, width, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])


def model(width: int, layers: int = LAYERS, tp: int = 1) -> nn.Sequential:
    return nn.Sequential(*(Block(width, tp) for _ in range(layers)))


def ddp(width: int) -> Local:
    return local_parts(
        list(DistributedDataParallel(model(width)).parameters())
    ), Replicas.from_group()


def hsdp(width: int) -> Local:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    whole = model(width)
    for block in whole:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return local_parts(list(whole.parameters())), Replicas.from_mesh(mesh)


def tp_pp_dp(width: int) -> Local:
    """Two replicas; their ranks are divided between tp and pp."""
    world = dist.get_world_size()
    tp = 2 if world >= 4 else 1
    pp = world // (2 * tp)
    return local_parts(list(model(width, LAYERS // pp, tp).parameters())), Replicas.from_layout(
        tp=tp, pp=pp
    )


LAYOUTS: dict[str, Callable[[int], Local]] = {"DDP": ddp, "HSDP": hsdp, "tp x pp x dp": tp_pp_dp}


# -- sides -----------------------------------------------------------------------------------------


def sides(
    tensors: list[torch.Tensor], replicas: Replicas
) -> dict[str, tuple[Callable[[], object], Callable[[], list[torch.Tensor]]]]:
    """The call, and what gives its tensors: a set for each side, because torch's averager moves
    what it is given to new memory."""
    group, count = replicas.peer_group, replicas.count
    flat = torch.cat([t.reshape(-1) for t in tensors])
    torchs = [nn.Parameter(t.clone()) for t in tensors]
    for parameter in torchs:
        parameter.grad = torch.zeros_like(parameter)  # it takes only parameters that have one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that averaging in every call is no use in training
        averager = PeriodicModelAverager(period=1, warmup_steps=0, process_group=group)
    each = [t.clone() for t in tensors]

    def per_parameter() -> None:
        copies = [t.clone() for t in each]
        for work in [dist.all_reduce(copy, group=group, async_op=True) for copy in copies]:
            work.wait()
        for tensor, copy in zip(each, copies, strict=True):
            tensor.copy_(copy.div_(count))

    ours = Buckets(lambda: parts_of(tensors, lambda: [None] * len(tensors)), in_place=True)
    return {
        "floor": (lambda: dist.all_reduce(flat, group=group), lambda: [flat]),
        "ours": (lambda: ours.average(replicas), lambda: tensors),
        "torch": (
            lambda: averager.average_parameters(iter(torchs)),
            lambda: [p.detach() for p in torchs],
        ),
        "per parameter": (per_parameter, lambda: each),
    }


def measure(
    rank: int, world_size: int, widths: tuple[int, ...], repeats: int
) -> list[dict[str, Any]]:
    """One record for each layout and width."""
    records = []
    for layout, build in LAYOUTS.items():
        for width in widths:
            torch.manual_seed(rank)
            tensors, replicas = build(width)
            candidates = {name: call for name, (call, _) in sides(tensors, replicas).items()}
            volumes = {}
            for name, call in candidates.items():
                with counted() as calls:
                    call()
                volumes[name] = {
                    "calls": len(calls),
                    "messages": sum(c.messages for c in calls),
                    "sent": sum(c.sent for c in calls),
                }
            rows = summary(alternate(candidates, repeats, barrier=True, warmup=1), "floor")
            records.append(
                {
                    "benchmark": "layouts",
                    "layout": layout,
                    "processes": world_size,
                    "replicas": replicas.count,
                    "width": width,
                    "tensors": len(tensors),
                    "bytes": sum(t.nbytes for t in tensors),
                    "rows": {name: {**rows[name], **volumes[name]} for name in candidates},
                }
            )
    return records


# -- the model beside the measurements -------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A measurement.

    ``slowdown``: by how much ranks that share a core or a link slow each other, 1 where each has
    its own.
    """

    traffic: Traffic
    seconds: float
    slowdown: float = 1.0


def predict(point: Point, link: Link) -> float:
    """Seconds that the model gives for a measured point."""
    return point.slowdown * link.seconds(point.traffic)


def fit(points: Iterable[Point]) -> Link:
    """alpha and B by least squares of relative errors: minimise sum (predicted / measured - 1)^2,
    neither of them below zero.

    Raises:
        ValueError: fewer than two points, or points that cannot tell latency from bandwidth.
    """
    rows = [
        (p.slowdown * p.traffic.messages / p.seconds, p.slowdown * p.traffic.sent / p.seconds)
        for p in points
    ]
    if len(rows) < 2:
        raise ValueError(
            f"a fit of latency and bandwidth needs at least two measured points, got {len(rows)}"
        )
    mm, ms, ss = (math.fsum(x) for x in zip(*((m * m, m * s, s * s) for m, s in rows), strict=True))
    m1, s1 = (math.fsum(x) for x in zip(*rows, strict=True))
    determinant = mm * ss - ms * ms
    if not determinant > 1e-12 * mm * ss:
        raise ValueError(
            "the measured points have all the same bytes per message: measure small and large "
            "ones, or other numbers of ranks"
        )
    alpha, beta = (ss * m1 - ms * s1) / determinant, (mm * s1 - ms * m1) / determinant
    if alpha < 0:
        alpha, beta = 0.0, s1 / ss
    elif beta <= 0:
        alpha, beta = m1 / mm, 0.0
    return Link(1 / beta if beta > 0 else math.inf, alpha)


def point(record: dict[str, Any], side: str) -> Point:
    """A row as the cost model sees it: its collectives one after the other, ranks that share
    cores."""
    row = record["rows"][side]
    return Point(
        Traffic(row["messages"], row["sent"]),
        row["median_ms"] / 1e3,
        max(1.0, record["processes"] / record["on"]["cores"]),
    )


def compare(records: list[dict[str, Any]], side: str) -> Iterator[str]:
    """Lines: the fit on DDP, and predicted against measured elsewhere.

    Raises:
        ValueError: no DDP points, or all alike.
    """
    link = fit(point(r, side) for r in records if r["layout"] == "DDP")
    yield (
        f"{side}: alpha {1e6 * link.latency:.0f} us a message, B {link.bandwidth / 1e9:.2f} GB/s a "
        "rank, from the DDP points"
    )
    yield (
        f"  {'layout':<14}{'processes':>10}{'replicas':>10}{'MB a rank':>11}"
        f"{'predicted':>12}{'measured':>12}{'ratio':>8}"
    )
    ratios = []
    for record in sorted(
        records, key=lambda r: (r["layout"] == "DDP", r["layout"], r["processes"], r["bytes"])
    ):
        measured = point(record, side)
        expected = predict(measured, link)
        fitted = record["layout"] == "DDP"
        if not fitted:
            ratios.append(expected / measured.seconds)
        yield (
            f"  {record['layout']:<14}{record['processes']:>10}{record['replicas']:>10}"
            f"{record['bytes'] / 1e6:>11.1f}{1e3 * expected:>9.1f} ms"
            f"{1e3 * measured.seconds:>9.1f} ms{expected / measured.seconds:>8.2f}"
            + ("  (fitted)" if fitted else "")
        )
    if ratios:
        off = [max(r, 1 / r) for r in ratios]
        yield (
            f"  not fitted: {len(ratios)} points, off by a factor of {statistics.median(off):.2f} "
            f"in the median, {max(off):.2f} at worst"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the machinery only: 2 processes, a model of a few kB, one round",
    )
    parser.add_argument("--json", help="append the results to this file, as JSON lines")
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="FILE",
        help="measure nothing: compare the cost model with the lines of this file",
    )
    options = parser.parse_args(arguments)
    if options.fit:
        lines = [json.loads(line) for line in options.fit.read_text(encoding="utf-8").splitlines()]
        records = [record for record in lines if record["benchmark"] == "layouts"]
        for side in ("floor", "ours"):
            print("\n".join(compare(records, side)))
        return
    if bad := [count for count in options.processes if count not in (2, 4, 8)]:
        parser.error(f"--processes is {bad[0]}: the layouts are made for 2, 4 and 8")
    widths, repeats, processes = (
        ((16,), 1, [2]) if options.quick else (WIDTHS, options.repeats, options.processes)
    )
    for count in processes:
        for record in spawn(measure, count, widths, repeats):
            print(
                f"\n{record['layout']}, {count} processes, {record['replicas']} replicas: "
                f"{record['tensors']} tensors, {record['bytes'] / 1e6:.1f} MB a rank"
            )
            for name, row in record["rows"].items():
                print(
                    f"  {name:14} {row['median_ms']:9.1f} ms (best {row['best_ms']:8.1f})  "
                    f"{row['ratio']:6.2f} x floor"
                    f"   {row['calls']:4} calls, {row['sent'] / 1e6:.1f} MB sent"
                )
            emit(record, options.json)


if __name__ == "__main__":
    main()
