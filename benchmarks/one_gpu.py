"""What a GPU says of the kernels in two minutes: a JSON line for each figure, as it comes.

    python -m benchmarks.one_gpu [--only formats small newton-schulz buckets] [--device cpu]

Each section answers a question. ``formats``: how near is each number format to a copy's bandwidth,
on CUDA and on Triton? ``small``: what do 10 000 tensors of 1 000 elements take? ``newton-schulz``:
which way of orthogonalising is fast and exact? ``buckets``: what does an average cost without a
wire? Times are medians in milliseconds. Those of kernels are without the host (replays of a graph);
benchmarks.step has the host's. ``--device cpu`` tries the program with small tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hdet import kernels
from hdet.converge.buckets import Buckets, Part
from hdet.kernels import StepSettings, StepTensors
from hdet.kernels.numbers import count_scales
from hdet.optim.newton_schulz import Iteration, SymmetricProduct, iterate, symmetric_product

from .compare import Call, cuda_copy, gpt2, graph_of, numel, torch_adamw
from .harness import alternate, alternate_on_cuda

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


def say(**record: object) -> None:
    print(json.dumps({"benchmark": "one_gpu", **record}), flush=True)


class Machine:
    """A device, and how calls are timed on it."""

    def __init__(self, device: str) -> None:
        self.device, self.is_gpu = device, device == "cuda"
        self.backends = ("cuda", "triton") if self.is_gpu else ("cpu",)
        self.shapes = gpt2() if self.is_gpu else gpt2(32, 1)

    def time(self, call: Call) -> float:
        """Milliseconds until the device has done one call, with the host's part."""
        calls = {"it": call}
        times = alternate_on_cuda(calls, 7) if self.is_gpu else alternate(calls, 3, warmup=1)
        return 1e3 * statistics.median(times["it"])

    def time_alone(self, call: Call) -> float:
        """Without the host: replays of a graph of the call."""
        return self.time(graph_of(call).replay if self.is_gpu else call)

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
    copied = 0.0
    if machine.is_gpu:
        count, copy = cuda_copy()
        copied = 8 * count / machine.time(copy) / 1e6
        say(section="formats", name="copy", gb_s=round(copied))
    params, gradients = (machine.make(machine.shapes, torch.float32) for _ in range(2))
    ms = machine.time(torch_adamw(params, gradients).step)
    say(section="formats", name="torch.optim.AdamW(fused=True)", ms=round(ms, 3))
    for backend in machine.backends:
        for name, (size, options) in FORMATS.items():
            ms = machine.time_alone(machine.step_of(machine.shapes, backend, **options))
            part = round(size * numel(machine.shapes) / ms / 1e6 / copied, 3) if copied else None
            say(section="formats", backend=backend, name=name, ms=round(ms, 3), of_copy=part)


def small(machine: Machine) -> None:
    shapes = [(1000,)] * (10_000 if machine.is_gpu else 20)
    for backend in machine.backends:
        call = machine.step_of(shapes, backend)
        ms, whole = machine.time_alone(call), machine.time(call)
        say(section="small", backend=backend, ms=round(ms, 3), with_host=round(whole, 3))


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
        ms = machine.time(lambda ours=ours: ours.average(alone, [1.0]))  # type: ignore[misc]
        say(section="buckets", name=name, ms=round(ms, 2), extra_mib=ours.extra_bytes >> 20)
    dist.destroy_process_group()


SECTIONS: dict[str, Callable[[Machine], None]] = {
    "formats": formats,
    "small": small,
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
