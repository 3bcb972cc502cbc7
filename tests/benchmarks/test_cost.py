"""The cost model: collectives against values by hand, invariants of the ways of averaging, and the
controller's own cost."""

from __future__ import annotations

import random
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from benchmarks import scaling as cost
from benchmarks.scaling import Job, Link, Traffic
from hdet.controllers.probe_rule import ProbeRule
from hdet.controllers.softmax import SoftmaxController
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec

sizes = st.floats(1, 1e12)
counts = st.integers(2, 5000)
links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2))


def by_name(job: Job) -> dict[str, cost.Way]:
    return {way.name.split(",")[0]: way for way in cost.ways(job)}


# -- collectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("traffic", "messages", "sent"),
    [
        (cost.reduce_scatter(800, 8), 7, 700),  # 7 messages of 100
        (cost.all_gather(800, 8), 7, 700),
        (cost.ring_all_reduce(800, 4), 6, 1200),  # 6 messages of 200
        (cost.ring_all_reduce(800, 2), 2, 800),
        (cost.ring_all_reduce(800, 1), 0, 0),
        (cost.tree_all_reduce(800, 8), 6, 1600),  # 3 levels up, 3 down
        (cost.tree_all_reduce(800, 5), 6, 1600),
        (cost.tree_all_reduce(800, 1), 0, 0),
    ],
)
def test_collectives_by_hand(traffic: Traffic, messages: float, sent: float) -> None:
    assert (traffic.messages, traffic.sent) == (messages, sent)


@given(sizes, counts, links)
def test_an_all_reduce_is_the_quicker_of_two_and_never_below_the_bandwidth_bound(
    size: float, ranks: int, link: Link
) -> None:
    ring, tree = cost.ring_all_reduce(size, ranks), cost.tree_all_reduce(size, ranks)
    chosen = link.seconds(cost.all_reduce(size, ranks, link))
    assert chosen == min(link.seconds(ring), link.seconds(tree))
    assert chosen >= 2 * (ranks - 1) / ranks * size / link.bandwidth * (1 - 1e-12)


# -- ways of averaging -----------------------------------------------------------------------------

jobs = st.builds(
    Job,
    st.integers(2, 3000),
    st.integers(1000, 10**12),
    st.integers(5, 5000),
    st.sampled_from([1, 2, 3, 4, 8, 64]),
    ranks_per_node=st.sampled_from([1, 4, 8]),
    across=links,
    inside=links,
    step_seconds=st.floats(1e-3, 100),
)


def test_plain_by_hand() -> None:
    """7e9 fp32 masters: eight replicas in a node at 350 GB/s; and divided by 8 between nodes at 45
    GB/s."""
    still = {"across": Link(45e9, 0.0), "inside": Link(350e9, 0.0)}
    inside = by_name(Job(8, 7 * 10**9, **still))["plain"]
    assert (inside.seconds, inside.sent, inside.sent_across) == (
        pytest.approx(0.14),
        pytest.approx(49e9),
        0,
    )
    across = by_name(Job(8, 7 * 10**9, shards=8, **still))["plain"]
    assert (across.seconds, across.sent) == (
        pytest.approx(0.13611, rel=1e-4),
        pytest.approx(6.125e9),
    )
    assert across.share == pytest.approx(0.13611e-3, rel=1e-4)  # T = 1 000 steps of a second


@given(jobs)
def test_what_holds_of_every_job(job: Job) -> None:
    ways = by_name(job)
    plain = ways["plain"]
    for way in ways.values():
        assert 0 <= way.pause <= way.exposed <= way.seconds
        assert way.share == pytest.approx(way.exposed / (job.interval * job.step_seconds))
        assert 0 <= way.sent_across <= way.sent and way.memory > 0
    assert plain.sent >= 2 * (job.replicas - 1) / job.replicas * job.own * job.value_bytes * (
        1 - 1e-9
    )
    assert ways["streaming"].pause <= ways["streaming"].exposed / job.fragments * (1 + 1e-12)
    assert ways["overlapped"].exposed == max(
        0.0, plain.seconds - job.overlap_steps * job.step_seconds
    )
    assert ways["exact local"].sent == 0
    if not job.crosses:
        assert all(way.sent_across == 0 for way in ways.values())


def test_bytes_of_compressed_ways_and_of_shards() -> None:
    still = Link(45e9, 0.0)
    ways = by_name(Job(64, 10**9, shards=8, across=still))
    assert ways["compressed bf16"].sent == pytest.approx(ways["plain"].sent / 2)
    assert ways["compressed int8"].sent == pytest.approx(ways["plain"].sent / 4 * cost.INT8_BYTES)
    assert hdet.converge.Compressed("int8").block == 256  # which INT8_BYTES assumes
    # Buckets are filled before they are compressed, so there are as many; and each is exchanged in
    # N - 1 messages, twice.
    slow = by_name(Job(64, 10**9, shards=8, across=Link(1e30, 1e-5)))
    assert (
        slow["compressed bf16"].seconds
        == slow["compressed int8"].seconds
        == pytest.approx(15 * 2 * 63 * 1e-5)
    )
    assert slow["compressed int8"].memory == pytest.approx(
        (8 + 4 / 64) * 10**9 / 8 + 2 * 32 * 2**20
    )
    told = (
        3 * cost.all_reduce(8 * 64, 64 * 8, still).sent
    )  # who is finite, before three of four fragments
    assert ways["streaming"].sent == pytest.approx(ways["plain"].sent + told, rel=1e-9)
    assert slow["streaming"].seconds == pytest.approx(
        4 * slow["plain"].seconds + 3 * 2 * 9 * 1e-5
    )  # buckets a fourth as large
    assert by_name(Job(64, 10**9, shards=16, across=still))["plain"].sent == pytest.approx(
        ways["plain"].sent / 2
    )


def test_thresholds_named_in_docs_scaling() -> None:
    """Compressed pays below 1 + ceil(log2 N) + (1 - c / b) bucket / (alpha B) replicas, c bytes
    on the wire, the exact local converge below b B_memory / (4 B) - 1 steps."""
    bucket, across = 32 * 2**20, Link(45e9, 1e-5)
    for way, each, about in (("compressed bf16", 2, 44), ("compressed int8", 1 + 4 / 256, 63)):
        limit = 1 + 6 + (1 - each / 4) * bucket / (across.latency * across.bandwidth)
        assert round(limit) == about  # as the page says
        for replicas, pays in ((int(0.85 * limit), True), (int(1.15 * limit), False)):
            ways = by_name(Job(replicas, 10**11, shards=8))
            assert (ways[way].seconds < ways["plain"].seconds) == pays
    limit = 4 * 3e12 / (4 * 45e9) - 1
    for interval, pays in ((int(0.9 * limit), True), (int(1.1 * limit), False)):
        ways = by_name(Job(1000, 10**11, interval, shards=8, across=Link(45e9, 0.0)))
        assert (ways["exact local"].seconds < ways["plain"].seconds) == pays


# -- the controller at 1 024 replicas --------------------------------------------------------------


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="bytes of CPython's objects")
@pytest.mark.parametrize(("controller", "knobs"), [(ProbeRule, 1), (SoftmaxController, 4)])
def test_an_engine_keeps_less_than_100_kb_at_1024_replicas(controller: Any, knobs: int) -> None:
    names = [KnobSpec(f"lr/{k}", 0.3) for k in range(knobs)]
    numbers = random.Random(0)
    losses: list[float | None] = [numbers.random() for _ in range(1024)]
    rows = [[numbers.random() for _ in range(8)] for _ in range(1024)]

    def cycle(engine: Engine) -> None:
        engine.tick()
        engine.close(losses, {"probe": rows}, scheduled=[1.0] * knobs, floor=[0.1] * knobs)
        engine.multipliers()

    cycle(Engine(names, 1024, Clock(1, total_steps=10), controller()))
    tracemalloc.start()
    try:
        engine = Engine(names, 1024, Clock(1, total_steps=10), controller())
        cycle(engine)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 100e3
    assert kept == pytest.approx(cost.controller_bytes(1024, knobs), rel=0.2)
