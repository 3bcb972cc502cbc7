"""What kernels cost beside torch's way and beside a copy: a JSON line for each figure, as it comes.

    python -m benchmarks.kernels [formats small clip replicas average host buckets training]
        [--device cpu|cuda] [--backend auto] [--quick] [--threads N] [--json FILE]

formats    a step of AdamW in each number format
small      the same on 10 000 tensors of 1 000 elements
clip       unscaling, clipping, step and cast in one, beside torch's four calls
replicas   K replicas that share gradient and moments, beside K steps of torch's fused AdamW
average    the weighted mean of 8 co-resident sets, and a copy into a bucket
host       the host's part of a step on 300 tensors of one element
buckets    an average without a wire: a group of one
training   a training step of a compiled model, beside torch's fused and compiled foreach AdamW; on
           CUDA also captured whole in a graph

A line compares hdet with torch and both with a copy of one large tensor, in turn in one run:

    hdet_ms, torch_ms     medians
    ratio                 median of hdet / torch, round by round: what to look at
    alone_ms              on CUDA hdet's kernels without Python: replays of a graph of the same call
    bytes_per_parameter   what hdet reads and writes at least, all replicas together
    of_copy               those bytes a second over the copy's (8 an element); of the kernels alone
                          on CUDA. None where the traffic is less than twice the L2
    host_us               on CUDA the time until the call returns, before the device is done
    before                alone_ms, or else hdet_ms, of the last run in benchmarks/results/gpu: what
                          is expected
    scale                 "1/n" where the first dimension of every large tensor was divided by n to
                          fit the memory

With one thread on a CPU times are that thread's own, so that others may be busy on the machine.
On CUDA events are around at least 20 ms of calls, so that no launch and no synchronisation is part
of a figure. --quick: fewer rounds and less memory; on a CPU small tensors, to try the program.
"""

from __future__ import annotations

import argparse
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hdet import FusedAdamW, kernels
from hdet.converge.buckets import Buckets, Part
from hdet.kernels import StepSettings, StepTensors
from hdet.optim import lists
from hdet.optim.moment_storage import SMALLEST

from .harness import alternate, alternate_on_cuda, emit, parser_of
from .tables import read

LAST = Path(__file__).parent / "results" / "gpu" / "figures.jsonl"
Shapes = Sequence[tuple[int, ...]]
Call = Callable[[], object]
BF16 = torch.bfloat16


def gpt2(width: int = 768, layers: int = 12, tokens: int = 50257) -> list[tuple[int, ...]]:
    """The 148 tensors of GPT-2 124M."""
    vector, wide = (width,), (4 * width,)
    block = [vector, vector, (3 * width, width), (3 * width,), (width, width), *[vector] * 3]
    block += [(4 * width, width), wide, (width, 4 * width), vector]
    return [(tokens, width), (1024, width), *block * layers, vector, vector]


def layer_of_7b() -> list[tuple[int, ...]]:
    """A transformer layer of a 7B model (Llama 2: width 4096, 11008 inside): 202 million parameters
    in 9 tensors."""
    return [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008), (4096,), (4096,)]


GPT2, SMALL = "GPT-2 124M", "10 000 x 1 000"
SHAPES: dict[str, Callable[[], Shapes]] = {
    GPT2: gpt2,
    "layer of 7B": layer_of_7b,
    SMALL: lambda: [(1000,)] * 10_000,
    "one of 2^27": lambda: [(1 << 27,)],
}
TINY = {GPT2: lambda: gpt2(32, 1, 101), SMALL: lambda: [(1000,)] * 20}


def numel(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def fitted(shapes: Shapes, bytes_per_parameter: float, limit: float) -> tuple[Shapes, int]:
    """The shapes with the first dimension of every large tensor divided by the smallest power of
    two that makes them fit.

    Many small tensors stay as they are.
    """

    def divided(divisor: int) -> Shapes:
        return [
            (max(1, s[0] // divisor), *s[1:]) if torch.Size(s).numel() >= 1 << 16 else s
            for s in shapes
        ]

    divisor = 1
    while numel(divided(divisor)) * bytes_per_parameter > limit:
        if divided(2 * divisor) == divided(divisor):
            break
        divisor *= 2
    return divided(divisor), divisor


@dataclass
class Machine:
    """A device, what runs on it, and where lines go."""

    device: str = "cpu"
    backend: str = "auto"
    quick: bool = False
    json: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else "cpu"

    @property
    def repeats(self) -> int:
        return (5 if self.quick else 7) if self.is_gpu else 3 if self.quick else 21

    @property
    def clock(self) -> Callable[[], float]:
        """One thread of a CPU counts its own time: others may be busy beside it."""
        alone = not self.is_gpu and torch.get_num_threads() == 1
        return time.thread_time if alone else time.perf_counter

    def seconds(self, candidates: dict[str, Call], calls: int = 1) -> dict[str, list[float]]:
        """Of a call of each, all in turn."""
        if self.is_gpu:
            return alternate_on_cuda(candidates, self.repeats)
        return alternate(candidates, self.repeats, calls=calls, clock=self.clock)

    def shapes(
        self, bytes_per_parameter: float, names: Sequence[str] = tuple(SHAPES)
    ) -> Iterator[tuple[str, Shapes, dict[str, Any]]]:
        """(name, shapes that fit, what to note)."""
        kinds = TINY if self.quick and not self.is_gpu else SHAPES
        memory = 0.8 * torch.cuda.mem_get_info()[0] if self.is_gpu else 8e9
        for name in names:
            if name in kinds and not (self.quick and name == "layer of 7B"):
                limit = memory / (8 if self.quick else 1)
                fit, divisor = fitted(kinds[name](), bytes_per_parameter + 8, limit)
                yield name, fit, {"scale": f"1/{divisor}"} if divisor > 1 else {}
                gc.collect()
                if self.is_gpu:
                    torch.cuda.empty_cache()

    def randn(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(shape, device=self.device).to(dtype) for shape in shapes]

    def zeros(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.zeros(shape, device=self.device, dtype=dtype) for shape in shapes]

    def shifted(self, shapes: Shapes) -> list[Tensor]:
        """Views of a bucket in which every tensor begins one element after a boundary of 16
        bytes."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.randn(sum(n + 16 for n in sizes), device=self.device)
        made, at = [], 1
        for shape, size in zip(shapes, sizes, strict=True):
            made.append(flat[at : at + size].view(shape))
            at += -(-(size + 2) // 8) * 8
        return made

    def say(self, **record: Any) -> None:
        backend = kernels.select(self.backend, torch.device(self.device)).name
        head = {"benchmark": "kernels", "device": self.name, "threads": torch.get_num_threads()}
        line = {**head, "backend": backend, **record}
        on_h100 = self.is_gpu and "H100" in self.name and line.get("shapes") == GPT2
        told = {
            "before": last().get(key_of(line)) if self.is_gpu else None,
            "predicted": PREDICTED.get((line["operation"], backend)) if on_h100 else None,
        }
        emit({**line, **{name: ms for name, ms in told.items() if ms is not None}}, self.json)


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("operation", "shapes", "backend"))


@functools.cache
def last() -> dict[tuple[Any, ...], float]:
    """Milliseconds of the last run on a GPU."""
    lines = (line for line in read(LAST) if "operation" in line)
    return {key_of(x): x.get("alone_ms", x.get("hdet_ms")) for x in lines}


def compare(
    machine: Machine,
    operation: str,
    name: str,
    shapes: Shapes,
    hdet: Call,
    torchs: Call,
    bytes_per_parameter: float,
    **notes: Any,
) -> None:
    """Prints the line of one comparison."""
    elements, more = numel(shapes), dict[str, Any]()
    candidates: dict[str, Call] = {"hdet": hdet, "torch": torchs}
    if machine.is_gpu:
        more["host_us"] = host_us(hdet)
        copied, candidates["copy"] = cuda_copy()
        try:
            candidates["alone"] = graph_of(hdet).replay
        except RuntimeError as error:
            more["alone_error"] = str(error)
    else:
        copied = elements if machine.quick else min(1 << 26, max(1 << 22, elements))
        source, target = torch.randn(copied), torch.empty(copied)
        candidates["copy"] = lambda: target.copy_(source)
    seconds = machine.seconds(candidates, max(1, (1 << 20) // max(1, elements)))
    median = {one: float(np.median(times)) for one, times in seconds.items()}
    traffic = bytes_per_parameter * elements
    gb_s = traffic / median.get("alone", median["hdet"]) / 1e9
    copy_gb_s = 8 * copied / median["copy"] / 1e9
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if machine.is_gpu else 0
    machine.say(
        operation=operation,
        shapes=name,
        tensors=len(shapes),
        parameters=elements,
        bytes_per_parameter=bytes_per_parameter,
        **{f"{one}_ms": round(1e3 * ms, 4) for one, ms in median.items() if one != "copy"},
        ratio=round(float(np.median(np.divide(seconds["hdet"], seconds["torch"]))), 3),
        gb_s=round(gb_s, 2),
        copy_gb_s=round(copy_gb_s, 2),
        of_copy=round(gb_s / copy_gb_s, 3) if traffic >= 2 * l2 else None,
        **more,
        **notes,
    )


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
    return round(1e6 * float(np.median(times)), 1)


# -- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How AdamW's numbers are stored."""

    bytes: float
    """That a step moves for each parameter."""
    dtype: torch.dtype = torch.float32
    """Of parameters and gradients."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of FusedAdamW."""
    wide: bool = False
    """Gradients are float32 whatever the parameters are."""
    shifted: bool = False


CODES, MASTERS = {"moment_dtype": "8bit"}, {"master_weights": "fp32"}
SPLIT, LOW = {"master_weights": "split"}, {"moment_dtype": BF16, "stochastic_rounding": True}
FORMATS = {
    "float32": Format(28),
    "bf16, fp32 masters": Format(28, BF16, MASTERS),
    "bf16, fp32 gradients and masters": Format(30, BF16, MASTERS, wide=True),
    "fp32, bf16 moments": Format(20, options=LOW),
    "bf16 split": Format(26, BF16, SPLIT),
    "8 bits": Format(16, options=CODES),
    "8 bits, split": Format(14, BF16, {**SPLIT, **CODES}),
    "bf16 throughout, stochastic": Format(14, BF16, LOW),
    "float32, gradients off by one element": Format(28, shifted=True),
}


PREDICTED = {
    ("adamw, 8 bits", "cuda"): 0.70,
    ("adamw, 8 bits, split", "cuda"): 0.64,
    ("adamw, 8 bits", "triton"): 0.85,
    ("adamw, 8 bits, split", "triton"): 0.85,
}
"""milliseconds of kernels alone on GPT-2 on an H100, of what has changed since it was measured"""


def owned(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(param) for param in params]
    for param, gradient in zip(made, gradients, strict=True):
        if gradient.dtype != param.dtype:
            param.grad_dtype = gradient.dtype
        param.grad = gradient
    return made


def torch_adamw(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW on parameters of its own with gradients that others may share."""
    return torch.optim.AdamW(owned(params, gradients), lr=1e-4, fused=True)


def torchs_step(
    machine: Machine, shapes: Shapes, gradients: list[Tensor], *, masters: bool, clips: bool = False
) -> Call:
    """``masters``: gradients cast to float32 (clipped, too, after they are unscaled), fused AdamW
    on float32 masters, and the cast back."""
    if not masters:
        return torch_adamw(machine.randn(shapes, gradients[0].dtype), gradients).step
    models = machine.randn(shapes, BF16)
    theirs = torch_adamw([model.float() for model in models], machine.zeros(shapes))
    wide: list[Tensor] = theirs.param_groups[0]["params"]
    floats: list[Tensor] = [master.grad for master in wide]  # type: ignore[misc]
    scale, found = (make(1, device=machine.device) for make in (torch.ones, torch.zeros))

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(floats, gradients)
        if clips:
            torch._amp_foreach_non_finite_check_and_unscale_(floats, found, scale[0])
            torch.nn.utils.clip_grad_norm_(wide, 1.0)
        theirs.step()
        torch._foreach_copy_(models, wide)

    return step


def step(machine: Machine, name: str, shapes: Shapes, notes: dict[str, Any], of: str) -> None:
    """Moments in codes: torch's are float32, and tensors that are too small for codes move 28
    bytes."""
    kind = FORMATS[of]
    gradients = machine.shifted(shapes) if kind.shifted else machine.randn(
        shapes, torch.float32 if kind.wide else kind.dtype
    )  # fmt: skip
    params = owned(machine.randn(shapes, kind.dtype), gradients)
    ours = FusedAdamW(params, lr=1e-4, backend=machine.backend, **kind.options)
    masters, coded = "master_weights" in kind.options, kind.options.get("moment_dtype") == "8bit"
    if coded:
        theirs = torchs_step(machine, shapes, machine.randn(shapes), masters=False)
    else:
        theirs = torchs_step(machine, shapes, gradients, masters=masters)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    small = sum(size for size in sizes if size < SMALLEST) / sum(sizes) if coded else 0
    moved = kind.bytes + 12 * small
    compare(machine, f"adamw, {of}", name, shapes, ours.step, theirs, moved, **notes)


def formats(machine: Machine) -> None:
    """float32 on all lists, the others on GPT-2; first what has changed since it was measured."""
    changed = {operation.removeprefix("adamw, ") for operation, _ in PREDICTED}
    for of in sorted(FORMATS, key=lambda of: of not in changed):
        names = list(SHAPES) if of == "float32" and not machine.is_gpu else [GPT2]
        for name, shapes, notes in machine.shapes(40, names):
            step(machine, name, shapes, notes, of)


def small(machine: Machine) -> None:
    for name, shapes, notes in machine.shapes(40, [SMALL]):
        for of in ("float32", "bf16 split"):
            step(machine, name, shapes, notes, of)


def clip(machine: Machine) -> None:
    """bfloat16 gradients and parameters, float32 masters: norm (2 bytes), then gradient 2,
    parameter 2, master 8, moments 16."""
    for name, shapes, notes in machine.shapes(40):
        gradients = machine.randn(shapes, BF16)
        params = owned(machine.randn(shapes, BF16), gradients)
        ours = FusedAdamW(params, lr=1e-4, backend=machine.backend, max_grad_norm=1.0, **MASTERS)
        # as a GradScaler sets them
        ours.grad_scale = torch.ones((), device=machine.device)
        ours.found_inf = torch.zeros((), device=machine.device)
        theirs = torchs_step(machine, shapes, gradients, masters=True, clips=True)
        operation = "clip + unscale + step + cast, bf16 with master"
        compare(machine, operation, name, shapes, ours.step, theirs, 30, **notes)


def replicas(machine: Machine) -> None:
    """Gradient 4, moments 16, and each set read and written: 20 + 8K bytes, where separate steps
    move 28K."""
    for count in (8,) if machine.quick else (2, 8):
        for name, shapes, notes in machine.shapes(12 + 16 * count):
            gradients = machine.randn(shapes)
            sets = [machine.randn(shapes) for _ in range(count)]
            steps = [torch.zeros((), device=machine.device) for _ in shapes]
            moments = [machine.zeros(shapes) for _ in range(2)]
            state = StepTensors("adamw", sets, [0] * len(shapes), steps, moments)
            plan = kernels.step_plan(state, machine.backend)
            rates = [0.8 + 0.4 * k / count for k in range(count)]
            rows = [StepSettings(1e-4, rates, 0.9, 0.999, 1e-8, 1e-2, decay_at_base=True)]
            separate = [torch_adamw(machine.randn(shapes), gradients) for _ in range(count)]

            def each(separate: list[Any] = separate) -> None:
                for optimizer in separate:
                    optimizer.step()

            operation = f"{count} replicas, shared moments, vs {count} fused steps"
            ours = functools.partial(plan.step, gradients, rows)
            compare(machine, operation, name, shapes, ours, each, 20 + 8 * count, **notes)
            del sets, moments, state, plan, ours, separate, each


# -- averages --------------------------------------------------------------------------------------


def average(machine: Machine, count: int = 8) -> None:
    """Every set is read and written once: 8K bytes; torch: the mean of a stack, copied back to all
    sets. Then bfloat16 parameters into a float32 bucket, scaled: 6 bytes."""
    for name, shapes, notes in machine.shapes(64 + 40):
        ours, theirs = ([machine.randn(shapes) for _ in range(count)] for _ in range(2))
        plan = kernels.average_plan(ours, None, machine.backend)
        mean = functools.partial(plan.average, [1 / count] * count)

        def stacked(theirs: list[list[Tensor]] = theirs) -> None:
            for tensors in zip(*theirs, strict=True):
                mean = torch.stack(tensors).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)

        operation = f"average of {count}"
        compare(machine, operation, name, shapes, mean, stacked, 8 * count, **notes)
        del ours, theirs, plan, mean, stacked
    for name, shapes, notes in machine.shapes(10):
        params = machine.randn(shapes, BF16)
        bucket, other = (machine.zeros(shapes) for _ in range(2))
        copies = kernels.copy_plan(params, bucket, backend=machine.backend)

        def scaled(params: list[Tensor] = params, other: list[Tensor] = other) -> None:
            torch._foreach_copy_(other, params)
            torch._foreach_mul_(other, 0.25)

        copy = functools.partial(copies.copy, 0.25)
        compare(machine, "scaled copy, bf16 to fp32", name, shapes, copy, scaled, 6, **notes)


def buckets(machine: Machine) -> None:
    """bf16 parameters, a group of one: what packing, unpacking and collectives cost by
    themselves."""
    wire, store = "nccl" if machine.is_gpu else "gloo", f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group(wire, init_method=store, rank=0, world_size=1)
    shapes = [(4096, 4096)] * 60 if machine.is_gpu else [(64, 64)] * 4
    params = machine.randn(shapes, BF16)
    # A Replicas of one has nobody to average with, and would do nothing.
    alone: Any = SimpleNamespace(peer_group=dist.group.WORLD, count=1, index=0)
    for name, dtype in (("float32 masters", torch.float32), ("split masters", torch.int16)):
        pairs = zip(params, machine.zeros(shapes, dtype), strict=True)
        parts = [Part(param, master) for param, master in pairs]
        ours = Buckets(lambda parts=parts: parts, in_place=True)  # type: ignore[misc]
        seconds = machine.seconds({"it": functools.partial(ours.average, alone, [1.0])})["it"]
        ms, extra = round(1e3 * float(np.median(seconds)), 3), ours.extra_bytes >> 20
        machine.say(operation="buckets", shapes=name, hdet_ms=ms, extra_mib=extra)
    dist.destroy_process_group()


# -- the host --------------------------------------------------------------------------------------

HOST = {
    "steady": "at the same addresses",
    "fresh": "new in every step, as after zero_grad()",
    "scheduled": "new, and another rate",
    "one None": "one is None in every other step",
}


class Calls(torch.optim.Optimizer):
    """Of hdet's step what torch does, and nothing else: into `step` and out, gradients, where these
    and the parameters lie, versions."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})
        self.params = params
        self.places = lists.NotedObjects(self.params)
        self.reader = kernels.step.gradient_reader(self.params)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.reader.read(lists.gradients(self.params))
        self.places.same(self.params)
        lists.bump_versions(self.params)


def host(machine: Machine, tensors: int = 300) -> None:
    """A step on tensors of one element each, nothing but the way from Python to the kernel and
    back, in each case of HOST.

    `calls_us`: what torch itself takes of hdet's step.
    """
    shapes = [(1,)] * tensors

    def made(side: str) -> tuple[Any, list[Any], list[list[Tensor]]]:
        """An optimizer, its parameters, and two sets of gradients for them."""
        sets = [machine.randn(shapes) for _ in range(2)]
        params = owned(machine.randn(shapes), sets[0])
        if side == "hdet":
            return FusedAdamW(params, lr=1e-4, backend=machine.backend), params, sets
        return (Calls(params) if side == "calls" else torch_adamw(params, sets[0])), params, sets

    runs = {(case, side): made(side) for case in HOST for side in ("hdet", "torch", "calls")}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(-20, 20 if machine.quick else 200):
        for (case, side), (optimizer, params, sets) in runs.items():
            fresh = turn % 2 if case in ("fresh", "scheduled") else 0
            params = optimizer.param_groups[0]["params"]
            for param, gradient in zip(params, sets[fresh], strict=True):
                param.grad = gradient
            if case == "scheduled":
                optimizer.param_groups[0]["lr"] = 1e-4 * (1 + 1e-3 * turn)
            if case == "one None" and turn % 2:
                params[tensors // 2].grad = None
            start = machine.clock()
            optimizer.step()
            if turn >= 0:
                times[case, side].append(1e6 * (machine.clock() - start))
            if machine.is_gpu:
                torch.cuda.synchronize()
    medians, least = ({key: how(x) for key, x in times.items()} for how in (np.median, np.min))
    for case, meaning in HOST.items():
        us = {side: medians[case, side] for side in ("hdet", "calls", "torch")}
        machine.say(
            operation=f"host time of a step, {case}",
            gradients=meaning,
            shapes=f"{tensors} x 1",
            host_us=round(us["hdet"], 1),
            calls_us=round(us["calls"], 1),
            torch_us=round(us["torch"], 1),
            ratio=round(us["hdet"] / us["torch"], 3),
            of_steady=round(us["hdet"] / medians["steady", "hdet"], 2),
            least_us={side: round(float(least[case, side]), 1) for side in us},
        )


# -- a training step -------------------------------------------------------------------------------


def training(machine: Machine) -> None:
    """A compiled model, and an optimizer; on CUDA also captured whole."""
    width, blocks = (32, 1) if machine.quick else (768, 6)
    compiled = functools.partial(torch.compile, backend="eager" if machine.quick else "inductor")
    batch, calls = machine.randn([(32, width)])[0], dict[str, Call]()
    for name in ("hdet", "torch", "foreach, compiled"):
        sizes = [(width, 4 * width), (4 * width, width)] * blocks
        layers = [part for size in sizes for part in (torch.nn.Linear(*size), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers).to(machine.device)
        forward, params = compiled(model), list(model.parameters())
        made: Any = {
            "hdet": lambda of: FusedAdamW(of, zero_gradients=True, backend=machine.backend),
            "torch": lambda of: torch.optim.AdamW(of, fused=True),
            "foreach, compiled": lambda of: torch.optim.AdamW(
                of, foreach=True, capturable=machine.is_gpu
            ),
        }[name](params)
        follow = compiled(made.step) if name.endswith("compiled") else made.step

        def train(
            forward: Any = forward, follow: Call = follow, made: Any = made, name: str = name
        ) -> None:
            forward(batch).square().mean().backward()
            follow()
            if name != "hdet":
                made.zero_grad()

        train()
        calls[name] = train
    if machine.is_gpu:
        calls |= {f"{name}, captured": graph_of(call).replay for name, call in calls.items()}
    seconds = machine.seconds(calls)
    for name, times in seconds.items():
        ratios = np.divide(times, seconds["hdet"])
        machine.say(
            operation=f"a training step of a compiled model, {name}",
            shapes=f"{blocks} blocks of {width}",
            ms=round(1e3 * float(np.median(times)), 3),
            of_hdet=round(float(np.median(ratios)), 3),
        )


SECTIONS: dict[str, Callable[[Machine], None]] = {
    "formats": formats, "small": small, "host": host, "buckets": buckets, "clip": clip,
    "replicas": replicas, "average": average, "training": training,
}  # fmt: skip
"""The most telling first."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = parser_of(doc)
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--backend", default="auto", help="auto, cpu, cuda, triton or torch")
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--quick", action="store_true", help="fewer rounds and less memory")
    return made


def machine_of(options: argparse.Namespace) -> Machine:
    torch.set_num_threads(options.threads)
    kernels.select(options.backend, torch.device(options.device))  # says why it is not usable
    return Machine(options.device, options.backend, options.quick, options.json)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("sections", nargs="*", metavar="SECTION", help="; without, all of them")
    options = made.parse_args(arguments)
    for name in options.sections or SECTIONS:
        SECTIONS[name](machine_of(options))


if __name__ == "__main__":
    main()
