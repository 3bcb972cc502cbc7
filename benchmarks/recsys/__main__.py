"""A recommender trained in one pass over a year of generated interactions, with the four parameter
groups of the paper.

    torchrun --nproc-per-node 4 -m benchmarks.recsys              # HDET's probe, from a rate 30
    times too low torchrun --nproc-per-node 4 -m benchmarks.recsys --paper      # the paper's
    controller: noise at the start, a knob for each group torchrun --nproc-per-node 4 -m
    benchmarks.recsys --fixed      # torch's OneCycleLR

Every process reads its own part of the log (recommender.py), each interaction once; what counts is
the loss on the last day, on interactions that nobody has trained on. One process alone runs too; it
has no replicas and so explores nothing.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR

import hdet

from .recommender import TASKS, InteractionLog, Interactions, Recommender, engagement_losses

# -----------------------------------------------------------------------------
parser = argparse.ArgumentParser(prog="python -m benchmarks.recsys")
parser.add_argument("--steps", type=int, default=800)  # a year
parser.add_argument("--max-lr", type=float, default=6e-4)  # the best fixed rate is near 2e-2
parser.add_argument("--batch-size", type=int, default=32)  # interactions per process
parser.add_argument("--sync-interval", type=int, default=20)  # steps in a cycle
parser.add_argument("--seed", type=int, default=0)
which = parser.add_mutually_exclusive_group()
which.add_argument(
    "--paper", action="store_true", help="the published controller, spread and noise"
)
which.add_argument("--fixed", action="store_true", help="torch's OneCycleLR, for comparison")
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
log = InteractionLog()


def batch(stream: str, step: int, index: int, size: int = args.batch_size) -> Interactions:
    """Interactions of one step's time of the year; the same ones for the same stream and index."""
    users, items, history, engagement = log.sample(
        size, step / args.steps, seed=args.seed, stream=stream, index=index
    )
    return users.to(device), items.to(device), history.to(device), engagement.to(device)


torch.manual_seed(args.seed)
raw_model = Recommender(log.users, log.items, log.history).to(device)
model = DDP(raw_model) if world_size > 1 else raw_model
if args.paper:
    hdet.warm_noise_(raw_model.named_parameters(), seed=args.seed)
optimizer = torch.optim.AdamW(
    raw_model.parameter_groups(weight_decay=0.01), lr=args.max_lr, betas=(0.9, 0.95)
)

cycle_settings = {"total_steps": args.steps, "pct_start": 0.1, "cycle_momentum": False}
if args.fixed:
    scheduler = OneCycleLR(optimizer, args.max_lr, **cycle_settings)
elif args.paper:
    # Arguments as published. A knob for each group; replicas with a lower training loss pull its
    # rate towards their own.
    scheduler = hdet.OneCycleAutoLR(
        optimizer,
        args.max_lr,
        **cycle_settings,
        auto_lr_warmup_steps=args.steps // 10,
        ensemble_lr_spread_ratio=1 / 9,
        model_sync_interval=args.sync_interval,
        enable_auto_lr=True,
    )
else:
    # What all replicas score at the end of a cycle: the same fresh interactions of that time of the
    # year on every rank.
    probe = hdet.ProbeController(
        lambda model, batch: engagement_losses(model, batch).mean(),
        lambda cycle: [
            batch("probe", min((cycle + 1) * args.sync_interval, args.steps), 8 * cycle + i)
            for i in range(8)
        ],
        model=raw_model,
    )
    scheduler = hdet.OneCycleAutoLR(
        optimizer,
        args.max_lr,
        **cycle_settings,
        auto_lr_warmup_steps=0,
        ensemble_lr_spread_ratio=0.3,
        model_sync_interval=args.sync_interval,
        controller=probe,
    )

# -----------------------------------------------------------------------------
begun = time.time()
for step in range(args.steps):
    loss = engagement_losses(model, batch(f"train/{rank}", step, step)).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if args.fixed:
        scheduler.step()
    else:
        scheduler.step(loss)
    if rank == 0 and (step + 1) % 50 == 0:
        rates = "  ".join(f"{group['name']} {group['lr']:.1e}" for group in optimizer.param_groups)
        print(
            f"step {step + 1:5d}  loss {loss.item():.3f}  rates: {rates}  "
            f"{time.time() - begun:5.1f} s",
            flush=True,
        )

# -----------------------------------------------------------------------------
# The last step ends a cycle by itself, so the replicas are equal and rank 0 may speak for all.
if rank == 0:
    raw_model.eval()
    with torch.no_grad():
        users, items, history, engagement = last_day = batch("held out", args.steps, 0, 16384)
        logits = raw_model(users, items, history)
        constant = engagement.mean(0).logit().expand_as(engagement)
        print(
            f"held-out loss {engagement_losses(raw_model, last_day).mean().item():.4f} nats: ",
            end="",
        )
        for i, task in enumerate(TASKS):
            own, base = (
                F.binary_cross_entropy_with_logits(x[:, i], engagement[:, i]).item()
                for x in (logits, constant)
            )
            print(
                f"{task} {own:.4f} (a constant: {base:.4f})",
                end="\n" if i == len(TASKS) - 1 else ", ",
            )
if world_size > 1:
    dist.destroy_process_group()
