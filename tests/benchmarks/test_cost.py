"""The cost model: collectives against values by hand, invariants of the ways of averaging, and the controller's own cost."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import sys
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdet
from benchmarks.scaling import cost
from benchmarks.scaling.cost import Job, Link, Traffic
from hdet.core import engine as engine_module
from hdet.core.clock import Clock
from hdet.core.engine import Engine, KnobSpec
from hdet.core.rules import ProbeRule, SoftmaxController
from hdet.core.rules.regression import slopes
from hdet.core.spread import assignment

sizes = st.floats(1, 1e12)
counts = st.integers(2, 5000)
links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2))


def by_name(job: Job) -> dict[str, cost.Way]:
    return {way.name.split(",")[0]: way for way in cost.ways(job)}


# -- collectives -------------------------------------------------------------------------------------------------------------


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


def test_seconds_by_hand() -> None:
    assert Link(100.0, 0.5).seconds(Traffic(6, 1200)) == 6 * 0.5 + 12


@given(sizes, sizes, counts, links)
def test_more_bytes_take_longer(size: float, more: float, ranks: int, link: Link) -> None:
    assert link.seconds(cost.all_reduce(size + more, ranks, link)) >= link.seconds(cost.all_reduce(size, ranks, link))


@given(sizes, counts, links)
def test_an_all_reduce_is_the_quicker_of_two_and_never_below_the_bandwidth_bound(size: float, ranks: int, link: Link) -> None:
    ring, tree = cost.ring_all_reduce(size, ranks), cost.tree_all_reduce(size, ranks)
    chosen = link.seconds(cost.all_reduce(size, ranks, link))
    assert chosen == min(link.seconds(ring), link.seconds(tree))
    assert chosen >= 2 * (ranks - 1) / ranks * size / link.bandwidth * (1 - 1e-12)


def test_few_bytes_between_many_go_through_trees_and_many_between_few_go_round() -> None:
    link = Link(45e9, 1e-5)
    assert cost.all_reduce(16384, 1024, link) == cost.tree_all_reduce(16384, 1024)
    assert cost.all_reduce(1e9, 8, link) == cost.ring_all_reduce(1e9, 8)


@given(sizes, st.integers(1, 64), st.integers(1, 500))
def test_two_levels_send_the_bytes_of_one_flat_ring(size: float, inside: int, nodes: int) -> None:
    local, across = cost.hierarchical(size, inside, nodes, Link(1e9, 0.0))  # without latency nothing beats a ring
    assert local.sent + across.sent == pytest.approx(cost.ring_all_reduce(size, inside * nodes).sent)


# -- ways of averaging -------------------------------------------------------------------------------------------------------

jobs = st.builds(
    Job, st.integers(2, 3000), st.integers(1000, 10**12), st.integers(5, 5000), st.sampled_from([1, 2, 3, 4, 8, 64]),
    ranks_per_node=st.sampled_from([1, 4, 8]), across=links, inside=links, step_seconds=st.floats(1e-3, 100),
)  # fmt: skip


def test_plain_by_hand() -> None:
    """7e9 fp32 masters: eight replicas in a node at 350 GB/s; and divided by 8 between nodes at 45 GB/s."""
    still = {"across": Link(45e9, 0.0), "inside": Link(350e9, 0.0)}
    inside = by_name(Job(8, 7 * 10**9, **still))["plain"]
    assert (inside.seconds, inside.sent, inside.sent_across) == (pytest.approx(0.14), pytest.approx(49e9), 0)
    across = by_name(Job(8, 7 * 10**9, shards=8, **still))["plain"]
    assert (across.seconds, across.sent) == (pytest.approx(0.13611, rel=1e-4), pytest.approx(6.125e9))
    assert across.share == pytest.approx(0.13611e-3, rel=1e-4)  # T = 1 000 steps of a second


def test_latency_is_paid_for_every_bucket() -> None:
    job = Job(2, 10 * 2**20, value_bytes=4, bucket_bytes=2**20, ranks_per_node=1, across=Link(1e30, 1.0))
    assert by_name(job)["plain"].seconds == pytest.approx(40 * 2)  # 40 collectives, two messages each


@given(jobs)
def test_what_holds_of_every_job(job: Job) -> None:
    ways = by_name(job)
    plain = ways["plain"]
    for way in ways.values():
        assert 0 <= way.pause <= way.exposed <= way.seconds
        assert way.share == pytest.approx(way.exposed / (job.interval * job.step_seconds))
        assert 0 <= way.sent_across <= way.sent and way.memory > 0
    assert plain.sent >= 2 * (job.replicas - 1) / job.replicas * job.own * job.value_bytes * (1 - 1e-9)
    assert ways["streaming"].pause <= ways["streaming"].exposed / job.fragments * (1 + 1e-12)
    assert ways["overlapped"].exposed == max(0.0, plain.seconds - job.overlap_steps * job.step_seconds)
    assert ways["exact local"].sent == 0
    if not job.crosses:
        assert all(way.sent_across == 0 for way in ways.values())


@given(jobs)
def test_a_longer_interval_makes_the_same_average_cheaper(job: Job) -> None:
    longer = by_name(dataclasses.replace(job, interval=2 * job.interval))
    for name, way in by_name(job).items():
        if name == "exact local":  # its work is in the steps
            assert longer[name].share == pytest.approx(way.share, rel=0.2)
        else:
            assert longer[name].share == pytest.approx(way.share / 2)


def test_bytes_of_compressed_ways_and_of_shards() -> None:
    still = Link(45e9, 0.0)
    ways = by_name(Job(64, 10**9, shards=8, across=still))
    assert ways["compressed bf16"].sent == pytest.approx(ways["plain"].sent / 2)
    assert ways["compressed int8"].sent == pytest.approx(ways["plain"].sent / 4 * cost.INT8_BYTES)
    assert hdet.converge.Compressed("int8").block == 256  # which INT8_BYTES assumes
    # Buckets are filled before they are compressed, so there are as many; and each is exchanged in N - 1 messages, twice.
    slow = by_name(Job(64, 10**9, shards=8, across=Link(1e30, 1e-5)))
    assert slow["compressed bf16"].seconds == slow["compressed int8"].seconds == pytest.approx(15 * 2 * 63 * 1e-5)
    assert slow["compressed int8"].memory == pytest.approx((8 + 4 / 64) * 10**9 / 8 + 32 * 2**20)
    told = 3 * cost.all_reduce(8 * 64, 64 * 8, still).sent  # who is finite, before three of four fragments
    assert ways["streaming"].sent == pytest.approx(ways["plain"].sent + told, rel=1e-9)
    assert slow["streaming"].seconds == pytest.approx(4 * slow["plain"].seconds + 3 * 2 * 9 * 1e-5)  # buckets a fourth as large
    assert by_name(Job(64, 10**9, shards=16, across=still))["plain"].sent == pytest.approx(ways["plain"].sent / 2)


@pytest.mark.parametrize(
    ("replicas", "shards", "peers", "offered"),
    [(64, 1, 8, True), (64, 2, 4, True), (64, 8, 1, False), (64, 16, 1, False), (8, 1, 8, False), (12, 1, 8, False), (4, 1, 4, False)],
)
def test_two_levels_are_offered_where_nodes_hold_several_peers(replicas: int, shards: int, peers: int, offered: bool) -> None:
    job = Job(replicas, 10**9, shards=shards)
    assert job.peers_per_node == peers
    assert ("hierarchical" in by_name(job)) == offered


def test_two_levels_relieve_the_links_between_nodes() -> None:
    ways = by_name(Job(64, 10**9, across=Link(45e9, 0.0)))
    assert ways["hierarchical"].sent_across == pytest.approx(ways["plain"].sent / (2 * 63 / 64) * (2 * 7 / 8) / 8)
    assert ways["hierarchical"].seconds < ways["plain"].seconds


def test_the_converge_is_a_part_of_the_gradients_traffic() -> None:
    job = Job(64, 10**9, interval=250)
    assert by_name(job)["plain"].sent == pytest.approx(cost.gradients(job).sent)  # once in 250 steps


def test_thresholds_named_in_docs_scaling() -> None:
    """Compressed pays below 1 + ceil(log2 N) + (1 - c / b) bucket / (alpha B) replicas, c bytes on the wire, the exact local converge below
    b B_memory / (4 B) - 1 steps."""
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 1}, "nobody to be averaged with"),
        ({"replicas": True}, "replicas is True"),
        ({"parameters": 0}, "parameters is 0"),
        ({"shards": 0}, "shards is 0"),
        ({"interval": 1.5}, "interval is 1.5"),
        ({"value_bytes": math.nan}, "value_bytes is nan"),
        ({"step_seconds": math.inf}, "step_seconds is inf"),
        ({"bucket_bytes": 0}, "bucket_bytes is 0"),
        ({"interval": 3}, "at least fragments"),
        ({"interval": 10, "overlap_steps": 10}, "above overlap_steps"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(**{"replicas": 8, "parameters": 10**9, **change})


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 1e-5), (-1, 0), (math.nan, 0), (1e9, -1e-9), (1e9, math.nan), (1e9, math.inf)])
def test_a_link_that_cannot_be_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="it must be"):
        Link(bandwidth, latency)


# -- the controller at 1 024 replicas ----------------------------------------------------------------------------------------


def test_bytes_of_the_slots() -> None:
    job = Job(1024, 10**9, shards=64)
    assert cost.statistics(job).size == 24_576
    assert cost.statistics(job, chunks=8).size == 106_496
    assert cost.statistics(job).seconds == pytest.approx(32e-5 + 2 * 24576 / 45e9)  # 2 log2(65 536) messages


def test_an_engine_draws_once_a_cycle() -> None:
    engine = Engine([KnobSpec("a", 0.3), KnobSpec("b", 0.1)], 16, Clock(2))
    with mock.patch.object(engine_module, "assignment", wraps=assignment) as drawn:
        for _ in range(5):
            table = engine.multipliers()
            engine.tick()
            assert engine.multipliers() is table
            outcome = engine.close([1.0] * 16, scheduled=[1.0, 1.0])
            assert outcome.multipliers is table and engine.multipliers() != table
    assert drawn.call_count == 2 * 6


def test_an_engine_that_is_given_another_state_draws_again() -> None:
    donor = Engine([KnobSpec("a", 0.3)], 16, Clock(1), seed=5)
    engine = Engine([KnobSpec("a", 0.3)], 16, Clock(1), seed=6)
    assert engine.multipliers() != donor.multipliers()
    engine.load_state_dict(donor.state_dict())
    assert engine.multipliers() == donor.multipliers()


@pytest.mark.parametrize("knob", ["lr", "lr/a b", "größe"])
def test_an_assignment_is_still_the_order_of_the_hashes(knob: str) -> None:
    places = assignment(3, 7, knob, 300)
    hashes = [hashlib.sha256(f"3/7/{knob}/{r}".encode()).digest() for r in range(300)]
    assert [hashes[r] for r in sorted(range(300), key=places.__getitem__)] == sorted(hashes)


def test_slopes_are_still_those_of_the_plain_sums() -> None:
    numbers = random.Random(1)
    table = [[1 + 0.1 * numbers.random() for _ in range(50)] for _ in range(3)]
    probes = [None if r == 7 else [numbers.random() for _ in range(4)] for r in range(50)]
    found = slopes(table, probes)
    assert found is not None
    used = [r for r in range(50) if r != 7]
    design = []
    for knob in table:
        logs = [math.log(knob[r]) for r in used]
        centre = math.fsum(logs) / len(logs)
        design.append([x - centre for x in logs])
    for c in range(4):  # the normal equations hold
        values = [probes[r][c] for r in used]  # type: ignore[index]
        mean = math.fsum(values) / len(values)
        for k in range(3):
            fitted = math.fsum(design[k][i] * found[j][c] * design[j][i] for i in range(len(used)) for j in range(3))
            assert fitted == pytest.approx(math.fsum(design[k][i] * (values[i] - mean) for i in range(len(used))), rel=1e-9)


@pytest.mark.parametrize("row", [[1.0, math.nan], [math.inf, 1.0], [math.inf, -math.inf], [1.0, -math.inf]])
def test_a_row_with_anything_else_than_numbers_is_left_out(row: list[float]) -> None:
    engine = Engine([KnobSpec("a", 0.3)], 2, Clock(1), ProbeRule())
    engine.tick()
    assert engine.close([1.0, 1.0], {"probe": [[1.0, 2.0], row]}, scheduled=[1.0]).left_out == [1]


def test_finite_numbers_count_however_large_their_sum_is() -> None:
    engine = Engine([KnobSpec("a", 0.3)], 2, Clock(1))
    engine.tick()
    assert engine.close([1.0, 1.0], {"probe": [[1e308, 1e308], [1e308, -1e308]]}, scheduled=[1.0]).left_out == []


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="bytes of CPython's objects")
@pytest.mark.parametrize("controller", [ProbeRule, SoftmaxController])
@pytest.mark.parametrize("knobs", [1, 4])
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
