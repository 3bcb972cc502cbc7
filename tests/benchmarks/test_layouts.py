"""The machinery of benchmarks.layouts, converge and controller: what is averaged and counted, the
fit, and whether the cost model counts what the code does. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from benchmarks import controller, converge, harness, layouts
from benchmarks import scaling as cost
from benchmarks.scaling import Job, Link

from ..distributed import run_ranks

WIDTH = 16


def agree(rank: int, world_size: int) -> list[str]:
    """Names of layouts and sides whose tensors are not the mean over this rank's peers."""
    wrong = []
    for layout, build in layouts.LAYOUTS.items():
        torch.manual_seed(rank)
        tensors, replicas = build(WIDTH)
        for tensor in tensors:
            tensor.normal_()  # DDP has made them alike
        sides = layouts.sides(tensors, replicas)
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
    monkeypatch.setattr(
        layouts,
        "spawn",
        lambda function, count, *arguments: run_ranks(layouts.measure, 4, *arguments)[0],
    )
    path = tmp_path / "lines.jsonl"
    layouts.main(["--quick", "--json", str(path)])
    assert (
        "HSDP, 2 processes, 2 replicas: 32 tensors" in capsys.readouterr().out
    )  # the 2 of --quick, though 4 ran

    records = {
        record["layout"]: record for record in map(json.loads, path.read_text().splitlines())
    }
    norms, matrices = (
        4 * 4 * 4 * WIDTH,
        4 * 4 * 12 * WIDTH * WIDTH,
    )  # 4 layers in fp32, of 4 vectors and 12 squares
    whole = norms + matrices
    expected = {
        "DDP": (4, whole),
        "HSDP": (2, whole // 2),
        "tp x pp x dp": (2, norms + matrices // 2),
    }
    assert {
        name: (record["replicas"], record["bytes"]) for name, record in records.items()
    } == expected
    for record in records.values():
        assert record["tensors"] == 32 and record["processes"] == 4
        for side, row in record["rows"].items():
            ring = 2 * (record["replicas"] - 1)
            assert row["sent"] == pytest.approx(ring / record["replicas"] * record["bytes"])
            assert row["calls"] == row["messages"] / ring == (32 if side == "per parameter" else 1)
            assert row["ratio"] > 0 and row["median_ms"] >= row["best_ms"] > 0


def record(
    layout: str, processes: int, replicas: int, size: int, calls: int, link: tuple[float, float]
) -> dict[str, Any]:
    """A line as if the model were the truth: alpha + n / B, and two cores."""
    alpha, bandwidth = link
    seconds = (
        processes
        / 2
        * (calls * 2 * (replicas - 1) * alpha + 2 * (replicas - 1) / replicas * size / bandwidth)
    )
    row = {
        "median_ms": 1e3 * seconds,
        "messages": calls * 2 * (replicas - 1),
        "sent": 2 * (replicas - 1) / replicas * size,
    }
    return {
        "benchmark": "layouts",
        "layout": layout,
        "processes": processes,
        "replicas": replicas,
        "bytes": size,
        "rows": {"floor": row, "ours": row},
        "on": {"cores": 2},
    }


def test_the_fit_predicts_what_it_has_not_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = (1e-4, 2e9)
    lines = [record("DDP", n, n, size, 1, link) for n in (2, 4) for size in (10**5, 10**7)]
    lines += [record("HSDP", 8, 2, 10**6, 3, link), {"benchmark": "converge"}]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    layouts.main(["--fit", str(path)])
    out = capsys.readouterr().out
    assert "floor: alpha 100 us a message, B 2.00 GB/s a rank" in out and "ours: alpha" in out
    assert "not fitted: 1 points, off by a factor of 1.00 in the median, 1.00 at worst" in out


# -- the cost model beside the code ----------------------------------------------------------------

TENSORS, SIZE, BUCKET = 24, 1024, 32 * 1024  # in fp32: three buckets of 32 KiB, without a gap


def count(rank: int, world_size: int) -> dict[str, tuple[int, float]]:
    """Messages and bytes of a rank in one cycle of each way, through the real implementation."""
    ways = {
        "plain": hdet.converge.Plain(),
        "hierarchical": hdet.converge.Hierarchical(2),
        "compressed bf16": hdet.converge.Compressed("bf16"),
        "compressed int8": hdet.converge.Compressed("int8"),
        "streaming, 2 fragments": hdet.converge.Streaming(2),
        "overlapped, 3 steps": hdet.converge.Overlapped(3),
        "outer step": hdet.converge.Outer(),
        "exact local": hdet.converge.ExactLocal(),
    }
    if world_size < 4:
        del ways["hierarchical"]
    found = {}
    for name, way in ways.items():
        cycle = converge.cycle_of(way, [SIZE] * TENSORS, 2 * BUCKET)  # in two, in turn
        with harness.counted() as calls:
            cycle()
        found[name] = (sum(c.messages for c in calls), sum(c.sent for c in calls))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_model_counts_what_the_code_does(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second a message and any bandwidth, the model's seconds are messages.

    Whether an all-reduce is a ring or a tree is for the library to choose; `counted` takes
    rings."""
    monkeypatch.setattr(
        cost, "all_reduce", lambda size, ranks, link: cost.ring_all_reduce(size, ranks)
    )
    slow = Link(1e30, 1.0)
    job = Job(
        ranks, TENSORS * SIZE, converge.INTERVAL, across=slow, inside=slow, bucket_bytes=BUCKET,
        ranks_per_node=ranks // 2, fragments=2, overlap_steps=3,
    )  # fmt: skip
    expected = {
        way.name: (pytest.approx(way.seconds), pytest.approx(way.sent)) for way in cost.ways(job)
    }
    expected["exact local"] = (0, 0)  # its seconds are spent in memory
    assert run_ranks(count, ranks) == [expected] * ranks


def test_controller(capsys: pytest.CaptureFixture[str]) -> None:
    controller.main(["--replicas", "16", "--repeats", "2"])
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    assert printed[4].startswith("|  | time, goal 5 ms | memory, goal 100 kB |")
    assert [(line["controller"], line["knobs"]) for line in lines] == [
        ("probe", 1),
        ("probe", 4),
        ("softmax", 1),
        ("softmax", 4),
    ]
    assert [line["statistics_bytes"] for line in lines] == [16 * 13 * 8] * 2 + [
        16 * 3 * 8
    ] * 2  # with the mark of the schedule's values
