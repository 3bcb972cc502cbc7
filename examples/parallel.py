"""Tensor, pipeline and data parallelism out of torch's own modules, trained with HDET: a replica
here is a group of ranks.

    torchrun --nproc-per-node 8 -m examples.parallel                 # tp 2 x pp 2: 2 replicas of 4
    torchrun --nproc-per-node 2 -m examples.parallel --tp 1 --pp 1   # one rank a replica
    torchrun --nproc-per-node 8 -m examples.parallel --fixed         # no spread, no controller

What HDET needs to know is marked (1) to (4): who is a replica, which copies are of one parameter,
and who sees a loss.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from examples.bytes.data import load_corpus, sample_batch

WIDTH, HEAD, CONTEXT, BYTES = 32, 8, 32, 256


class Block(nn.Module):
    """As examples.bytes.model's, with q, k and v apart, so that their columns (whole heads) can be
    split over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """Part ``index`` of ``count`` of a GPT: the first stage embeds the bytes, the last one predicts
    them with the same matrix."""

    def __init__(self, layers: int, index: int, count: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        # The whole model from one seed, of which each rank keeps its part: all layouts begin with
        # the same weights.
        tokens, positions = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        blocks = [Block() for _ in range(layers)]
        for matrix in (
            p for part in (tokens, positions, *blocks) for p in part.parameters() if p.dim() == 2
        ):
            nn.init.normal_(matrix, std=0.02)
        self.blocks = nn.ModuleDict(
            {str(i): block for i, block in enumerate(blocks) if i * count // layers == index}
        )
        self.tokens = tokens if self.first or self.last else None
        self.positions = positions if self.first else None
        self.norm = nn.LayerNorm(WIDTH) if self.last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight) if self.last else x

    def split(self, tp: DeviceMesh) -> None:
        """Columns of what reads the residual stream, rows of what writes to it; norms and
        embeddings are whole on every rank."""
        for block in self.blocks.values():
            plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(
                ("out", "down"), RowwiseParallel()
            )
            parallelize_module(block, tp, plan)

    def groups(self) -> list[dict[str, object]]:
        matrices, vectors = (
            [p for p in self.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False)
        )
        return [
            {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "name": "vectors"},
        ]


def add_up_gradients(stage: Stage, dp: dist.ProcessGroup, embd: dist.ProcessGroup | None) -> None:
    """What DistributedDataParallel does, in one bucket; then the two uses of the embedding, whose
    copies stay bitwise equal."""
    gradients = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in stage.parameters()
    ]
    bucket = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size(dp)
    dist.all_reduce(bucket, group=dp)
    for gradient, mean in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
    if embd is not None:
        dist.all_reduce(stage.tokens.weight.grad, group=embd)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    parser.add_argument(
        "--pp",
        type=int,
        default=2,
        help="stages of the pipeline; the ranks left over are dp, the replicas",
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-lr", type=float, default=3e-3)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        help="windows of 32 bytes per replica, in 4 micro-batches",
    )
    parser.add_argument("--sync-interval", type=int, default=10, help="steps in a cycle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", default=None, help="folder of *.py, *.txt, *.md; default: this Python's library"
    )
    parser.add_argument(
        "--fixed", action="store_true", help="plain data-parallel training, for comparison"
    )
    return parser.parse_args(argv)


def report(step: int, stage: Stage, ensemble: hdet.Ensemble, losses: list[torch.Tensor]) -> None:
    record = ensemble.history[-1] if ensemble.history else None
    if (
        dist.get_rank() == 0 and record is not None and record["step"] == step
    ):  # a cycle has just ended; every rank has its record
        by_replica = " ".join(f"{loss:.3f}" for loss in record["losses"])
        print(
            f"step {step:5d}  losses of the replicas {by_replica}  rate "
            f"{record['values']['lr']:.2e}",
            flush=True,
        )


def train(
    args: argparse.Namespace,
    after_step: Callable[[int, Stage, hdet.Ensemble, list[torch.Tensor]], None] = report,
) -> None:
    # Replicas are ranks 0, 1, 4, 5 and 2, 3, 6, 7 of eight: the mesh's last dimension has
    # neighbours, which talk most.
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    shape = (args.pp, dist.get_world_size() // (args.tp * args.pp), args.tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))

    torch.manual_seed(args.seed)
    stage = Stage(args.layers, mesh.get_local_rank("pp"), args.pp).to(device)
    if args.tp > 1:
        stage.split(mesh["tp"])
    # First and last stage both hold the embedding, stages between them do not.
    ends = (
        dist.new_subgroups_by_enumeration(mesh.mesh[[0, -1]].flatten(1).T.tolist())[0]
        if args.pp > 1
        else None
    )

    replicas = hdet.Replicas.from_mesh(mesh, replicate="dp")  # (1)
    optimizer = torch.optim.AdamW(stage.groups(), lr=args.max_lr, betas=(0.9, 0.95))
    ensemble = hdet.Ensemble(  # (2)
        optimizer,
        OneCycleLR(
            optimizer, args.max_lr, total_steps=args.steps, pct_start=0.1, cycle_momentum=False
        ),
        knobs=[hdet.LearningRate(0.0 if args.fixed else 0.3)],
        replicas=replicas,
        sync=hdet.Sync(
            args.sync_interval, tied=[] if ends is None else [(stage.tokens.weight, ends)]
        ),
        controller=None
        if args.fixed
        else hdet.SoftmaxController(temperature=0.02, decay=None),  # (3)
    )

    pipeline = PipelineStage(
        stage, mesh.get_local_rank("pp"), args.pp, device, group=mesh.get_group("pp")
    )
    schedule = Schedule1F1B(
        pipeline,
        n_microbatches=4,
        loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    )
    text = load_corpus(args.data).train
    for step in range(1, args.steps + 1):
        x, y = sample_batch(
            text,
            args.batch_size,
            CONTEXT,
            seed=args.seed,
            stream=f"train/{replicas.index}",
            index=step,
        )
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        inputs = [x.to(device)] if stage.first else []
        targets = {"target": y.to(device), "losses": losses} if stage.last else {}
        schedule.step(*inputs, **targets)
        add_up_gradients(stage, mesh.get_group("dp"), ends)
        optimizer.step()
        # (4) the last stage's micro-batches; both of its tp ranks have them, the first stage has
        # none
        for loss in losses:
            ensemble.observe(loss)
        ensemble.step()
        after_step(step, stage, ensemble, losses)


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "start it with torchrun, one process per rank: torchrun --nproc-per-node 8 "
            "examples/parallel.py"
        )
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo")
    train(arguments())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
