"""Averages of parameters: time and volume, beside a floor, torch's, and each other.

    python -m benchmarks.averages [tensors layouts ways] [--processes 2 4 8] [--repeats 9]
        [--quick] [--json FILE]
    python -m benchmarks.averages --fit FILE

tensors   24 tensors of 2^20 and 3 000 of 1 000 fp32 elements. Then 48 bf16 tensors of 2^20, which
          travel as fp32: without masters, packed into two buckets in turn, and into one after the
          other; and with fp32 masters, which are reduced in place
layouts   DDP; HSDP (`fully_shard` on a two-dimensional mesh); tp x pp x dp with shards made by
          hand. A transformer's list of weights, 4 layers, of 3, 13 and 50 MB in fp32; on the
          tensors of this rank and over its peer group
ways      those of hdet.converge beside `Plain()`: all that each does at a cycle's end

Sides of the first two, in turn in every round:

floor           one flat all_reduce of the same bytes, which no average can undercut
ours            Buckets
torch           PeriodicModelAverager (on the local shards: DTensors it cannot average)
per parameter   one all_reduce for each, as simple code does it; in layouts all at once, with
                copies, as torchft's LocalSGD does; written here

gloo processes of one thread each. More processes than cores slow each other, and a network costs as
much as memory does, so times show each way's own work. Volume is what a rank has to send at the
least (a ring's), counted in torch's collectives. --fit takes the cost model's alpha and B from the
DDP points of a file and prints what the model gives for the others beside what was measured.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import Replicas
from hdet.converge import Averaging, Compressed, ExactLocal, Outer, Plain, Task
from hdet.converge.buckets import Buckets, Part, parts_of
from hdet.tensors.dtensor import local_parts

from .harness import alternate, counted, emit, parser_of, spawn, summary
from .scaling import Link, Traffic
from .tables import read

LAYERS = 4
WIDTHS = (128, 256, 512)
SIZES = {"24 x 2^20": [1 << 20] * 24, "3000 x 1000": [1000] * 3000}
SIZES_OF_16_BITS = {"48 x 2^20": [1 << 20] * 48}
Local = tuple[list[Tensor], Replicas]
Call = Callable[[], object]
Record = dict[str, Any]


def measured(sides: dict[str, Call], repeats: int) -> dict[str, dict[str, float]]:
    """Times of each, beside the first, and what a rank sends in a call."""
    volumes = {}
    for name, call in sides.items():
        with counted() as calls:
            call()
        volumes[name] = {
            "calls": len(calls),
            "messages": sum(c.messages for c in calls),
            "sent": sum(c.sent for c in calls),
        }
    rows = summary(alternate(sides, repeats, barrier=True, warmup=1), next(iter(sides)))
    return {name: {**rows[name], **volumes[name]} for name in sides}


# -- sides -----------------------------------------------------------------------------------------


def sides_of(
    tensors: list[Tensor], replicas: Replicas
) -> dict[str, tuple[Call, Callable[[], list[Tensor]]]]:
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


# -- tensors ---------------------------------------------------------------------------------------


def of_tensors(rank: int, world_size: int, sizes: list[int], repeats: int) -> list[Record]:
    tensors, replicas = [torch.randn(size) for size in sizes], Replicas.from_group()
    sides = {name: call for name, (call, _) in sides_of(tensors, replicas).items()}

    def loop() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(world_size)

    # The loop is slow enough to disturb the others, and a few rounds of it suffice.
    few = measured({"floor": sides["floor"], "per parameter": loop}, max(3, repeats // 5))
    del sides["per parameter"]
    return [{"rows": {**few, **measured(sides, repeats)}}]


def of_16_bits(rank: int, world_size: int, sizes: list[int], repeats: int) -> list[Record]:
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

    sides = {
        "floor": lambda: dist.all_reduce(flat),
        "packed, two buckets in turn": lambda: packed.average(replicas),
        "packed, one after the other": one_after_the_other,
        "fp32 masters in place": lambda: masters.average(replicas),
    }
    return [{"rows": measured(sides, repeats)}]


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


def local(whole: nn.Module) -> list[Tensor]:
    return local_parts(list(whole.parameters()))


def ddp(width: int) -> Local:
    return local(DistributedDataParallel(model(width))), Replicas.from_group()


def hsdp(width: int) -> Local:
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    whole = model(width)
    for part in (*whole, whole):
        fully_shard(part, mesh=mesh)
    return local(whole), Replicas.from_mesh(mesh)


def tp_pp_dp(width: int) -> Local:
    """Two replicas; their ranks are divided between tp and pp."""
    world = dist.get_world_size()
    tp = 2 if world >= 4 else 1
    pp = world // (2 * tp)
    return local(model(width, LAYERS // pp, tp)), Replicas.from_layout(tp=tp, pp=pp)


LAYOUTS: dict[str, Callable[[int], Local]] = {"DDP": ddp, "HSDP": hsdp, "tp x pp x dp": tp_pp_dp}


def of_layouts(rank: int, world_size: int, widths: Sequence[int], repeats: int) -> list[Record]:
    """One record for each layout and width."""
    records = []
    for layout, build in LAYOUTS.items():
        for width in widths:
            torch.manual_seed(rank)
            tensors, replicas = build(width)
            sides = {name: call for name, (call, _) in sides_of(tensors, replicas).items()}
            size = sum(t.nbytes for t in tensors)
            what = {"layout": layout, "replicas": replicas.count, "width": width}
            what |= {"tensors": len(tensors), "bytes": size}
            records.append({**what, "rows": measured(sides, repeats)})
    return records


# -- ways ------------------------------------------------------------------------------------------

WAYS: dict[str, Averaging] = {
    "plain": Plain(),
    "bf16": Compressed("bf16"),
    "int8": Compressed("int8"),
    "exact-local": ExactLocal(check_every=10),
    "outer": Outer(),
}


def cycle_of(way: Averaging, sizes: list[int], bucket_bytes: int = 64 << 20) -> Callable[[], None]:
    """All that a way does in a cycle, apart from the optimizer's steps."""
    replicas = Replicas.from_group()
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = hdet.FusedAdamW(parameters, lr=1e-3, weight_decay=0.0)
    gradients = "local" if isinstance(way, Outer) else "shared"
    masters = lambda: [None] * len(parameters)
    average = way.build(Task(parameters, replicas, optimizer, masters, bucket_bytes, gradients))

    def cycle() -> None:
        average.on_cycle_start()
        average.end_cycle([1 / replicas.count] * replicas.count)

    cycle()  # the first average is exact, or compares
    return cycle


def of_ways(rank: int, world_size: int, sizes: list[int], repeats: int) -> list[Record]:
    cycles = {name: cycle_of(way, sizes) for name, way in WAYS.items()}
    for cycle in cycles.values():
        cycle()
    return [{"rows": measured(dict(cycles), repeats)}]


# -- the cost model beside the measurements --------------------------------------------------------


def fit(points: Sequence[tuple[Traffic, float]]) -> Link:
    """alpha and B from (traffic, seconds), neither of them below zero: least squares of relative
    errors.

    Raises:
        ValueError: points that cannot tell latency from bandwidth.
    """
    from scipy.optimize import nnls

    rows = np.array([(of.messages / took, of.sent / took) for of, took in points])
    scales = rows.max(0)
    if np.linalg.matrix_rank(rows / scales) < 2:
        raise ValueError(
            "the measured points have all the same bytes per message: measure small and large "
            "ones, or other numbers of ranks"
        )
    alpha, beta = nnls(rows / scales, np.ones(len(rows)))[0] / scales
    return Link(float(1 / beta) if beta > 0 else math.inf, float(alpha))


def point(record: Record, side: str) -> tuple[Traffic, float]:
    """A row as the cost model sees it: its collectives one after the other, as often as ranks share
    a core."""
    row, shared = record["rows"][side], max(1.0, record["processes"] / record["on"]["cores"])
    return Traffic(row["messages"], row["sent"]) * shared, row["median_ms"] / 1e3


def compare(records: list[Record], side: str) -> Iterator[str]:
    """Lines: the fit on DDP, and predicted against measured elsewhere."""
    link = fit([point(r, side) for r in records if r["layout"] == "DDP"])
    yield (
        f"{side}: alpha {1e6 * link.latency:.0f} us a message, B {link.bandwidth / 1e9:.2f} GB/s a "
        "rank, from the DDP points"
    )
    yield (
        f"  {'layout':<14}{'processes':>10}{'replicas':>10}{'MB a rank':>11}"
        f"{'predicted':>12}{'measured':>12}{'ratio':>8}"
    )
    off = []
    for record in sorted(
        records, key=lambda r: (r["layout"] == "DDP", r["layout"], r["processes"], r["bytes"])
    ):
        traffic, seconds = point(record, side)
        expected, fitted = link.seconds(traffic), record["layout"] == "DDP"
        ratio = expected / seconds
        off += [] if fitted else [max(ratio, 1 / ratio)]
        yield (
            f"  {record['layout']:<14}{record['processes']:>10}{record['replicas']:>10}"
            f"{record['bytes'] / 1e6:>11.1f}{1e3 * expected:>9.1f} ms"
            f"{1e3 * seconds:>9.1f} ms{ratio:>8.2f}" + ("  (fitted)" if fitted else "")
        )
    if off:
        yield (
            f"  not fitted: {len(off)} points, off by a factor of {statistics.median(off):.2f} "
            f"in the median, {max(off):.2f} at worst"
        )


# -- the command -----------------------------------------------------------------------------------

Case = tuple[str, Callable[..., list[Record]], Any, int]
"""What it is called, a worker, its argument, processes."""


def cases(section: str, processes: Sequence[int], quick: bool) -> Iterator[Case]:
    if section == "layouts":
        for count in processes:
            yield "", of_layouts, (16,) if quick else WIDTHS, count
        return
    workers = {"tensors": of_tensors, "ways": of_ways}
    for case, sizes in SIZES.items():
        yield f"{case} fp32", workers[section], [8] * 4 if quick else sizes, processes[-1]
    for case, sizes in SIZES_OF_16_BITS.items() if section == "tensors" else ():
        yield f"{case} bf16", of_16_bits, [8] * 4 if quick else sizes, processes[-1]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    sections = ("tensors", "layouts", "ways")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="; without, all of them")
    parser.add_argument("--processes", type=int, nargs="+", choices=(2, 4, 8), metavar="COUNT",
                        help="by default 4; of layouts 2, 4 and 8")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="the machinery only")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="compare the cost model with it")
    options = parser.parse_args(arguments)
    if options.fit:
        records = [line for line in read(options.fit) if line["benchmark"] == "layouts"]
        for side in ("floor", "ours"):
            print("\n".join(compare(records, side)))
        return
    for section in options.sections or sections:
        usual = [2] if options.quick else [2, 4, 8] if section == "layouts" else [4]
        for case, worker, of, count in cases(section, options.processes or usual, options.quick):
            for found in spawn(worker, count, of, 1 if options.quick else options.repeats):
                record = {"benchmark": section, "case": case, "processes": count, **found}
                layout = f"{found.get('layout', case)}, {count} processes"
                size = "{replicas} replicas: {tensors} tensors, {bytes} bytes a rank"
                print(f"\n{layout}, {size.format_map(found)}" if "layout" in found else layout)
                for name, row in record["rows"].items():
                    print(
                        f"  {name:28} {row['median_ms']:9.1f} ms (best {row['best_ms']:8.1f})  "
                        f"{row['ratio']:7.2f} x the first   {row['calls']:4} calls, "
                        f"{row['sent'] / 1e6:.3f} MB sent"
                    )
                emit(record, options.json)


if __name__ == "__main__":
    main()
