"""Lightning's ModelParallelStrategy: replicas of shards (FSDP2)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet

from ..distributed import RankError
from .frameworks import SPREAD, TRIED, needs, on_ranks, told

needs("lightning")
import lightning.pytorch as pl

from .lightning_runs import Net, train


class Sharded(Net):
    """Every pair of ranks is a replica, over which its model is sharded; with ``rows`` 1 all ranks
    are one. ``length``: of the schedule."""

    def __init__(self, rows: int = 2, length: int = TRIED, **settings: Any) -> None:
        super().__init__(schedule="lambda", **settings)
        self.rows, self.length = rows, length

    def configure_model(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "mesh"):
            shape = (self.rows, 4 // self.rows)
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
            fully_shard(self.net, mesh=self.mesh if self.rows > 1 else self.mesh["dp_shard"])

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["scheduler"].lr_lambdas = [lambda step: 1 - step / self.length]
        return made


def replicas(module: Any) -> hdet.Replicas:
    return hdet.Replicas.from_mesh(module.mesh)


def sharded(folder: str, ensemble: Any, rows: int = 2, **settings: Any) -> Any:
    strategy = pl.strategies.ModelParallelStrategy(
        data_parallel_size=4, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    module = partial(Sharded, rows)
    return train(folder, ensemble, module=module, strategy=strategy, **settings)


def test_hsdp_has_replicas_of_shards_and_a_whole_checkpoint_holds_their_mean(
    tmp_path: Path,
) -> None:
    still = {"knobs": [hdet.LearningRate(0)], "replicas": replicas}
    plain, same, spread = (
        on_ranks(partial(sharded, save=8), 4, str(tmp_path / name), ensemble)
        for name, ensemble in (
            ("plain", None), ("still", still), ("spread", {**SPREAD, "replicas": replicas})
        )
    )  # fmt: skip
    assert all(torch.equal(a.last, b.last) for a, b in zip(plain, same, strict=True))
    mean = []
    for a, b in ((spread[0], spread[2]), (spread[1], spread[3])):  # the same shard
        ends = [step for step in a.weights if torch.equal(a.weights[step], b.weights[step])]
        assert ends == [5, 10, 12] and torch.equal(a.last, b.last)
        mean.append((a.weights[8] + b.weights[8]) / 2)
    saved, expected = spread[0].saved.sort().values, torch.cat(mean).sort().values
    torch.testing.assert_close(saved, expected, rtol=0, atol=1e-7)


def test_plain_fsdp_is_one_replica_which_explores_nothing_and_is_enough_for_trials(
    tmp_path: Path,
) -> None:
    run = partial(sharded, rows=1)
    with pytest.raises(RankError, match="ranks 0-3 are one replica, .* nothing to explore with"):
        on_ranks(run, 4, str(tmp_path), SPREAD)
    plain, auto = (on_ranks(run, 4, str(tmp_path), of) for of in (None, {"search": told}))
    assert all(torch.equal(a.last, b.last) for a, b in zip(plain, auto, strict=True))
