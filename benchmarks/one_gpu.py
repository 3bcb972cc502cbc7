"""What a GPU says of the kernels in two minutes: a JSON line for each figure, as soon as it is
there.

    python -m benchmarks.one_gpu [--only formats small host newton-schulz buckets] [--device cpu]

Each section answers a question. ``formats``: how near is each number format to a copy's bandwidth,
on CUDA and on Triton? ``small``: what do 10 000 tensors of 1 000 elements take? ``host``: how long
is the host busy with a step? ``newton-schulz``: which way of orthogonalising is fast and exact?
``buckets``: what does an average cost without a wire? Times are medians in milliseconds, of graph
replays where it says "alone". ``--device cpu`` tries the program with small tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hdet
from hdet import kernels
from hdet.converge.buckets import Buckets, Part
from hdet.kernels import StepSettings, StepTensors
from hdet.kernels.spec.eight_bit import count_scales
from hdet.optim.newton_schulz import Iteration, SymmetricProduct, iterate, symmetric_product

BF16, CODES, SPLIT = torch.bfloat16, torch.uint8, torch.int16
SETTINGS = [StepSettings(1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)]
JORDAN = (3.4445, -4.7750, 2.0315)

FORMATS: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (28, {}),
    "bf16, fp32 masters": (28, {"param": BF16, "grad": BF16, "master": torch.float32}),
    "bf16, fp32 gradients and masters": (30, {"param": BF16, "master": torch.float32}),
    "fp32, bf16 moments": (20, {"moment": BF16, "stochastic": 0}),
    "bf16 split": (26, {"param": BF16, "grad": BF16, "master": SPLIT}),
    "8 bits": (16, {"moment": CODES}),
    "8 bits, split": (14, {"param": BF16, "grad": BF16, "master": SPLIT, "moment": CODES}),
    "bf16 throughout, stochastic": (
        14,
        {"param": BF16, "grad": BF16, "moment": BF16, "stochastic": 0},
    ),
    "float32, gradients off by one element": (28, {"shifted": True}),
}
"""(bytes that a step moves for each parameter, options of `Machine.step_of`)"""


def gpt2(width: int, layers: int, tokens: int) -> list[tuple[int, ...]]:
    block = [(width,)] * 2 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,)] * 2 + [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(tokens, width), (1024, width), *block * layers, (width,), (width,)]


def say(**record: object) -> None:
    print(json.dumps({"benchmark": "one_gpu", **record}), flush=True)


class Machine:
    """A device, and how calls are timed on it."""

    def __init__(self, device: str) -> None:
        self.device, self.is_gpu = device, device == "cuda"
        self.backends = ("cuda", "triton") if self.is_gpu else ("cpu",)
        self.shapes = gpt2(768, 12, 50257) if self.is_gpu else gpt2(32, 1, 101)

    def time(self, call: Callable[[], object], calls: int = 10) -> float:
        """Milliseconds until the device has done one call, with the host's part."""
        for _ in range(3):
            call()
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / calls)
        return statistics.median(times)

    def time_alone(self, call: Callable[[], object]) -> float:
        """Without the host: replays of a graph of the call."""
        if not self.is_gpu:
            return self.time(call)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.time(graph.replay)

    def make(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape, device=self.device).to(dtype) for shape in shapes]

    def make_shifted(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """Views of a bucket in which every tensor begins one element after a boundary of 16
        bytes."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.randn(sum(n + 16 for n in sizes), device=self.device).to(dtype)
        made, at = [], 1
        for shape, size in zip(shapes, sizes, strict=True):
            made.append(flat[at : at + size].view(shape))
            at += -(-(size + 2) // 8) * 8
        return made

    def step_of(
        self,
        shapes: Sequence[tuple[int, ...]],
        backend: str,
        *,
        param: torch.dtype = torch.float32,
        grad: torch.dtype = torch.float32,
        master: torch.dtype | None = None,
        moment: torch.dtype = torch.float32,
        stochastic: int | None = None,
        shifted: bool = False,
    ) -> Callable[[], object]:
        """A step of AdamW's plan. Moments in codes: of tensors of 4 096 elements and more."""
        params = self.make(shapes, param)
        coded = [moment == CODES and p.numel() >= 4096 for p in params]
        kinds = [moment if c or moment != CODES else torch.float32 for c in coded]

        def zeros(dtypes: Sequence[torch.dtype]) -> list[Tensor]:
            pairs = zip(shapes, dtypes, strict=True)
            return [torch.zeros(shape, device=self.device, dtype=dtype) for shape, dtype in pairs]

        def scales() -> list[Tensor | None] | None:
            if not any(coded):
                return None
            return [
                torch.zeros(count_scales(p.numel()), device=self.device) if c else None
                for p, c in zip(params, coded, strict=True)
            ]

        tensors = StepTensors(
            "adamw", [params], [0] * len(params),
            [torch.zeros((), device=self.device) for _ in params], zeros(kinds), zeros(kinds),
            None if master is None else [zeros([master] * len(params))], stochastic=stochastic,
            exp_avg_scales=scales(), exp_avg_sq_scales=scales(),
        )  # fmt: skip
        grads = (self.make_shifted if shifted else self.make)(shapes, grad)
        plan = kernels.step_plan(tensors, backend)
        return lambda: plan.step(grads, SETTINGS)


def formats(machine: Machine) -> None:
    elements = sum(torch.Size(shape).numel() for shape in machine.shapes)
    source = torch.randn(1 << (28 if machine.is_gpu else 20), device=machine.device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / machine.time(lambda: target.copy_(source)) / 1e6
    say(section="formats", name="copy", gb_s=round(copy))
    params = [torch.nn.Parameter(p) for p in machine.make(machine.shapes, torch.float32)]
    for p in params:
        p.grad = torch.randn_like(p)
    peer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    say(
        section="formats",
        name="torch.optim.AdamW(fused=True)",
        ms=round(machine.time(peer.step), 3),
    )
    for backend in machine.backends:
        for name, (size, options) in FORMATS.items():
            ms = machine.time_alone(machine.step_of(machine.shapes, backend, **options))
            of_copy = round(size * elements / ms / 1e6 / copy, 3)
            say(section="formats", backend=backend, name=name, ms=round(ms, 3), of_copy=of_copy)


def small(machine: Machine) -> None:
    shapes = [(1000,)] * (10_000 if machine.is_gpu else 20)
    for backend in machine.backends:
        call = machine.step_of(shapes, backend)
        ms, whole = machine.time_alone(call), machine.time(call)
        say(section="small", backend=backend, ms=round(ms, 3), with_host=round(whole, 3))


def host(machine: Machine) -> None:
    params = [torch.nn.Parameter(torch.zeros(1, device=machine.device)) for _ in range(300)]
    sets = [[torch.zeros(1, device=machine.device) for _ in params] for _ in range(2)]
    for backend in machine.backends:
        optimizer = hdet.FusedAdamW(params, lr=1e-3, backend=backend)
        for fresh in (False, True):
            times = []
            for turn in range(60):
                for p, gradient in zip(params, sets[turn % 2 if fresh else 0], strict=True):
                    p.grad = gradient
                if machine.is_gpu:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                optimizer.step()
                times.append(1e6 * (time.perf_counter() - start))
            us = round(statistics.median(times[10:]), 1)
            say(section="host", backend=backend, new_addresses=fresh, us=us)


def gram(x: Tensor, how: Iteration, product: SymmetricProduct, cuts: Sequence[int]) -> Tensor:
    """Newton-Schulz on the Gram matrix X X^T, begun anew after each of ``cuts`` steps (Zhang,
    Amsel, Chen and Dao 2026)."""
    a, b, c = how.coefficients
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norms.clamp(min=how.eps).to(x.dtype)
    eye = torch.eye(x.shape[-2], device=x.device, dtype=x.dtype)
    for steps in cuts:
        r, q = product(x, x, None, 1.0, 0.0), None
        for left in reversed(range(steps)):
            z = product(r, r, r, c, b)
            q = z + a * eye if q is None else product(q, z, q, 1.0, a)
            if left:
                rz = product(r, z, r, 1.0, a)
                r = product(z, rz, rz, 1.0, a)
        assert q is not None
        x = torch.bmm(q, x)
    return x


def newton_schulz(machine: Machine) -> None:
    """``error``: relative, of the directions, beside an exact iteration on the singular values."""
    sizes = [(24, 768, 3072), (12, 768, 2304), (12, 768, 768), (8, 4096, 11008)]
    for size in sizes if machine.is_gpu else [(2, 32, 128)]:
        x = torch.randn(size, device=machine.device)
        exact = exact_directions(x[0]) if size[1] < 4096 else None
        for name, dtype, cuts in (
            ("bf16", BF16, ()), ("fp16", torch.float16, ()),
            ("gram, fp16, 2 + 3", torch.float16, (2, 3)),
            ("gram, fp16, 2 + 2 + 1", torch.float16, (2, 2, 1)),
        ):  # fmt: skip
            how, y = Iteration(JORDAN, 5, 1e-7, dtype), x.to(dtype)
            product = symmetric_product(y, "auto")

            def run(how=how, y=y, product=product, cuts=cuts) -> Tensor:  # type: ignore[no-untyped-def]
                return gram(y, how, product, cuts) if cuts else iterate(y, how, product)

            error = (
                None if exact is None else float((run()[0].double() - exact).norm() / exact.norm())
            )
            rounded = None if error is None else round(error, 5)
            say(section="newton-schulz", size=size, way=name, ms=round(machine.time_alone(run), 3),
                error=rounded)  # fmt: skip


def exact_directions(x: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    a, b, c = JORDAN
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def buckets(machine: Machine) -> None:
    """bf16 parameters, a group of one: what packing, unpacking and collectives cost by
    themselves."""
    dist.init_process_group(
        "nccl" if machine.is_gpu else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/store",
        rank=0,
        world_size=1,
    )
    shapes = [(4096, 4096)] * 60 if machine.is_gpu else [(64, 64)] * 4
    params = machine.make(shapes, BF16)
    # A Replicas of one has nobody to average with, and would do nothing.
    alone: Any = SimpleNamespace(peer_group=dist.group.WORLD, count=1, index=0)
    for name, dtype in (("float32 masters", torch.float32), ("split masters", SPLIT)):
        masters = [torch.zeros(shape, device=machine.device, dtype=dtype) for shape in shapes]
        parts = [Part(p, m) for p, m in zip(params, masters, strict=True)]
        ours = Buckets(lambda parts=parts: parts, in_place=True)  # type: ignore[misc]
        ms = machine.time(lambda ours=ours: ours.average(alone, [1.0]), calls=2)  # type: ignore[misc]
        say(section="buckets", name=name, ms=round(ms, 2), extra_mib=ours.extra_bytes >> 20)
    dist.destroy_process_group()


SECTIONS: dict[str, Callable[[Machine], None]] = {
    "formats": formats,
    "small": small,
    "host": host,
    "newton-schulz": newton_schulz,
    "buckets": buckets,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    machine = Machine(options.device)
    if machine.is_gpu:
        say(section="device", name=torch.cuda.get_device_name(), torch=torch.__version__)
    for name in options.only:
        SECTIONS[name](machine)
        if machine.is_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
