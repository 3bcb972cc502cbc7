"""The cost model as a small table, or as one JSON object.

python -m benchmarks.scaling --parameters 70e9 --replicas 1024 --shards 64 --bandwidth 45e9
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.scaling import cost
from benchmarks.scaling.cost import Job, Link

_JOB = {field.name: field.default for field in dataclasses.fields(Job)}
_ACROSS, _INSIDE = Job(2, 1).across, Job(2, 1).inside

ARGUMENTS: dict[str, tuple[type, Any, str]] = {
    "interval": (int, _JOB["interval"], "T, steps between averages"),
    "shards": (
        int,
        _JOB["shards"],
        "ranks that divide a replica's parameters among them: tp x pp x fsdp",
    ),
    "bandwidth": (
        float,
        _ACROSS.bandwidth,
        "between nodes, bytes per second that each rank can send while all do",
    ),
    "latency": (float, _ACROSS.latency, "between nodes, seconds a message"),
    "bandwidth_inside": (float, _INSIDE.bandwidth, "the same inside a node"),
    "latency_inside": (float, _INSIDE.latency, "the same inside a node"),
    "ranks_per_node": (int, _JOB["ranks_per_node"], "GPUs of a node"),
    "step_seconds": (float, _JOB["step_seconds"], "an optimizer step without HDET"),
    "value_bytes": (float, _JOB["value_bytes"], "of an averaged parameter: 4 for fp32 masters"),
    "gradient_bytes": (
        float,
        _JOB["gradient_bytes"],
        "of a gradient in the all-reduce between replicas",
    ),
    "memory_bandwidth": (
        float,
        _JOB["memory_bandwidth"],
        "bytes per second of a rank's own memory",
    ),
    "bucket_bytes": (float, _JOB["bucket_bytes"], "of one collective"),
    "fragments": (int, _JOB["fragments"], "of streaming"),
    "overlap_steps": (int, _JOB["overlap_steps"], "steps that an overlapped average may take"),
    "knobs": (int, 1, "hyperparameters explored"),
    "chunks": (int, 8, "mini-batches of the probe; 0 for a controller without one"),
}
"""Name: kind, default, help. Each is an option of the command."""


def describe(
    replicas: int, parameters: int, settings: Mapping[str, Any], *, as_json: bool = False
) -> Iterator[str]:
    """Lines for N replicas of a model; ``settings`` are some of `ARGUMENTS`.

    Raises:
        ValueError: an argument out of its range.
    """
    given = {name: settings.get(name, default) for name, (_, default, _) in ARGUMENTS.items()}
    knobs, chunks = given.pop("knobs"), given.pop("chunks")
    for name, value, least in (("knobs", knobs, 1), ("chunks", chunks, 0)):
        if value < least:
            raise ValueError(f"{name} is {value!r}: it must be a whole number, at least {least}")
    across = _link("between nodes", given.pop("bandwidth"), given.pop("latency"))
    inside = _link("inside a node", given.pop("bandwidth_inside"), given.pop("latency_inside"))
    job = Job(replicas, parameters, across=across, inside=inside, **given)
    return (
        iter([json.dumps(_record(job, knobs, chunks))]) if as_json else _lines(job, knobs, chunks)
    )


def _link(where: str, bandwidth: float, latency: float) -> Link:
    try:
        return Link(bandwidth, latency)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _record(job: Job, knobs: int, chunks: int) -> dict[str, Any]:
    traffic = cost.gradients(job)
    return {
        "job": dataclasses.asdict(job),
        "ways": [dataclasses.asdict(way) for way in cost.ways(job)],
        "gradients": {
            "sent_a_step": traffic.sent,
            "seconds_a_step": job.between_replicas.seconds(traffic),
        },
        "statistics": dataclasses.asdict(cost.statistics(job)),
        "statistics_with_probe": dataclasses.asdict(cost.statistics(job, chunks))
        if chunks
        else None,
        "controller": {
            "seconds": cost.controller_seconds(job.replicas, knobs),
            "bytes": cost.controller_bytes(job.replicas, knobs),
            "knobs": knobs,
        },
    }


def _lines(job: Job, knobs: int, chunks: int) -> Iterator[str]:
    ranks = job.replicas * job.shards
    yield (
        f"{_count(job.replicas)} replicas of {_count(job.shards)} rank{'s' * (job.shards > 1)} "
        f"({_count(ranks)} ranks, {job.ranks_per_node} a node); "
        f"{_power(job.parameters)} parameters, {_power(job.own)} a rank"
    )
    yield (
        f"averaged at {job.value_bytes:g} bytes every {_count(job.interval)} steps of "
        f"{_seconds(job.step_seconds)}, in collectives of {_bytes(job.bucket_bytes)}"
    )
    yield (
        f"each rank: between nodes {_wire(job.across)}; inside a node {_wire(job.inside)}; memory "
        f"{_bytes(job.memory_bandwidth)}/s"
    )
    if 16 * job.own > 80e9:
        yield (
            f"note: a rank would hold {_bytes(16 * job.own)} (16 bytes a parameter): divide the "
            "replica with --shards"
        )
    yield ""
    yield (
        f"{'way of averaging':<24}{'sent a rank':>12}{'between nodes':>15}{'a cycle':>10}"
        f"{'waited for':>12}{'longest':>10}{'of the run':>12}"
        f"{'+ memory':>10}"
    )
    for way in cost.ways(job):
        yield (
            f"{way.name:<24}{_bytes(way.sent):>12}{_bytes(way.sent_across):>15}{_seconds(way.seconds):>10}{_seconds(way.exposed):>12}"
            f"{_seconds(way.pause):>10}{_percent(way.share):>12}{_bytes(way.memory):>10}"
        )
    yield ""
    traffic = cost.gradients(job)
    seconds = job.between_replicas.seconds(traffic)
    yield (
        f"gradients between replicas: shared {_bytes(traffic.sent)} and {_seconds(seconds)} a "
        "step, mostly behind the backward pass; local none"
    )
    if seconds > job.step_seconds:
        yield (
            f"  note: that alone is longer than a step of {_seconds(job.step_seconds)}: see "
            "--step-seconds"
        )
    plain = job.own * job.value_bytes / (job.own * job.gradient_bytes * job.interval)
    yield f"  plain converge / shared gradients: {_percent(plain)} of the bytes"
    small = cost.statistics(job)
    yield (
        f"statistics: {_bytes(small.size)} over all ranks, {_seconds(small.seconds)} a cycle"
        + _probed(job, chunks)
    )
    yield (
        f"controller: {_seconds(cost.controller_seconds(job.replicas, knobs))} a cycle on every "
        f"rank, {_bytes(cost.controller_bytes(job.replicas, knobs))} kept "
        f"({knobs} knob{'s' * (knobs > 1)})"
    )


def _probed(job: Job, chunks: int) -> str:
    if chunks == 0:
        return ""
    large = cost.statistics(job, chunks)
    return (
        f"; with a probe of {chunks} mini-batches {_bytes(large.size)}, {_seconds(large.seconds)}"
    )


def _wire(link: Link) -> str:
    return f"{_bytes(link.bandwidth)}/s, {_seconds(link.latency)} a message"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


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
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _bytes(value: float) -> str:
    return (
        "0"
        if value == 0
        else _scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))
    )


def _seconds(value: float) -> str:
    return "0" if value == 0 else _scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us")))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"


def _whole(text: str) -> int:
    """1024, and also 70e9."""
    try:
        value = float(text)
        if value == int(value):
            return int(text) if text.lstrip("+-").isdigit() else int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 1024 or 70e9")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="What averaging costs (docs/scaling.md)."
    )
    parser.add_argument("--replicas", type=_whole, default=4, metavar="N", help="(default: 4)")
    parser.add_argument(
        "--parameters",
        type=_whole,
        required=True,
        metavar="P",
        help="of the model; numbers may be written like 45e9",
    )
    for name, (kind, default, text) in ARGUMENTS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_whole if kind is int else float,
            default=default,
            metavar="N" if kind is int else "X",
            help=(f"{text} (default: {default:g})").replace("e+", "e"),
        )
    parser.add_argument("--json", action="store_true", help="print the costs as one JSON object")
    options = vars(parser.parse_args(arguments))
    try:
        lines = describe(
            options.pop("replicas"), options.pop("parameters"), options, as_json=options.pop("json")
        )
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
