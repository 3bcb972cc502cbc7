"""What step.py, replicas.py and average.py share: lists of shapes, the memory they may take, and a
record for each comparison.

A record compares hdet with torch and both with a copy of one large tensor, timed in turn in one
run:

    hdet_ms, torch_ms     medians        ratio       median of hdet / torch, round by round: what to
    look at alone_ms              on CUDA hdet's kernels without Python: replays of a graph of the
    same call bound                 the ratio at which traffic alone would leave hdet and its peer,
    where the peer is hdet in two calls bytes_per_parameter   what hdet reads and writes at least,
    all replicas together gb_s, copy_gb_s       those bytes and the copy's (8 an element) per
    second; of the kernels alone on CUDA of_copy               the one divided by the other cache
    "L2" where the traffic is less than twice the L2: of_copy then says nothing about memory
    launches              kernels of one call, on CUDA, counted on 300 tensors after all timing: the
    profiler slows what follows host_us               time of the call alone, on CUDA, where it
    returns before the device is done scale                 "1/n" where the first dimension of every
    large tensor was divided by n to fit the memory

On CUDA events are around at least 20 ms of calls, so that no launch and no synchronisation is part
of a figure.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdet import kernels

from .harness import alternate, alternate_on_cuda, emit

Shapes = list[tuple[int, ...]]
Call = Callable[[], object]


def gpt2(width: int = 768, layers: int = 12) -> Shapes:
    """The 148 tensors of GPT-2 124M."""
    block = (
        [(width,)] * 2
        + [(3 * width, width), (3 * width,), (width, width), (width,)]
        + [(width,)] * 2
    )
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def layer_of_7b(layers: int = 1) -> Shapes:
    """Transformer layers of a 7B model (Llama 2: width 4096, 11008 inside): 202 million
    parameters in 9 tensors each."""
    return [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008), (4096,), (4096,)] * layers


SHAPES: dict[str, Callable[[], Shapes]] = {
    "GPT-2 124M": gpt2,
    "layer of 7B": layer_of_7b,
    "10 000 x 1 000": lambda: [(1000,)] * 10_000,
    "one of 2^27": lambda: [(1 << 27,)],
}


def numel(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def memory(device: str) -> float:
    """Bytes a comparison may take: on a CPU 8 GB, as other things run there; on CUDA most of what
    is free."""
    return 8e9 if device == "cpu" else 0.8 * torch.cuda.mem_get_info()[0]


def fitted(shapes: Shapes, bytes_per_parameter: float, limit: float) -> tuple[Shapes, int]:
    """The shapes with the first dimension of every large tensor divided by the smallest power of
    two that makes them fit.

    Many small tensors stay as they are.
    """
    divisor = 1
    while numel(_divided(shapes, divisor)) * bytes_per_parameter > limit and _divided(
        shapes, 2 * divisor
    ) != _divided(shapes, divisor):
        divisor *= 2
    return _divided(shapes, divisor), divisor


def _divided(shapes: Shapes, divisor: int) -> Shapes:
    return [
        (max(1, s[0] // divisor), *s[1:]) if torch.Size(s).numel() >= 1 << 16 else s for s in shapes
    ]


COUNTED: Shapes = [(50,)] * 300


@dataclass
class Options:
    """`counting`: kernels are counted, on one short list, and nothing is timed."""

    device: str
    backend: str
    quick: bool
    counting: bool = False

    @property
    def repeats(self) -> int:
        return (5 if self.quick else 7) if self.device == "cuda" else 7 if self.quick else 21

    def wants(self, name: str) -> bool:
        """Whether an operation that is not the first of its file is timed on that list."""
        return self.counting or not self.quick or name == "GPT-2 124M"

    def shapes(self, bytes_per_parameter: float) -> Iterator[tuple[str, Shapes, dict[str, Any]]]:
        """(name, shapes that fit, what to note).

        Quick: an eighth of the memory and no second large list.
        """
        if self.counting:
            yield "300 x 50", COUNTED, {}
            return
        for name, shapes in SHAPES.items():
            if self.quick and name == "layer of 7B":
                continue
            limit = memory(self.device) / (8 if self.quick else 1)
            fit, divisor = fitted(shapes(), bytes_per_parameter + 8, limit)
            yield name, fit, {"scale": f"1/{divisor}"} if divisor > 1 else {}

    def randn(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(shape, device=self.device).to(dtype) for shape in shapes]

    def zeros(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(shape, device=self.device, dtype=dtype) for shape in shapes]


def compare(
    options: Options,
    operation: str,
    name: str,
    shapes: Shapes,
    hdet: Call,
    torchs: Call | None,
    bytes_per_parameter: float,
    **notes: Any,
) -> dict[str, Any]:
    """The record of one comparison, also printed.

    `torchs` may be what hdet itself does in two calls: say so in `notes`.
    """
    backend = kernels.select(options.backend, torch.device(options.device)).name
    key = {
        "benchmark": "launches" if options.counting else "kernels",
        "operation": operation,
        "backend": backend,
    }
    if options.counting:
        record: dict[str, Any] = {**key, "launches": launches(hdet)}
        emit(record)
        return record
    elements = numel(shapes)
    seconds, copied, more = (_on_cuda if options.device == "cuda" else _on_cpu)(
        options, elements, hdet, torchs
    )
    median = {name: statistics.median(values) for name, values in seconds.items()}
    traffic = bytes_per_parameter * elements
    gb_s, copy_gb_s = (
        traffic / median.get("alone", median["hdet"]) / 1e9,
        8 * copied / median["copy"] / 1e9,
    )
    record = {
        **key,
        "shapes": name,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "tensors": len(shapes),
        "parameters": elements,
        "bytes_per_parameter": bytes_per_parameter,
        "hdet_ms": round(1e3 * median["hdet"], 4),
        "gb_s": round(gb_s, 2),
        "copy_gb_s": round(copy_gb_s, 2),
        "of_copy": round(gb_s / copy_gb_s, 3),
    }
    if torchs is not None:
        ratio = statistics.median(
            a / b for a, b in zip(seconds["hdet"], seconds["torch"], strict=True)
        )
        record |= {"torch_ms": round(1e3 * median["torch"], 4), "ratio": round(ratio, 3)}
    if "alone" in median:
        record["alone_ms"] = round(1e3 * median["alone"], 4)
    if options.device == "cuda" and traffic < 2 * torch.cuda.get_device_properties(0).L2_cache_size:
        record["cache"] = "L2"
    record |= more | notes
    emit(record)
    return record


Timed = tuple[dict[str, list[float]], int, dict[str, Any]]
"""seconds of each candidate, elements that the copy copies, more fields of the record"""


def _on_cpu(options: Options, elements: int, hdet: Call, torchs: Call | None) -> Timed:
    copied = min(1 << 26, max(1 << 22, elements))
    source, target = torch.randn(copied), torch.empty(copied)
    candidates: dict[str, Call] = {"hdet": hdet, "copy": lambda: target.copy_(source)}
    if torchs is not None:
        candidates["torch"] = torchs
    return (
        alternate(candidates, options.repeats, calls=max(1, (1 << 20) // max(1, elements))),
        copied,
        {},
    )


def _on_cuda(options: Options, elements: int, hdet: Call, torchs: Call | None) -> Timed:
    """The host's time first: replays and events are next, and nothing here starts the profiler."""
    more: dict[str, Any] = {"host_us": host_us(hdet)}
    copied, copy = cuda_copy()
    candidates = {"hdet": hdet, "copy": copy}
    if torchs is not None:
        candidates["torch"] = torchs
    try:
        graph = graph_of(hdet)
    except RuntimeError as error:
        more["alone_error"] = str(error)
    else:
        candidates["alone"] = graph.replay
    return alternate_on_cuda(candidates, options.repeats), copied, more


@functools.cache
def cuda_copy() -> tuple[int, Call]:
    """(elements, a copy of that many floats): 2^29, or a sixteenth of the memory."""
    count = int(min(1 << 29, torch.cuda.mem_get_info()[0] / 16 / 8))
    source, target = torch.randn(count, device="cuda"), torch.empty(count, device="cuda")
    return count, lambda: target.copy_(source)


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    """What the call launches, captured after a warm-up on a stream beside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def host_us(call: Call) -> float:
    """Median microseconds until the call returns, with an idle device before it."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(times), 1)


def launches(call: Call) -> int | None:
    """Kernels of one call as the profiler counts them; None where it cannot."""
    if not torch.cuda.is_available():
        return None
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA
    ]
    return (
        sum("memcpy" not in e.name.lower() and "memset" not in e.name.lower() for e in events)
        if events
        else None
    )


def free() -> None:
    """Returns what the last comparison held: its tensors must be out of scope."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Run = Callable[[Options], list[dict[str, Any]]]


def main(run: Run, description: str | None) -> None:
    """The command line of one benchmark: records as JSON lines."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="auto", help="auto, cpu, cuda, triton or torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="fewer rounds and less memory")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels.select(
        arguments.backend, torch.device(arguments.device)
    )  # says why where it is not usable
    run(Options(arguments.device, arguments.backend, arguments.quick))
    if arguments.device == "cuda":
        run(Options(arguments.device, arguments.backend, arguments.quick, counting=True))


def torch_adamw(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW on parameters of its own with gradients that others may share."""
    owned = [torch.nn.Parameter(param) for param in params]
    for param, gradient in zip(owned, gradients, strict=True):
        param.grad = gradient
    return torch.optim.AdamW(owned, lr=1e-4, fused=True)
