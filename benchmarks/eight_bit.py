"""hdet's AdamW, its moments in float32, bfloat16 and 8 bits, beside torch's fused, foreach and
compiled one, and bitsandbytes and torchao where these are installed.

JSON lines.

    python -m benchmarks.eight_bit [--quality] [--seeds 0 1 2] [--steps 2000] [--rules adamw lion
    ...] [--device cpu|cuda] [--threads N] [--quick] [--json FILE]

A step of AdamW on the tensors of a small GPT, all in turn in one run:

    state_bytes           of one parameter: what the optimizer keeps
    bytes                 of one parameter: with the parameter and its gradient, as they are stored
    first_step_s          the first step, with whatever is planned, loaded or compiled for it
    ns                    of one parameter and step, the median
    ratio                 to torch's fused AdamW in float32, the median round by round

--quality: the byte model of examples.bytes, trained in one process with each optimizer: same
initial weights, batches and rates. Of each rule the last validation loss, and by how much it is
above that with float32 moments, in percent; means over seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from examples.bytes.data import Corpus, load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy

from .harness import emit
from .kernels import BF16, Machine, gpt2, machine_of, owned, parser

Make = Callable[..., torch.optim.Optimizer]
Record = dict[str, Any]
FLOOR = "torch float32"


def peers() -> dict[str, Make]:
    """8-bit AdamW of other libraries. Says what is not installed."""
    found: dict[str, Make] = {}
    for name in ("bitsandbytes", "torchao"):
        try:
            found[name] = import_module(f"{name}.optim").AdamW8bit
        except ImportError as error:
            emit({"benchmark": "eight bit", "absent": name, "why": f"{error}: pip install {name}"})
    return found


# -- a step ----------------------------------------------------------------------------------------


def held(value: Any) -> int:
    """Bytes of the tensors in a state, also of those that are made of others."""
    if isinstance(value, dict):
        return sum(held(entry) for entry in value.values())
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        return sum(held(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def steps(machine: Machine) -> Iterator[Record]:
    """Those first that need no compiler, which takes minutes on a CPU."""
    eight = partial(hdet.FusedAdamW, moment_dtype="8bit")
    candidates: dict[str, Make] = {
        FLOOR: partial(torch.optim.AdamW, fused=True),
        "torch float32, foreach": partial(torch.optim.AdamW, foreach=True),
        "torch float32, foreach, compiled": partial(torch.optim.AdamW, foreach=True),
        "hdet float32": hdet.FusedAdamW,
        "hdet bfloat16": partial(hdet.FusedAdamW, moment_dtype=BF16),
        "hdet 8 bits": eight,
        "hdet 8 bits, split bfloat16": partial(eight, master_weights="split"),
        **{f"{name} 8 bits": make for name, make in peers().items()},
    }
    late = [name for name in candidates if "compiled" in name or "torchao" in name]
    for group in ([name for name in candidates if name not in late], *([FLOOR, x] for x in late)):
        for record in _in_turn(machine, {name: candidates[name] for name in group}):
            if record["optimizer"] in group[1:] or len(group) > 2:
                yield record


def _in_turn(machine: Machine, candidates: dict[str, Make], width: int = 256) -> list[Record]:
    calls: dict[str, Callable[[], object]] = {}
    records: list[Record] = []
    for name, make in candidates.items():
        shapes, dtype = gpt2(width, 4, 5000), BF16 if "split" in name else torch.float32
        params = owned(machine.randn(shapes, dtype), machine.randn(shapes, dtype))
        optimizer = make(params, lr=1e-4)
        step: Callable[[], object] = optimizer.step
        if "compiled" in name:
            step = torch.compile(step, backend="eager" if machine.quick else "inductor")
        start = time.perf_counter()
        step()
        if machine.is_gpu:
            torch.cuda.synchronize()
        first, count = time.perf_counter() - start, sum(p.numel() for p in params)
        state = sum(held(dict(optimizer.state[p])) for p in params) / count
        calls[name] = step
        records.append({
            "operation": "adamw step", "optimizer": name, "device": machine.device,
            "threads": torch.get_num_threads(), "parameters": count,
            "state_bytes": round(state, 3),
            "bytes": round(2 * dtype.itemsize + state, 3),  # with the gradient
            "first_step_s": round(first, 3),
        })  # fmt: skip
    seconds = machine.seconds(calls)
    for record in records:
        own, fused = seconds[record["optimizer"]], seconds[FLOOR]
        record["ns"] = round(1e9 * median(own) / record["parameters"], 2)
        record["ratio"] = round(median(a / b for a, b in zip(own, fused, strict=True)), 2)
    return records


# -- quality ---------------------------------------------------------------------------------------


def _of(kind: Make, weight_decay: float = 0.0, **settings: Any) -> Make:
    return lambda model, **options: kind(
        model.parameter_groups(weight_decay), weight_decay=weight_decay, **settings, **options
    )


def _muon(model: GPT, **options: Any) -> torch.optim.Optimizer:
    own: Any = {"adamw_lr": 1e-2, "adamw_weight_decay": 0.1, "ns_dtype": torch.float32}
    return hdet.FusedMuon(model.named_parameters(), **own, **options)


BETAS = (0.9, 0.95)
RULES: dict[str, tuple[Make, float]] = {
    "adamw": (_of(hdet.FusedAdamW, weight_decay=0.1, betas=BETAS), 1e-2),
    "adam": (_of(hdet.FusedAdam, betas=(0.9, 0.999)), 1e-2),
    "sgd": (_of(hdet.FusedSGD, momentum=0.9), 1.0),
    "lion": (_of(hdet.FusedLion, weight_decay=0.1), 1e-3),
    "muon": (_muon, 0.02),
}
"""how each is made for a model, and its rate"""


def trained(
    make: Callable[[GPT], torch.optim.Optimizer], corpus: Corpus, seed: int, count: int, device: str
) -> float:
    """The validation loss after so many steps of 16 windows, nats per byte."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig()).to(device)
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, rates, count, pct_start=0.1, cycle_momentum=False)

    def loss(text: Tensor, windows: int, seed: int, stream: str, index: int) -> Tensor:
        of = {"seed": seed, "stream": stream, "index": index}
        x, y = sample_batch(text, windows, model.config.context, **of)
        return cross_entropy(model(x.to(device)), y.to(device))

    for index in range(count):
        loss(corpus.train, 16, seed, "train", index).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return mean(float(loss(corpus.validation, 32, 0, "validation", i)) for i in range(64))


def quality(rules: Sequence[str], seeds: Sequence[int], count: int, device: str) -> list[Record]:
    corpus, records = load_corpus(), list[Record]()
    for rule in rules:
        make, lr = RULES[rule]
        ways = {
            "float32": partial(make, lr=lr),
            "8 bits": partial(make, lr=lr, moment_dtype="8bit"),
        }
        if rule == "adamw":
            for name, peer in peers().items():
                ways[name] = partial(_of(peer, weight_decay=0.1, betas=BETAS), lr=lr)
        losses = {
            way: [trained(build, corpus, seed, count, device) for seed in seeds]
            for way, build in ways.items()
        }
        base = losses["float32"]
        for way, values in losses.items():
            each = [100 * (loss / wide - 1) for loss, wide in zip(values, base, strict=True)]
            records.append({
                "operation": "quality", "rule": rule, "moments": way, "lr": lr, "steps": count,
                "seeds": list(seeds), "validation": [round(loss, 4) for loss in values],
                "above_percent": round(100 * (mean(values) / mean(base) - 1), 3),
                "of_each_seed": [round(value, 3) for value in each],
            })  # fmt: skip
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.set_defaults(threads=1)
    made.add_argument("--quality", action="store_true")
    made.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--steps", type=int, default=2000)
    options = made.parse_args(arguments)
    machine = machine_of(options)
    records: Iterable[Record]
    if options.quality:
        records = quality(options.rules, options.seeds, options.steps, options.device)
    else:
        records = steps(machine)
    for record in records:
        emit({"benchmark": "eight bit", **record}, options.json)


if __name__ == "__main__":
    main()
