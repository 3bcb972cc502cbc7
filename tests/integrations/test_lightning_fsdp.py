"""Lightning's ModelParallelStrategy: replicas of shards (FSDP2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet

from ..distributed import RankError
from .frameworks import (
    EVERY,
    FIRST,
    PARTS,
    SPREAD,
    STEPS,
    TRIED,
    needs,
    on_ranks,
    told,
    trial,
    weights,
)

needs("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from .lightning_runs import Batch, Net, fit


class Sharded(Net):
    """Every pair of ranks is a replica, over which its model is sharded; with ``rows`` 1 all ranks
    are one."""

    def __init__(self, rows: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows = rows

    def configure_model(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "mesh"):
            self.mesh = init_device_mesh(
                "cpu", (self.rows, 4 // self.rows), mesh_dim_names=("dp_replicate", "dp_shard")
            )
            fully_shard(self.net, mesh=self.mesh if self.rows > 1 else self.mesh["dp_shard"])


def _sharded(folder: str, rows: int, ensemble: dict[str, Any] | None) -> Any:
    """[step]: this rank's shards, before and after; and those that a checkpoint of step 8 holds."""
    strategy = pl.strategies.ModelParallelStrategy(
        data_parallel_size=4, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1)
    trainer = fit(
        folder,
        ensemble,
        module=Sharded(rows),
        strategy=strategy,
        saves=saves,
        val_check_interval=1.0,
    )
    saved = torch.load(Path(folder, "step=8.ckpt"), weights_only=True)["state_dict"]
    return (
        trainer.seen.weights,
        torch.cat([p.flatten() for p in saved.values()]),
        weights(trainer.lightning_module),
    )


def replicas(module: Any) -> hdet.Replicas:
    return hdet.Replicas.from_mesh(module.mesh)


def test_hsdp_has_replicas_of_shards_and_a_whole_checkpoint_holds_their_mean(
    tmp_path: Path,
) -> None:
    plain = on_ranks(_sharded, 4, str(tmp_path / "plain"), 2, None)
    still = on_ranks(
        _sharded,
        4,
        str(tmp_path / "still"),
        2,
        {"knobs": [hdet.LearningRate(0)], "replicas": replicas},
    )
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(plain, still, strict=True))
    seen, saved, last = zip(
        *on_ranks(_sharded, 4, str(tmp_path / "spread"), 2, {**SPREAD, "replicas": replicas}),
        strict=True,
    )
    for a, b in ((0, 2), (1, 3)):  # the same shard
        assert not any(torch.equal(seen[a][step], seen[b][step]) for step in range(1, STEPS + 1))
        assert torch.equal(last[a], last[b])
    mean = [(seen[a][8] + seen[b][8]) / 2 for a, b in ((0, 2), (1, 3))]
    torch.testing.assert_close(
        saved[0].sort().values, torch.cat(mean).sort().values, rtol=0, atol=1e-7
    )


def test_plain_fsdp_is_one_replica_which_explores_nothing_and_is_enough_for_trials(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        RankError,
        match="ranks 0-3 are one replica, by what they share, so there is nothing to explore with",
    ):
        on_ranks(_sharded, 4, str(tmp_path / "spread"), 1, SPREAD)
    plain = on_ranks(_sharded, 4, str(tmp_path / "plain"), 1, None)
    auto = on_ranks(
        _sharded, 4, str(tmp_path / "auto"), 1, {"controller": hdet.AutoLR}
    )  # too short a run for it to move anything
    assert all(torch.equal(a[-1], b[-1]) for a, b in zip(plain, auto, strict=True))


class NumberedShards(Sharded):
    """Trains on the batch of its number and its rank, so that a loop by hand can do the same."""

    def __init__(self, lr: float) -> None:
        super().__init__(2, lr=lr, steps=FIRST)
        self.net[2] = nn.Identity()  # random states are not the same in Lightning

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.LambdaLR(
                    optimizer, lambda step: 1 - step / TRIED
                ),
                "interval": "step",
            }
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return super().training_step(self.numbered(batch_idx), batch_idx)

    def numbered(self, number: int) -> Batch:
        rank = torch.distributed.get_rank()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        return x, x.sum(1, keepdim=True)


SEARCHED = {"knobs": [hdet.LearningRate(0)], "sync": hdet.Sync(EVERY), "total_steps": TRIED}


def _hsdp(folder: str, lr: float, controller: Any) -> Any:
    module = NumberedShards(lr)
    ensemble = (
        None if controller is None else {**SEARCHED, "controller": controller, "replicas": replicas}
    )
    strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    trainer = fit(folder, ensemble, module=module, strategy=strategy)
    # Before the last validation, after which the module stays gathered.
    return trainer.seen.later[
        FIRST
    ], 1.0 if controller is None else trainer.hdet.ensemble.corrections["lr"]


def _hsdp_by_hand(lr: float, controller: Any) -> Any:
    module = NumberedShards(lr)
    module.log = lambda *args: None
    module.configure_model()
    [optimizer], [scheduler] = module.configure_optimizers()
    ensemble = hdet.Ensemble(
        optimizer,
        scheduler["scheduler"],
        **SEARCHED,
        controller=controller(module),
        replicas=replicas(module),
    )

    def losses(step: int) -> torch.Tensor:
        total = torch.zeros(())
        for number in range(PARTS * step, PARTS * (step + 1)):
            loss = module.training_step((), number) / PARTS
            if torch.is_grad_enabled():
                # as in Lightning, which lets FSDP2 reduce the gradients of each micro-batch
                loss.backward()
            total += loss.detach()
        if torch.is_grad_enabled():
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        return total

    for step in range(FIRST):
        optimizer.zero_grad()
        loss = losses(step)
        optimizer.step()
        ensemble.step(loss, closure=lambda step=step: losses(step))
    ensemble.converge()
    return weights(module), ensemble.corrections["lr"]


def test_in_hsdp_auto_lr_finds_to_the_bit_what_it_finds_in_a_loop_by_hand(tmp_path: Path) -> None:
    by_hand, ours = (
        on_ranks(_hsdp_by_hand, 4, 1e-4, trial),
        on_ranks(_hsdp, 4, str(tmp_path), 1e-4, trial),
    )
    for (a, correction), (b, same) in zip(by_hand, ours, strict=True):
        assert torch.equal(a, b) and correction == same >= 8
    assert torch.equal(ours[0][0], ours[2][0]) and torch.equal(ours[1][0], ours[3][0])


def test_in_hsdp_trials_leave_no_trace_in_the_run(tmp_path: Path) -> None:
    plain, looked = (
        on_ranks(_hsdp, 4, str(tmp_path), 3e-2, None),
        on_ranks(_hsdp, 4, str(tmp_path), 3e-2, told),
    )
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, looked, strict=True))
