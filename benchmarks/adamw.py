"""FusedAdamW beside torch.optim.AdamW(fused=True): time of a step, bytes per parameter, GB/s and the ratio, as JSON lines.

    python benchmarks/adamw.py [--device cpu|cuda] [--threads N] [--repeats N] [--shapes NAME ...]

The two alternate, and each figure is a median: compare the ratio, not times from different runs. Both read gradient, parameter
and two moments and write the last three: 28 bytes a parameter. "copy" is torch's copy of one large tensor in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hdet import kernels
from hdet.jobs.model import GPT, GPTConfig
from hdet.optim import FusedAdamW

BYTES_PER_PARAMETER = 28


def main_job() -> list[tuple[int, ...]]:
    model = GPT(GPTConfig(width=64, layers=2, heads=4, context=64))
    return [tuple(param.shape) for param in model.parameters()]


SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "main job": main_job,
    "one of 2^24": lambda: [(1 << 24,)],
    "1000 x 1000": lambda: [(1000,)] * 1000,
}


def seconds(call: Callable[[], object], device: str, calls: int) -> float:
    """Wall-clock seconds of one call, over `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def make(cls: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]], device: str, **options: Any) -> Callable[[], object]:
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return cls(params, lr=1e-4, **options).step


def compare(name: str, device: str, repeats: int) -> dict[str, object]:
    shapes = SHAPES[name]()
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    calls = max(1, (1 << 20) // elements)
    steps = {"hdet": make(FusedAdamW, shapes, device), "torch_fused": make(torch.optim.AdamW, shapes, device, fused=True)}
    times: dict[str, list[float]] = {key: [] for key in steps}
    for repeat in range(repeats + 2):
        for key, step in steps.items():
            elapsed = seconds(step, device, calls)
            if repeat >= 2:  # two to warm up
                times[key].append(elapsed)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "benchmark": "adamw",
        "shapes": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "tensors": len(shapes),
        "parameters": elements,
        "bytes_per_parameter": BYTES_PER_PARAMETER,
        **{f"{key}_us": round(1e6 * value, 2) for key, value in medians.items()},
        **{f"{key}_gb_s": round(BYTES_PER_PARAMETER * elements / value / 1e9, 2) for key, value in medians.items()},
        "ratio": round(medians["hdet"] / medians["torch_fused"], 3),
    }


def copy_bandwidth(device: str, repeats: int) -> dict[str, object]:
    source, target = torch.randn(1 << 24, device=device), torch.empty(1 << 24, device=device)
    median = statistics.median(seconds(lambda: target.copy_(source), device, 1) for _ in range(repeats + 2))
    return {"benchmark": "copy", "parameters": 1 << 24, "bytes_per_parameter": 8, "gb_s": round(8 * (1 << 24) / median / 1e9, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels.select(arguments.device, torch.device(arguments.device))  # says why where it is not usable
    print(json.dumps(copy_bandwidth(arguments.device, arguments.repeats)), flush=True)
    for name in arguments.shapes:
        print(json.dumps(compare(name, arguments.device, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
