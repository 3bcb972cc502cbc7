"""Trains a small GPT on the bytes of text files, with one replica in each process.

    torchrun --standalone --nproc-per-node 4 -m examples.bytes --compare

From the root of the repository. ``hdet report RUN`` draws what it writes. One process without
torchrun is enough for ``--method auto``, and for ``--coresident``.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from .data import load_corpus
from .training import CHECKPOINT, HISTORY, Run

PROMPT = b"import "


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m examples.bytes", None, __doc__, formatter_class=plain
    )
    add = parser.add_argument
    add("--method", choices=["both", "auto", "probe", "softmax", "none", "fixed"],
        help="what moves the rate: AutoLR's search in the first steps, a probe of replicas that "
             "differ (default with --coresident), or (else the default) first one, then the other; "
             "fixed: plain training")  # fmt: skip
    add("--compare", action="store_true", help="train with the fixed schedule first")
    add("--out", type=Path, default=Path("runs/bytes"), help="folder (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the run that is there")
    add("--resume", action="store_true", help="go on from the checkpoint that is there, bitwise")
    add("--max-lr", type=float, default=3e-4, help="default: %(default)s, 30 times too low")
    add("--steps", type=int, default=2000)
    add("--batch-size", type=int, default=8, help="windows of 64 bytes per replica and step")
    add("--sync-interval", type=int, default=50, help="steps in a cycle")
    add("--spread", type=float, default=0.3, help="replicas' rates: 1 - SPREAD to 1 + SPREAD times")
    add("--budget", type=float, help="part of the run that a trial of auto may take")
    add("--coresident", type=int, default=0, metavar="N", help="N replicas in this one process")
    add("--seed", type=int, default=0)
    add("--data", help="folder of *.py, *.txt, *.md (default: this Python's library)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args(arguments)
    options.method = options.method or ("probe" if options.coresident else "both")
    if options.compare and (options.resume or options.method == "fixed"):
        parser.error("--compare trains two new runs, of which one is fixed")
    if options.coresident and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("--coresident is one process: start it without torchrun")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    runs = list(split_runs(options, options.coresident or world_size))
    try:
        for _, folder in runs:
            check_folder(folder, options)
        corpus = load_corpus(options.data)
    except ValueError as error:
        sys.exit(str(error) if rank == 0 else 2)
    device = join_group(options.device, world_size)
    for settings, folder in runs:
        if rank == 0:
            prepare_folder(folder, keep=options.resume)
            print(f"{folder}: {settings.method}, {settings.replicas} replicas", flush=True)
        run = Run(settings, folder, corpus, device)
        run.train(options.resume)
        if rank == 0:
            loss = f"{run.validation:.4f} nats per byte"
            print(f"{folder}: validation loss {loss} in {run.seconds:.1f} s")
    if rank == 0:
        text = PROMPT + run.model.generate(PROMPT, 200, seed=options.seed)
        print("\n" + re.sub(r"[^ -~\n]", ".", text.decode("latin-1")))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


def split_runs(options: argparse.Namespace, replicas: int) -> list[tuple[argparse.Namespace, Path]]:
    """Settings and folder of each run. Settings are what must be the same in a resumed run."""
    settings = copy.copy(options)
    settings.replicas = replicas
    for name in ("compare", "out", "overwrite", "resume", "device"):
        delattr(settings, name)
    if not options.compare:
        return [(settings, options.out)]
    fixed = argparse.Namespace(**{**vars(settings), "method": "fixed"})
    return [(fixed, options.out / "fixed"), (settings, options.out / "hdet")]


def check_folder(folder: Path, options: argparse.Namespace) -> None:
    if options.resume and not (folder / CHECKPOINT).is_file():
        raise ValueError(f"--resume: {str(folder)!r} has no {CHECKPOINT}")
    if (folder / HISTORY).exists() and not (options.resume or options.overwrite):
        raise ValueError(f"{str(folder)!r} holds a run: pass --overwrite, --resume, or --out")


def prepare_folder(folder: Path, keep: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in () if keep else (HISTORY, CHECKPOINT):
        (folder / name).unlink(missing_ok=True)


def join_group(device: str, world_size: int) -> str:
    """The device of this process: a GPU of its own, where there are enough, or the CPU."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" or (device == "auto" and gpus >= local):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    else:
        device = "cpu"
    if world_size == 1:
        return device
    if device == "cpu":
        torch.set_num_threads(1)  # the processes share the cores
        if local == world_size and os.path.exists("/sys/class/net/lo"):
            # One machine: a host name that does not resolve must not matter.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return device


if __name__ == "__main__":
    main()
