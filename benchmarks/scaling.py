"""What averaging costs on a machine that one need not have: the alpha-beta model of
docs/scaling.md.

    python -m benchmarks.scaling --parameters 70e9 --replicas 1024 --shards 64 --bandwidth 45e9

A message of n bytes takes alpha + n / B seconds. Collectives are counted in messages, one after the
other, and in bytes that one rank sends; ways of averaging are counted in collectives. What the
model leaves out makes the truth dearer (packing, stragglers, other traffic on the same links) or
cheaper (collectives that travel at the same time).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdet.replicas.topology import WIDTH

from .harness import parser_of
from .tables import spaced

INT8_BYTES = 1 + 4 / 256
"""On the wire for a parameter: the byte itself, and its part of one float32 scale for 256 of
them."""
HBM_BYTES = 8
"""The mean track of the exact local converge: one further fp32 set of parameters, read and written
in each step."""


# -- messages and collectives ----------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Of one rank: ``messages`` that wait for each other, and ``sent`` bytes in all."""

    messages: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.sent + other.sent)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.messages * times, self.sent * times)


@dataclass(frozen=True)
class Link:
    """``bandwidth``: B, bytes per second that each rank can send while all do; ``latency``:
    alpha, seconds a message."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise ValueError(
                f"a link of {self.bandwidth!r} bytes a second and {self.latency!r} seconds a "
                "message: give e.g. 45e9 and 1e-5"
            )

    def seconds(self, traffic: Traffic) -> float:
        """messages alpha + sent / B."""
        return traffic.messages * self.latency + traffic.sent / self.bandwidth


def reduce_scatter(size: float, ranks: int) -> Traffic:
    """Ring over ``size`` bytes: p - 1 messages of size / p."""
    return Traffic(ranks - 1, (ranks - 1) / ranks * size)


all_gather = reduce_scatter
"""Of ``size`` bytes in all, size / p from each rank: the same messages the other way round."""
all_to_all = reduce_scatter
"""``size`` bytes on each rank, size / p for each other: as many messages, of the same bytes."""


def ring_all_reduce(size: float, ranks: int) -> Traffic:
    """Reduce-scatter, then all-gather: 2 (p - 1) messages, 2 (p - 1) / p of the bytes, which no
    all-reduce can undercut."""
    return reduce_scatter(size, ranks) + all_gather(size, ranks)


def tree_all_reduce(size: float, ranks: int) -> Traffic:
    """Up and down two complementary binary trees, pipelined: 2 ceil(log2 p) messages, twice the
    bytes."""
    return Traffic(2 * math.ceil(math.log2(ranks)), 2 * size) if ranks > 1 else Traffic()


def all_reduce(size: float, ranks: int, link: Link) -> Traffic:
    """Ring or tree, whichever is quicker: many bytes between few ranks go round, few bytes between
    many go up and down."""
    return min(ring_all_reduce(size, ranks), tree_all_reduce(size, ranks), key=link.seconds)


# -- a job and its ways of averaging ---------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """N replicas of S ranks each, and the machine.

    Bytes in bytes, seconds in seconds, a rank is a GPU.
    """

    replicas: int
    """N"""
    parameters: int
    """P of the whole model, in numbers"""
    interval: int = 1000
    """T, optimizer steps between averages"""
    shards: int = 1
    """S, ranks of a replica that divide its parameters among them: tp x pp x fsdp"""
    value_bytes: float = 4.0
    """of an averaged parameter: 4 for fp32 masters"""
    gradient_bytes: float = 4.0
    """of a gradient in the all-reduce between replicas"""
    step_seconds: float = 1.0
    """an optimizer step without HDET"""
    ranks_per_node: int = 8
    across: Link = field(default_factory=lambda: Link(45e9, 1e-5))
    """between nodes, for each rank"""
    inside: Link = field(default_factory=lambda: Link(350e9, 3e-6))
    """inside a node"""
    memory_bandwidth: float = 3e12
    """bytes per second of a rank's own memory"""
    bucket_bytes: float = 32 * 2**20
    """of one collective"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a positive number")
        if self.replicas < 2:
            why = "it must be at least 2, one alone has nobody to be averaged with"
            raise ValueError(f"replicas is 1: {why}")

    @property
    def own(self) -> float:
        """P / S: parameters of one rank."""
        return self.parameters / self.shards

    @property
    def peers_per_node(self) -> int:
        """Replicas that have a rank of the same peer group in one node; ranks of a replica lie side
        by side."""
        return min(self.replicas, max(1, self.ranks_per_node // self.shards))

    @property
    def crosses(self) -> bool:
        """Do the peers of a group sit in several nodes?"""
        return self.replicas > self.peers_per_node

    @property
    def between_replicas(self) -> Link:
        """The slowest link that a ring over all replicas must pass."""
        return self.across if self.crosses else self.inside

    @property
    def between_ranks(self) -> Link:
        return self.inside if self.replicas * self.shards <= self.ranks_per_node else self.across


@dataclass(frozen=True)
class Way:
    """A way of averaging, for one rank and one cycle of T steps."""

    name: str
    sent: float
    """bytes"""
    sent_across: float
    """bytes of them through the links between nodes; all of a flat ring that has such a link,
    because it is as slow as that one"""
    seconds: float
    """of work or of wire, for which training waits"""
    pause: float
    """seconds of the longest single wait"""
    memory: float
    """bytes beside parameters, gradients and optimizer state"""
    share: float
    """seconds / (T step): what the run gets longer by"""


def ways(job: Job) -> list[Way]:
    """Every way of averaging that the layout admits, plain first."""
    own, link, replicas = job.own, job.between_replicas, job.replicas
    size, ranks = own * job.value_bytes, job.replicas * job.shards
    bucket = min(size, 2 * job.bucket_bytes)  # two of them, in turn
    # the reference, the error that is fed back, and that of a rank's chunk
    kept_back = own * (8 + 4 / replicas) + bucket

    def way(name: str, across: Traffic, memory: float) -> Way:
        seconds, sent = link.seconds(across), across.sent if job.crosses else 0.0
        share = seconds / job.interval / job.step_seconds
        return Way(name, across.sent, sent, seconds, seconds, memory, share)

    def exchanged(bytes_each: float) -> Traffic:
        """Of each bucket, with so many bytes for a value: an all-to-all of chunks, and an
        all-gather of their averages."""
        small = bytes_each / job.value_bytes
        both = lambda bucket: (
            all_to_all(bucket * small, replicas) + all_gather(bucket * small, replicas)
        )
        return _in_buckets(size, job, both)

    plain = _in_buckets(size, job, lambda bucket: all_reduce(bucket, replicas, link))
    extra = all_reduce(8 * WIDTH * replicas, ranks, link)
    return [
        way("plain", plain, bucket),
        way("compressed bf16", exchanged(2), kept_back),
        way("compressed int8", exchanged(INT8_BYTES), kept_back),
        way("outer step", plain + extra, bucket + 8 * own),
        _exact_local(job),
    ]


def _in_buckets(size: float, job: Job, collective: Callable[[float], Traffic]) -> Traffic:
    """``size`` bytes in pieces of at most a bucket, as alike as can be."""
    count = math.ceil(size / job.bucket_bytes)
    return collective(size / count) * count


def _exact_local(job: Job) -> Way:
    """Nothing is sent.

    In each step the mean's own parameters pass through memory, and at the end they are copied.
    """
    once = HBM_BYTES * job.own / job.memory_bandwidth
    seconds = once * (job.interval + 1)
    share = seconds / job.interval / job.step_seconds
    return Way("exact local", 0.0, 0.0, seconds, once, 4 * job.own, share)


def gradients(job: Job) -> Traffic:
    """One step's all-reduce of shared gradients between the replicas, as plain data-parallel
    training pays it; with local gradients none."""
    ring = lambda bucket: all_reduce(bucket, job.replicas, job.between_replicas)
    return _in_buckets(job.own * job.gradient_bytes, job, ring)


# -- the controller --------------------------------------------------------------------------------


def statistics(job: Job, chunks: int = 0) -> tuple[int, float]:
    """Bytes and seconds of the small collective of a cycle: (N, `WIDTH`) float64 over all N S
    ranks; a second one of what does not fit, with more than 26 ``chunks`` of a probe."""
    size = 8 * job.replicas * max(WIDTH, 6 + chunks)
    link = job.between_ranks
    return size, link.seconds(all_reduce(size, job.replicas * job.shards, link))


def controller_seconds(replicas: int, knobs: int = 1) -> float:
    """Of one cycle on every rank, with a probe of 8 chunks, the statistics' way into Python
    included: measured at 1 024 replicas (benchmarks.overhead), linear in both."""
    return replicas * (2.0e-6 + 1.2e-6 * knobs)


def controller_bytes(replicas: int, knobs: int = 1) -> int:
    """Kept between cycles by knobs of one spread: the multipliers as Python numbers, and a
    reference to one for each knob; measured too."""
    return replicas * (28 + 9 * knobs)


# -- the command -----------------------------------------------------------------------------------


def lines(job: Job, knobs: int = 1, chunks: int = 8) -> Iterator[str]:
    """What averaging costs the job."""
    many = f"{spaced(job.replicas)} replicas of {spaced(job.shards)} rank{'s' * (job.shards > 1)}"
    ranks = f"{spaced(job.replicas * job.shards)} ranks, {job.ranks_per_node} a node"
    parameters = f"{_power(job.parameters)} parameters, {_power(job.own)} a rank"
    yield f"{many} ({ranks}); {parameters}"
    yield (
        f"averaged at {job.value_bytes:g} bytes every {spaced(job.interval)} steps of "
        f"{_seconds(job.step_seconds)}, in collectives of {_bytes(job.bucket_bytes)}"
    )
    yield (
        f"each rank: between nodes {_wire(job.across)}; inside a node {_wire(job.inside)}; memory "
        f"{_bytes(job.memory_bandwidth)}/s"
    )
    if 16 * job.own > 80e9:
        held = f"{_bytes(16 * job.own)} (16 bytes a parameter)"
        yield f"note: a rank would hold {held}: divide the replica with --shards"
    yield ""
    row = "{:<24}{:>12}{:>15}{:>10}{:>10}{:>12}{:>10}".format
    yield row("way of averaging", "sent a rank", "between nodes", "a cycle", "longest",
              "of the run", "+ memory")  # fmt: skip
    for way in ways(job):
        sent, times = map(_bytes, (way.sent, way.sent_across)), (way.seconds, way.pause)
        shares = _percent(way.share), _bytes(way.memory)
        yield row(way.name, *sent, *map(_seconds, times), *shares)
    yield ""
    traffic = gradients(job)
    seconds = job.between_replicas.seconds(traffic)
    yield (
        f"gradients between replicas: shared {_bytes(traffic.sent)} and {_seconds(seconds)} a "
        "step, mostly behind the backward pass; local none"
    )
    if seconds > job.step_seconds:
        step = _seconds(job.step_seconds)
        yield f"  note: that alone is longer than a step of {step}: see --step-seconds"
    plain = job.own * job.value_bytes / (job.own * job.gradient_bytes * job.interval)
    yield f"  plain converge / shared gradients: {_percent(plain)} of the bytes"
    size, seconds = statistics(job)
    probed, longer = statistics(job, chunks)
    more = f"; with a probe of {chunks} mini-batches {_bytes(probed)}, {_seconds(longer)}"
    plainly = f"statistics: {_bytes(size)} over all ranks, {_seconds(seconds)} a cycle"
    yield plainly + (more if chunks else "")
    took = f"{_seconds(controller_seconds(job.replicas, knobs))} a cycle on every rank"
    kept = f"{_bytes(controller_bytes(job.replicas, knobs))} kept"
    yield f"controller: {took}, {kept} ({knobs} knob{'s' * (knobs > 1)})"


def _wire(link: Link) -> str:
    return f"{_bytes(link.bandwidth)}/s, {_seconds(link.latency)} a message"


def _power(number: float) -> str:
    """70e9: the way in which the option is written."""
    exponent = 3 * int(math.log10(max(number, 1)) // 3)
    return f"{number / 10**exponent:.3g}" + (f"e{exponent}" if exponent else "")


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if value >= size * 0.9995:  # what would be rounded up to 1000 of a unit is 1 of the next
            return f"{_three(value / size)} {unit}"
    size, unit = units[-1]
    return f"{value / size:.2g} {unit}"


def _three(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _bytes(value: float) -> str:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
    return "0" if value == 0 else _scaled(value, units)


def _seconds(value: float) -> str:
    return "0" if value == 0 else _scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us")))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


def _whole(text: str) -> int:
    """1024, and also 70e9."""
    value = float(text)
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 1024 or 70e9")
    return int(value)


HELP = {
    "replicas": "N",
    "parameters": "of the model; numbers may be written like 45e9",
    "interval": "T, steps between averages",
    "shards": "ranks that divide a replica's parameters among them: tp x pp x fsdp",
    "value_bytes": "of an averaged parameter: 4 for fp32 masters",
    "gradient_bytes": "of a gradient in the all-reduce between replicas",
    "step_seconds": "an optimizer step without HDET",
    "ranks_per_node": "GPUs of a node",
    "memory_bandwidth": "bytes per second of a rank's own memory",
    "bucket_bytes": "of one collective",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, writes=False)
    usual = Job(4, 10**9)

    def add(name: str, default: Any, text: str) -> None:
        kind = _whole if isinstance(default, int) else float
        option, more = f"--{name.replace('_', '-')}", f"{text} (default: {default})"
        required = {"required": True} if name == "parameters" else {"default": default}
        parser.add_argument(option, type=kind, metavar="X", help=more, **required)

    for name, text in HELP.items():
        add(name, getattr(usual, name), text)
    for where, link in (("", usual.across), ("_inside", usual.inside)):
        add(f"bandwidth{where}", link.bandwidth, "bytes per second that each rank can send")
        add(f"latency{where}", link.latency, "seconds a message")
    add("knobs", 1, "hyperparameters explored")
    add("chunks", 8, "mini-batches of the probe; 0 for a controller without one")
    given = vars(parser.parse_args(arguments))
    knobs, chunks = given.pop("knobs"), given.pop("chunks")
    try:
        across = Link(given.pop("bandwidth"), given.pop("latency"))
        inside = Link(given.pop("bandwidth_inside"), given.pop("latency_inside"))
        job = Job(**given, across=across, inside=inside)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines(job, knobs, chunks)))


if __name__ == "__main__":
    main()
