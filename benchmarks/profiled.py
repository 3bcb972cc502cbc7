"""Optimizer steps, or steps with a converge after each, for a profiler, and nothing else between
its start and its stop. See docs/profiling.md.

    python -m benchmarks.profiled step|converge [--shapes gpt2|small] [--replicas K] [--formats
    NAME|all] [--calls N] [--device cpu|cuda]

On a GPU the region is marked with cudaProfilerStart and cudaProfilerStop; on a CPU torch.profiler
prints the ranges (HDET_NVTX=1). "converge" under torchrun averages across its processes, alone it
averages K co-resident replicas. --formats all: each format in turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hdet

from .harness import parser_of
from .kernels import FORMATS

WIDTH = {"gpt2": 768, "small": 64}


def blocks(width: int) -> torch.nn.Module:
    """The shapes of a GPT-2 (12 blocks; 124M parameters at width 768, of which 38M are the
    embedding)."""
    layer = torch.nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(50257 * width // 768, width),
        torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
    )


def prepare(
    mode: str, model: torch.nn.Module, replicas: int, options: dict[str, Any]
) -> Callable[[], object]:
    """The call to profile, after everything that happens only once."""
    optimizer = hdet.FusedAdamW(model.parameters(), lr=1e-4, **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    if mode == "step" and replicas == 1:
        return optimizer.step
    together = None if dist.is_initialized() else hdet.CoresidentReplicas(model, max(2, replicas))
    ensemble = hdet.Ensemble(optimizer, replicas=together, sync=hdet.Sync(1 << 30))
    if mode == "step":
        return optimizer.step

    def converge() -> None:
        optimizer.step()  # equal replicas would be left alone
        ensemble.converge()

    return converge


def profile(call: Callable[[], object], calls: int, on_gpu: bool) -> None:
    """Some calls that nothing sees, and those that are seen."""
    for _ in range(3):
        call()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    else:
        with torch.profiler.profile() as profiler:
            for _ in range(calls):
                call()
        print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=20))


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("mode", choices=["step", "converge"])
    parser.add_argument("--shapes", default="gpt2", choices=list(WIDTH))
    parser.add_argument("--replicas", type=int, default=1)
    stored = "of parameters, masters and moments"
    parser.add_argument("--formats", default="float32", choices=[*FORMATS, "all"], help=stored)
    parser.add_argument("--calls", type=int, default=10)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    usual = [name for name, of in FORMATS.items() if not (of.wide or of.shifted)]
    for name in usual if arguments.formats == "all" else [arguments.formats]:
        dtype, options = FORMATS[name].dtype, FORMATS[name].options
        model = blocks(WIDTH[arguments.shapes]).to(arguments.device, dtype)
        call = prepare(arguments.mode, model, arguments.replicas, options)
        profile(call, arguments.calls, on_gpu)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
