"""What averaging costs on a machine that one need not have: the alpha-beta model behind
benchmarks.scaling (docs/scaling.md). Pure arithmetic.

A message of n bytes takes alpha + n / B seconds. Collectives are counted in messages, one after the
other, and in bytes that one rank sends; ways of averaging are counted in collectives. What the
model leaves out makes the truth dearer (packing, stragglers, other traffic on the same links) or
cheaper (collectives that travel at the same time).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "Job",
    "Link",
    "Statistics",
    "Traffic",
    "Way",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "controller_bytes",
    "controller_seconds",
    "gradients",
    "hierarchical",
    "reduce_scatter",
    "ring_all_reduce",
    "statistics",
    "tree_all_reduce",
    "ways",
]

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
        if not self.bandwidth > 0:
            raise ValueError(
                f"bandwidth is {self.bandwidth!r}: it must be a positive number of bytes per "
                "second and rank, e.g. 45e9"
            )
        if not 0 <= self.latency < math.inf:
            raise ValueError(
                f"latency is {self.latency!r}: it must be a number of seconds a message, at least "
                "0, e.g. 1e-5"
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


def hierarchical(size: float, inside: int, nodes: int, across: Link) -> tuple[Traffic, Traffic]:
    """Reduce-scatter inside a node of ``inside`` peers, all-reduce of what each holds across
    ``nodes``, all-gather inside.

    Returns the traffic inside and across. With equal bandwidths and rings it sends the bytes of one
    flat ring.
    """
    return ring_all_reduce(size, inside), all_reduce(size / inside, nodes, across)


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
    fragments: int = 4
    """F of streaming"""
    overlap_steps: int = 1
    """tau: steps that an overlapped average may take"""

    def __post_init__(self) -> None:
        for name in (
            "replicas",
            "parameters",
            "interval",
            "shards",
            "ranks_per_node",
            "fragments",
            "overlap_steps",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number, at least 1")
        for name in (
            "value_bytes",
            "gradient_bytes",
            "step_seconds",
            "memory_bandwidth",
            "bucket_bytes",
        ):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a positive number")
        if self.replicas < 2:
            raise ValueError(
                "replicas is 1: it must be at least 2, one alone has nobody to be averaged with"
            )
        if self.fragments > self.interval or self.overlap_steps >= self.interval:
            raise ValueError(
                f"interval is {self.interval}: it must be at least fragments ({self.fragments}) "
                f"and above overlap_steps ({self.overlap_steps})"
            )

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
    """of work or of wire, hidden or not"""
    exposed: float
    """seconds of them that training waits for"""
    pause: float
    """seconds of the longest single wait"""
    memory: float
    """bytes beside parameters, gradients and optimizer state"""
    share: float
    """exposed / (T step): what the run gets longer by"""


def ways(job: Job) -> list[Way]:
    """Every way of averaging that the layout admits, plain first."""
    own, link = job.own, job.between_replicas
    size = own * job.value_bytes

    def way(
        name: str,
        inside: Traffic,
        across: Traffic,
        memory: float,
        *,
        hidden: float = 0.0,
        pauses: int = 1,
    ) -> Way:
        seconds = job.inside.seconds(inside) + link.seconds(across)
        exposed = max(0.0, seconds - hidden)
        return Way(
            name,
            inside.sent + across.sent,
            across.sent if job.crosses else 0.0,
            seconds,
            exposed,
            exposed / pauses,
            memory,
            exposed / job.interval / job.step_seconds,
        )

    def streamed(parts: int) -> Traffic:
        """A part after the other, in buckets that together are one; before all but the last, N
        numbers tell who is finite."""
        told = all_reduce(8 * job.replicas, job.replicas * job.shards, link) * (parts - 1)
        return (
            _in_buckets(
                size / parts, job, lambda bucket: all_reduce(bucket, job.replicas, link), parts
            )
            * parts
            + told
        )

    def exchanged(bytes_each: float) -> Traffic:
        """Of each bucket, with so many bytes for a value: an all-to-all of chunks, and an
        all-gather of their averages."""
        small = bytes_each / job.value_bytes
        return _in_buckets(
            size,
            job,
            lambda bucket: (
                all_to_all(bucket * small, job.replicas) + all_gather(bucket * small, job.replicas)
            ),
        )

    plain = _in_buckets(size, job, lambda bucket: all_reduce(bucket, job.replicas, link))
    bucket = min(size, job.bucket_bytes)
    kept_back = own * (
        8 + 4 / job.replicas
    )  # the reference, the error that is fed back, and that of a rank's chunk
    rows = [way("plain", Traffic(), plain, bucket)]
    nodes, rest = divmod(job.replicas, job.peers_per_node)
    if job.peers_per_node > 1 and nodes > 1 and rest == 0:
        count = math.ceil(size / job.bucket_bytes)
        inside, across = hierarchical(size / count, job.peers_per_node, nodes, job.across)
        rows.append(way("hierarchical", inside * count, across * count, bucket))
    rows += [
        way("compressed bf16", Traffic(), exchanged(2), kept_back + bucket),
        way("compressed int8", Traffic(), exchanged(INT8_BYTES), kept_back + bucket),
        way(
            f"streaming, {job.fragments} fragments",
            Traffic(),
            streamed(job.fragments),
            bucket,
            pauses=job.fragments,
        ),
        way(
            _overlapped(job),
            Traffic(),
            plain,
            2 * size,
            hidden=job.overlap_steps * job.step_seconds,
        ),
        way(
            "outer step",
            Traffic(),
            plain + all_reduce(16 * job.replicas, job.replicas * job.shards, link),
            bucket + 8 * own,
        ),
        _exact_local(job),
    ]
    return rows


def _overlapped(job: Job) -> str:
    return f"overlapped, {job.overlap_steps} step{'s' * (job.overlap_steps > 1)}"


def _in_buckets(
    size: float, job: Job, collective: Callable[[float], Traffic], parts: int = 1
) -> Traffic:
    """``size`` bytes in pieces of at most one of ``parts`` of a bucket, as alike as can be."""
    count = math.ceil(size * parts / job.bucket_bytes)
    return collective(size / count) * count


def _exact_local(job: Job) -> Way:
    """Nothing is sent.

    In each step the mean's own parameters pass through memory, and at the end they are copied.
    """
    once = HBM_BYTES * job.own / job.memory_bandwidth
    seconds = once * (job.interval + 1)
    return Way(
        "exact local",
        0.0,
        0.0,
        seconds,
        seconds,
        once,
        4 * job.own,
        seconds / job.interval / job.step_seconds,
    )


def gradients(job: Job) -> Traffic:
    """One step's all-reduce of shared gradients between the replicas, as plain data-parallel
    training pays it; with local gradients none."""
    return _in_buckets(
        job.own * job.gradient_bytes,
        job,
        lambda bucket: all_reduce(bucket, job.replicas, job.between_replicas),
    )


# -- the controller --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """The small collective of a cycle: ``size`` bytes on every rank, ``seconds`` on the wire."""

    size: int
    seconds: float


def statistics(job: Job, chunks: int = 0) -> Statistics:
    """(N, 3) float64 over all N S ranks: loss sums, weights, marks of the schedule; with a probe
    ``chunks`` losses and the batches' digest, (N, 5 + chunks)."""
    size = 8 * job.replicas * (3 if chunks == 0 else 5 + chunks)
    link = job.between_ranks
    return Statistics(size, link.seconds(all_reduce(size, job.replicas * job.shards, link)))


def controller_seconds(replicas: int, knobs: int = 1) -> float:
    """Of one cycle on every rank, with a probe of 8 chunks, the statistics' way into Python
    included: measured at 1 024 replicas (benchmarks.controller), linear in both."""
    return replicas * (2.0e-6 + 1.2e-6 * knobs)


def controller_bytes(replicas: int, knobs: int = 1) -> int:
    """Kept between cycles by knobs of one spread: the multipliers as Python numbers, and a
    reference to one for each knob; measured too."""
    return replicas * (28 + 9 * knobs)
