"""What a single GPU can show of several processes: a group of one rank, whose collectives are
NCCL's own. On a CPU gloo's, so that the test is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.optim import FusedAdamW, FusedMuon

STEPS = 6


def trained(model: nn.Module, kind: type, device: str, averaged: bool) -> list[torch.Tensor]:
    """The parameters after some clipped steps; `averaged`: in cycles of two, over all ranks there
    are."""
    named = list(model.named_parameters())
    optimizer = (
        FusedMuon(named, ns_dtype=torch.float32, max_grad_norm=1.0)
        if kind is FusedMuon
        else FusedAdamW(model.parameters(), max_grad_norm=1.0)
    )
    ensemble = hdet.Ensemble(optimizer, sync=hdet.Sync(2)) if averaged else None
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ensemble is not None:
            ensemble.step(loss)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for _, p in named]


NCCL = pytest.param(
    "nccl",
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ],
)


@pytest.mark.parametrize("kind", [FusedAdamW, FusedMuon])
@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), NCCL])
def test_a_sharded_model_is_trained_as_one_in_no_group(
    kind: type, backend: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            nn.Sequential(
                nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 4)
            ).to(device)
        )
    alone = trained(models[0], kind, device, averaged=False)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        for layer in (*models[1][::2], models[1]):
            fully_shard(layer, mesh=mesh)
        for ours, theirs in zip(
            trained(models[1], kind, device, averaged=True), alone, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    finally:
        dist.destroy_process_group()
