"""A nanoGPT-like loop on real text, and the four lines that turn its fixed schedule into HDET.

    torchrun --nproc-per-node 4 -m examples.drop_in           # HDET, from a rate 30 times too low
    torchrun --nproc-per-node 4 -m examples.drop_in --fixed   # the same with torch's OneCycleLR

From the root of the repository. The changed lines are marked with (1) to (4). One process alone
runs too; it has no replicas and so explores nothing.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR

import hdet  # (1)
from examples.bytes.data import load_corpus, sample_batch
from examples.bytes.model import GPT, GPTConfig, cross_entropy

# -----------------------------------------------------------------------------
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--max-lr", type=float, default=3e-4)  # the best fixed rate is near 1e-2
parser.add_argument("--batch-size", type=int, default=8)  # windows per process
parser.add_argument("--sync-interval", type=int, default=25)  # steps in a cycle
parser.add_argument("--seed", type=int, default=0)
parser.add_argument(
    "--data", default=None, help="folder of *.py, *.txt, *.md; default: this Python's library"
)
parser.add_argument("--fixed", action="store_true", help="torch's OneCycleLR, for comparison")
args = parser.parse_args()

# -----------------------------------------------------------------------------
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
local_rank = int(os.environ.get("LOCAL_RANK", "0"))
use_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
    os.environ.get("LOCAL_WORLD_SIZE", "1")
)
device = f"cuda:{local_rank}" if use_gpus else "cpu"
if use_gpus:
    torch.cuda.set_device(device)
else:
    torch.set_num_threads(1)
if world_size > 1:
    dist.init_process_group("nccl" if use_gpus else "gloo")

# -----------------------------------------------------------------------------
corpus = load_corpus(args.data)
shape = GPTConfig()


def batch(
    text: torch.Tensor, stream: str, index: int, size: int = args.batch_size
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = sample_batch(text, size, shape.context, seed=args.seed, stream=stream, index=index)
    return x.to(device), y.to(device)


torch.manual_seed(args.seed)
raw_model = GPT(shape).to(device)
model = DDP(raw_model) if world_size > 1 else raw_model
optimizer = torch.optim.AdamW(
    raw_model.parameter_groups(weight_decay=0.1), lr=args.max_lr, betas=(0.9, 0.95)
)

if args.fixed:
    scheduler = OneCycleLR(
        optimizer, args.max_lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
else:
    # What all replicas score at the end of a cycle: the same fresh training text on every rank.
    probe = hdet.ProbeController(  # (2)
        lambda model, xy: cross_entropy(model(xy[0]), xy[1]),
        lambda cycle: [batch(corpus.train, "probe", 8 * cycle + i) for i in range(8)],
        model=raw_model,
    )
    scheduler = hdet.OneCycleAutoLR(  # (3)
        optimizer,
        args.max_lr,
        total_steps=args.steps,
        pct_start=0.1,
        cycle_momentum=False,
        auto_lr_warmup_steps=0,
        ensemble_lr_spread_ratio=0.3,
        model_sync_interval=args.sync_interval,
        controller=probe,
    )

# -----------------------------------------------------------------------------
begun = time.time()
for step in range(args.steps):
    x, y = batch(corpus.train, f"train/{rank}", step)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if args.fixed:
        scheduler.step()
    else:
        scheduler.step(loss)  # (4)
    if rank == 0 and (step + 1) % 50 == 0:
        print(
            f"step {step + 1:5d}  loss {loss.item():.3f}  rate {scheduler.get_last_lr()[0]:.2e}  "
            f"{time.time() - begun:5.1f} s",
            flush=True,
        )

# -----------------------------------------------------------------------------
# A run that ends inside a cycle would leave the replicas apart: the last step ends a cycle by
# itself, so rank 0 may speak for all.
if rank == 0:
    raw_model.eval()
    with torch.no_grad():
        losses = [
            cross_entropy(raw_model(x), y)
            for x, y in (batch(corpus.validation, "validation", i, 32) for i in range(16))
        ]
    print(f"validation loss {torch.stack(losses).mean().item():.4f} nats per byte")
if world_size > 1:
    dist.destroy_process_group()
