"""Moments in 8 bits beside float32, bitsandbytes and torchao, where these are installed.

JSON lines.

    python -m benchmarks.eight_bit [--quality] [--seeds 0 1 2] [--steps 2000] [--rules adamw lion
    ...] [--device cpu|cuda] [--json FILE]

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

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import hdet
from examples.bytes.data import Corpus, load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy

from .harness import alternate, alternate_on_cuda, emit
from .kernels import gpt2

Make = Callable[..., torch.optim.Optimizer]

BF16, HALVES = {"dtype": torch.bfloat16}, {"master_weights": "split"}


def peers() -> dict[str, Make]:
    """8-bit AdamW of other libraries. Says what is not installed."""
    found: dict[str, Make] = {}
    for name, module, path in (
        ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
        ("torchao", "torchao.optim", "AdamW8bit"),
    ):
        try:
            found[name] = getattr(__import__(module, fromlist=[path]), path)
        except ImportError as error:
            emit({"benchmark": "eight bit", "absent": name, "why": f"{error}: pip install {name}"})
    return found


# -- a step ----------------------------------------------------------------------------------------


def made(
    make: Make, device: str, dtype: torch.dtype = torch.float32, width: int = 256
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    shapes = gpt2(width, layers=4, tokens=5000)
    params = [Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, make(params, lr=1e-4)


def held(value: Any) -> int:
    """Bytes of the tensors in a state, also of those that are made of others."""
    if isinstance(value, dict):
        return sum(held(entry) for entry in value.values())
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        return sum(held(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def steps(device: str, repeats: int) -> list[dict[str, Any]]:
    eight = functools.partial(hdet.FusedAdamW, moment_dtype="8bit")
    candidates: dict[str, tuple[Make, dict[str, Any]]] = {
        "torch float32": (functools.partial(torch.optim.AdamW, fused=True), {}),
        "hdet float32": (hdet.FusedAdamW, {}),
        "hdet bfloat16": (functools.partial(hdet.FusedAdamW, moment_dtype=torch.bfloat16), {}),
        "hdet 8 bits": (eight, {}),
        "hdet 8 bits, split bfloat16": (functools.partial(eight, **HALVES), BF16),
        **{f"{name} 8 bits": (make, {}) for name, make in peers().items()},
    }
    calls: dict[str, Callable[[], object]] = {}
    records: list[dict[str, Any]] = []
    for name, (make, more) in candidates.items():
        params, optimizer = made(make, device, **more)
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        count = sum(p.numel() for p in params)
        state = sum(held(dict(optimizer.state[p])) for p in params) / count
        own = 2 * params[0].element_size()  # and the gradient
        calls[name] = optimizer.step
        records.append(
            {
                "benchmark": "eight bit",
                "operation": "adamw step",
                "optimizer": name,
                "device": device,
                "threads": torch.get_num_threads(),
                "parameters": count,
                "state_bytes": round(state, 3),
                "bytes": round(own + state, 3),
                "first_step_s": round(first, 3),
            }
        )
    seconds = alternate_on_cuda(calls, repeats) if device == "cuda" else alternate(calls, repeats)
    for record in records:
        own_seconds = seconds[record["optimizer"]]
        ratio = statistics.median(
            a / b for a, b in zip(own_seconds, seconds["torch float32"], strict=True)
        )
        record |= {
            "ns": round(1e9 * statistics.median(own_seconds) / record["parameters"], 2),
            "ratio": round(ratio, 2),
        }
    return records


# -- quality ---------------------------------------------------------------------------------------


def _muon(model: GPT, lr: float, **options: Any) -> torch.optim.Optimizer:
    return hdet.FusedMuon(
        model.named_parameters(), lr=lr, adamw_lr=1e-2, adamw_weight_decay=0.1, **options
    )


def _of(kind: Make, **settings: Any) -> Make:
    return lambda model, lr, **options: kind(
        model.parameter_groups(settings.get("weight_decay", 0.0)), lr=lr, **{**settings, **options}
    )


RULES: dict[str, tuple[Make, float]] = {
    "adamw": (_of(hdet.FusedAdamW, weight_decay=0.1, betas=(0.9, 0.95)), 1e-2),
    "adam": (_of(hdet.FusedAdam, betas=(0.9, 0.999)), 1e-2),
    "sgd": (_of(hdet.FusedSGD, momentum=0.9), 1.0),
    "lion": (_of(hdet.FusedLion, weight_decay=0.1), 1e-3),
    "muon": (_muon, 0.02),
}
"""how each is made for a model, and its rate"""


def loss_of(model: GPT, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
    tokens, targets = (part.to(device) for part in batch)
    return cross_entropy(model(tokens), targets)


def trained(
    make: Callable[[GPT], torch.optim.Optimizer], corpus: Corpus, seed: int, count: int, device: str
) -> float:
    """The validation loss after so many steps of 16 windows, nats per byte."""
    torch.manual_seed(seed)
    config = GPTConfig()
    model = GPT(config).to(device)
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rates, total_steps=count, pct_start=0.1, cycle_momentum=False
    )
    for index in range(count):
        batch = sample_batch(
            corpus.train, 16, config.context, seed=seed, stream="train", index=index
        )
        loss_of(model, batch, device).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = [
            sample_batch(
                corpus.validation, 32, config.context, seed=0, stream="validation", index=i
            )
            for i in range(64)
        ]
        return statistics.mean(float(loss_of(model, batch, device)) for batch in batches)


def quality(
    rules: Sequence[str], seeds: Sequence[int], count: int, device: str
) -> list[dict[str, Any]]:
    corpus = load_corpus()
    records = []
    for rule in rules:
        make, lr = RULES[rule]
        ways: dict[str, Callable[[GPT], torch.optim.Optimizer]] = {
            "float32": functools.partial(make, lr=lr),
            "8 bits": functools.partial(make, lr=lr, moment_dtype="8bit"),
        }
        if rule == "adamw":
            ways |= {
                name: functools.partial(_of(peer, weight_decay=0.1, betas=(0.9, 0.95)), lr=lr)
                for name, peer in peers().items()
            }
        losses = {
            way: [trained(build, corpus, seed, count, device) for seed in seeds]
            for way, build in ways.items()
        }
        for way, values in losses.items():
            above = 100 * (statistics.mean(values) / statistics.mean(losses["float32"]) - 1)
            each = [
                100 * (loss / base - 1)
                for loss, base in zip(values, losses["float32"], strict=True)
            ]
            record = {
                "benchmark": "eight bit",
                "operation": "quality",
                "rule": rule,
                "moments": way,
                "lr": lr,
                "steps": count,
            }
            record |= {"seeds": list(seeds), "validation": [round(loss, 4) for loss in values]}
            records.append(
                {
                    **record,
                    "above_percent": round(above, 3),
                    "of_each_seed": [round(value, 3) for value in each],
                }
            )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", help="a file to append the lines to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quality:
        records = quality(options.rules, options.seeds, options.steps, options.device)
    else:
        records = steps(options.device, options.repeats)
    for record in records:
        emit(record, options.json)


if __name__ == "__main__":
    main()
