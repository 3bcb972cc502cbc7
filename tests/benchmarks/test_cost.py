"""The cost model: collectives and averages against values by hand, what holds of every job, the
thresholds that docs/scaling.md names, the controller's own cost, and an optimizer's memory."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import memory
from benchmarks import scaling as cost
from benchmarks.eight_bit import held
from benchmarks.overhead import kept_bytes
from benchmarks.scaling import Job, Link, Traffic
from hdet.optim import FusedAdamW


def by_name(job: Job) -> dict[str, cost.Way]:
    return {way.name.split(",")[0]: way for way in cost.ways(job)}


@pytest.mark.parametrize(("traffic", "messages", "sent"), [
    (cost.reduce_scatter(800, 8), 7, 700), (cost.all_gather(800, 8), 7, 700),
    (cost.ring_all_reduce(800, 4), 6, 1200),  # 6 messages of 200
    (cost.ring_all_reduce(800, 1), 0, 0),
    (cost.tree_all_reduce(800, 5), 6, 1600),  # 3 levels up, 3 down
    (cost.tree_all_reduce(800, 1), 0, 0),
])  # fmt: skip
def test_collectives_by_hand(traffic: Traffic, messages: float, sent: float) -> None:
    assert (traffic.messages, traffic.sent) == (messages, sent)


def test_plain_by_hand() -> None:
    """7e9 fp32 masters: eight replicas in a node at 350 GB/s; and divided by 8 between nodes at 45
    GB/s."""
    still = {"across": Link(45e9, 0.0), "inside": Link(350e9, 0.0)}
    inside = by_name(Job(8, 7 * 10**9, **still))["plain"]
    assert (inside.seconds, inside.sent) == pytest.approx((0.14, 49e9)) and not inside.sent_across
    across = by_name(Job(8, 7 * 10**9, shards=8, **still))["plain"]
    assert (across.seconds, across.sent) == pytest.approx((0.13611, 6.125e9), rel=1e-4)
    assert across.share == pytest.approx(0.13611e-3, rel=1e-4)  # T = 1 000 steps of a second


links = st.builds(Link, st.floats(1e6, 1e12), st.floats(0, 1e-2))
jobs = st.builds(
    Job, st.integers(2, 3000), st.integers(1000, 10**12), st.integers(5, 5000),
    st.sampled_from([1, 2, 3, 4, 8, 64]), ranks_per_node=st.sampled_from([1, 4, 8]), across=links,
    inside=links, step_seconds=st.floats(1e-3, 100),
)  # fmt: skip


@given(jobs)
def test_what_holds_of_every_job(job: Job) -> None:
    ways = by_name(job)
    plain = ways["plain"]
    for way in ways.values():
        assert 0 <= way.pause <= way.seconds and way.memory > 0
        assert way.share == pytest.approx(way.seconds / (job.interval * job.step_seconds))
        assert 0 <= way.sent_across <= way.sent and (job.crosses or not way.sent_across)
    least = 2 * (job.replicas - 1) / job.replicas * job.own * job.value_bytes
    assert plain.sent >= least * (1 - 1e-9) and ways["exact local"].sent == 0


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


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="bytes of CPython's objects")
@pytest.mark.parametrize(("controller", "knobs"), [("probe", 1), ("softmax", 4)])
def test_an_engine_keeps_less_than_100_kb_at_1024_replicas(controller: str, knobs: int) -> None:
    kept = kept_bytes(controller, 1024, knobs)
    assert kept < 100e3
    assert kept == pytest.approx(cost.controller_bytes(1024, knobs), rel=0.2)


@pytest.mark.parametrize("master", [None, "split", "split24"])
def test_bytes_of_a_state_are_those_of_the_table(master: str | None) -> None:
    shapes = [(64, 80), (80,), (4096,)]
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = FusedAdamW(params, master_weights=master, moment_dtype="8bit")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    kept = sum(held({**optimizer.state[param], "step": None}) for param in params)
    found = memory.bytes_of(shapes, master)
    assert found.corrections + found.moments + found.scales == kept
    assert found.gradients == found.weights == sum(param.nbytes for param in params)
    assert sum(math.prod(shape) for shape in memory.llama_3_8b()) == 8_030_261_248
