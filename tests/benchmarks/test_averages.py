"""The machinery of benchmarks.averages and overhead: what is averaged and counted, the fit, and
whether the cost model counts what the code does. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hdet
from benchmarks import averages, harness, overhead
from benchmarks import scaling as cost
from benchmarks.scaling import Job, Link, Traffic

from ..distributed import run_ranks

WIDTHS = (16, 24)


def agree(rank: int, world_size: int) -> list[str]:
    """Names of layouts and sides whose tensors are not the mean over this rank's peers."""
    wrong = []
    for layout, build in averages.LAYOUTS.items():
        torch.manual_seed(rank)
        tensors, replicas = build(WIDTHS[0])
        for tensor in tensors:
            tensor.normal_()  # DDP has made them alike
        sides = averages.sides_of(tensors, replicas)
        rows = torch.zeros(replicas.count, sum(t.numel() for t in tensors))
        rows[replicas.index] = torch.cat([t.reshape(-1) for t in tensors])
        torch.distributed.all_reduce(rows, group=replicas.peer_group)
        for name, (call, result) in sides.items():
            call()
            mean = rows.sum(0) if name == "floor" else rows.mean(0)
            found = torch.cat([t.reshape(-1) for t in result()])
            if not (torch.allclose(found, mean, rtol=1e-5, atol=1e-6) and rows.std(0).max() > 0):
                wrong.append(f"{layout}: {name}")
    return wrong


def test_every_side_of_every_layout_averages_its_peers() -> None:
    assert run_ranks(agree, 4) == [[]] * 4


def test_layouts_print_write_and_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_four = lambda *_: run_ranks(averages.of_layouts, 4, WIDTHS, 1)[0]
    monkeypatch.setattr(averages, "spawn", on_four)
    path = tmp_path / "lines.jsonl"
    averages.main(["layouts", "--quick", "--processes", "4", "--json", str(path)])
    assert "HSDP, 4 processes, 2 replicas: 32 tensors" in capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    expected = []
    for width in WIDTHS:  # 4 layers in fp32, of 4 vectors and 12 squares
        norms, matrices = 4 * 4 * 4 * width, 4 * 4 * 12 * width * width
        whole = norms + matrices
        expected += [("DDP", 4, whole), ("HSDP", 2, whole // 2)]
        expected += [("tp x pp x dp", 2, norms + matrices // 2)]
    found = [(record["layout"], record["replicas"], record["bytes"]) for record in records]
    assert sorted(found) == sorted(expected)
    for record in records:
        assert record["tensors"] == 32 and record["processes"] == 4
        for side, row in record["rows"].items():
            ring = 2 * (record["replicas"] - 1)
            assert row["sent"] == pytest.approx(ring / record["replicas"] * record["bytes"])
            assert row["calls"] == row["messages"] / ring == (32 if side == "per parameter" else 1)
            assert row["ratio"] > 0 and row["median_ms"] >= row["best_ms"] > 0
    averages.main(["--fit", str(path)])
    out = capsys.readouterr().out
    assert "floor: alpha " in out and "ours: alpha " in out and "not fitted: 4 points" in out


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sent = [(2, 1e5), (6, 1e5), (2, 1e7)]
    link = averages.fit([(Traffic(m, s), m * 1e-4 + s / 2e9) for m, s in sent])
    assert (link.latency, link.bandwidth) == pytest.approx((1e-4, 2e9))


TENSORS, SIZE, BUCKET = 24, 1024, 32 * 1024  # in fp32: three buckets of 32 KiB, without a gap


def count(rank: int, world_size: int) -> dict[str, tuple[int, float]]:
    """Messages and bytes of a rank in one cycle of each way, through the real implementation."""
    of = hdet.converge
    ways = {
        "plain": of.Plain(),
        "compressed bf16": of.Compressed("bf16"), "compressed int8": of.Compressed("int8"),
        "outer step": of.Outer(), "exact local": of.ExactLocal(),
    }  # fmt: skip
    found = {}
    for name, way in ways.items():
        cycle = averages.cycle_of(way, [SIZE] * TENSORS, 2 * BUCKET)  # in two, in turn
        with harness.counted() as calls:
            cycle()
        found[name] = (sum(c.messages for c in calls), sum(c.sent for c in calls))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_model_counts_what_the_code_does(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second a message and any bandwidth, the model's seconds are messages.

    Whether an all-reduce is a ring or a tree is for the library to choose; `counted` takes
    rings."""
    ring = lambda size, ranks, link: cost.ring_all_reduce(size, ranks)
    monkeypatch.setattr(cost, "all_reduce", ring)
    slow = Link(1e30, 1.0)
    job = Job(
        ranks, TENSORS * SIZE, across=slow, inside=slow, bucket_bytes=BUCKET,
        ranks_per_node=ranks // 2,
    )  # fmt: skip
    expected = {way.name: pytest.approx((way.seconds, way.sent)) for way in cost.ways(job)}
    expected["exact local"] = (0, 0)  # its seconds are spent in memory
    assert run_ranks(count, ranks) == [expected] * ranks


def test_a_decision_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["decision", "--replicas", "16", "--repeats", "2"])
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    assert printed[4].startswith("|  | time, goal 5 ms | memory, goal 100 kB |")
    keys = ("controller", "knobs", "statistics_bytes")
    of = [("probe", 1, 16 * 13 * 8), ("probe", 4, 16 * 13 * 8)]
    of += [("softmax", 1, 16 * 3 * 8), ("softmax", 4, 16 * 3 * 8)]  # with the schedule's mark
    assert [tuple(line[key] for key in keys) for line in lines] == of
