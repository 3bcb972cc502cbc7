"""What loads into what: shards anew, hand-made shards never mixed; exports as safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hdet
from hdet import checkpoint
from hdet.checkpoint import CheckpointError
from hdet.replicas import Replicas

from ..adversary.common import bits
from ..distributed import run_ranks
from . import helpers
from .helpers import Run, alone, ddp, groups, hsdp, mlp, shards
from .test_run_state import holders

Build = Callable[..., Run]


def whole(run: Run) -> Any:
    """Parameters, and the optimizer's state by entry, as every rank sees them without shards."""

    def full(value: Any) -> Any:
        return bits(value.full_tensor() if hasattr(value, "full_tensor") else value)

    model = {name.removeprefix("module."): full(t) for name, t in run.net.state_dict().items()}
    states = run.optimizer.state_dict()["state"]
    return model, [{key: full(value) for key, value in states[i].items()} for i in sorted(states)]


def saved(rank: int, world: int, root: str, build: Build, at: int) -> Any:
    run = build(rank, world).steps(at)
    checkpoint.save(root, run.state, at)
    return whole(run)


def loaded(rank: int, world: int, root: str, build: Build) -> Any:
    run = build(rank, world)
    checkpoint.load(root, run.state)
    state = whole(run)
    run.index = 10
    run.steps(6)
    return state


def refused(rank: int, world: int, root: str, build: Build) -> str:
    run = build(rank, world)
    before = run.facts()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root, run.state)
    assert run.facts() == before
    return str(caught.value)


unsharded = partial(hsdp, shard=1)


def shards_alone(rank: int, world: int, *args: Any) -> Run:
    """The hand-made shards, each of whose ranks is a replica by itself."""
    own = dist.new_group([rank], use_local_synchronization=True)
    return Run(helpers.Shard(own, 0), Replicas.from_group(), torch.optim.AdamW, rank)


@pytest.mark.parametrize(
    ("build", "others"), [(hsdp, [(ddp, 2), (unsharded, 4)]), (ddp, [(hsdp, 4)])]
)
def test_shards_are_cut_anew(tmp_path: Path, build: Build, others: list[tuple[Build, int]]) -> None:
    first, *same = run_ranks(saved, 4, str(tmp_path), build, 12)
    assert same == [first] * 3, "every rank sees the one averaged model"
    for other, world in others:
        assert run_ranks(loaded, world, str(tmp_path), other) == [first] * world
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        run = alone(controller=hdet.SoftmaxController(decay=None))
    checkpoint.load(tmp_path, run.state)
    assert whole(run) == first


def test_groups_of_equal_ranks_store_one_model(tmp_path: Path) -> None:
    run_ranks(saved, 4, str(tmp_path), groups, 5)
    assert holders(tmp_path / "step-00000005")["model.0.weight"] == [[0, 1, 2, 3]]
    one = run_ranks(loaded, 2, str(tmp_path), ddp)[0][0]
    assert one == run_ranks(loaded, 4, str(tmp_path), groups)[3][0]


def test_hand_made_shards_are_each_members_own(tmp_path: Path) -> None:
    """And do not load into replicas of other sizes, also where names and shapes fit."""
    zero, one, *others = run_ranks(saved, 4, str(tmp_path), shards, 7)
    assert zero != one and others == [zero, one]
    assert run_ranks(loaded, 4, str(tmp_path), shards) == [zero, one, zero, one]
    assert holders(tmp_path / "step-00000007")["model.up.weight"] == [[0, 2], [1, 3]]
    first, second = run_ranks(refused, 2, str(tmp_path), ddp)
    assert first == second and "it is of another model, or of replicas of other ranks" in first
    for message in run_ranks(refused, 4, str(tmp_path), shards_alone):
        assert "is not a DTensor that can be cut again: use the saved layout" in message


def stage(rank: int, world: int, root: str, loads: bool) -> float:
    """tp 2 x pp 2: a DTensor of one name on both stages is two tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    net, value = nn.Linear(4, 4, bias=False), torch.full((4, 4), 0.0 if loads else 1.0 + rank // 2)
    net.weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    one = {"replicas": Replicas.from_layout(tp=2, pp=2), "search": hdet.AutoLR(net)}
    ensemble = hdet.Ensemble(optimizer, total_steps=100, **one)
    state = checkpoint.RunState(net, ensemble)
    if loads:
        checkpoint.load(root, state)
    else:
        checkpoint.save(root, state, 1)
    return float(net.weight.full_tensor().mean())


def test_a_tensor_that_part_of_a_replica_holds_is_read_from_its_part(tmp_path: Path) -> None:
    for loads in (False, True):
        assert run_ranks(stage, 4, str(tmp_path), loads) == [1.0, 1.0, 2.0, 2.0]
    parts = holders(tmp_path / "step-00000001")["model.weight"]
    assert sorted(parts) == [[0], [1], [2], [3]]


def exported(rank: int, world: int, path: str, build: Build) -> Any:
    run = build(rank, world).steps(7)
    says = re.escape("call ensemble.converge() on all ranks before")
    with pytest.raises(ValueError, match=says):
        checkpoint.export_safetensors(path, run.net, run.ensemble)
    run.ensemble.converge()
    assert checkpoint.export_safetensors(path, run.net, run.ensemble) == Path(path)
    return whole(run)[0], run.ensemble.values()


@pytest.mark.parametrize("build", [ddp, hsdp, groups])
def test_the_averaged_model_as_safetensors(tmp_path: Path, build: Build) -> None:
    path = tmp_path / "new" / "model.safetensors"
    world = 2 if build is ddp else 4
    for model, values in run_ranks(exported, world, str(path), build):
        assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]
        assert {name: bits(tensor) for name, tensor in load_file(path).items()} == model
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert [metadata[key] for key in ("format", "step", "replicas")] == ["pt", "7", "2"]
        assert json.loads(metadata["base_values"]) == values
    net = mlp(seed=7)
    load_model(net, path)
    assert {name: bits(tensor) for name, tensor in net.state_dict().items()} == model


def test_what_members_hold_alone_is_exported_under_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    models = [result[0] for result in run_ranks(exported, 4, str(path), shards)][:2]
    found = {name: bits(tensor) for name, tensor in load_file(path).items()}
    alike = {name for name in models[0] if models[0][name] == models[1][name]}
    assert "up.weight" not in alike
    assert found == {
        **{name: models[0][name] for name in alike},
        **{f"member{m}/{n}": v for m in (0, 1) for n, v in models[m].items() if n not in alike},
    }


def known_mean(rank: int, world: int, path: str) -> tuple[bool, float, bool]:
    run = helpers.exact_local(rank, world, helpers.fused_base).steps(8)
    own = [p.detach().clone() for p in run.ensemble.parameters]
    checkpoint.export_safetensors(path, run.net, run.ensemble)
    untouched = all(torch.equal(a, b) for a, b in zip(own, run.ensemble.parameters, strict=True))
    mean = load_file(path)
    run.ensemble.converge()
    names, new = dict(run.net.module.named_parameters()), run.ensemble.parameters
    off = max(float((mean[name] - p).abs().max()) for name, p in names.items())
    far = max(float((a - b).abs().max()) for a, b in zip(own, new, strict=True))
    return untouched, off, far > 1e-4


def test_in_mid_cycle_a_known_mean_is_exported(tmp_path: Path) -> None:
    for untouched, off, apart in run_ranks(known_mean, 2, str(tmp_path / "model.safetensors")):
        # The plain average rounds in another order: a few units of the last place below 1.
        assert untouched and apart and off <= 2**-22


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.randn(6)
        self.register_buffer("upper", flat[:3])
        self.register_buffer("lower", flat[3:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_tied_and_overlapping_tensors(tmp_path: Path) -> None:
    """And no link leads the file away."""
    run, path = alone(net=Tied()).steps(2), tmp_path / "model.safetensors"
    (tmp_path / "theirs").write_text("theirs")
    path.symlink_to(tmp_path / "theirs")
    checkpoint.export_safetensors(path, run.net, run.ensemble)
    assert (tmp_path / "theirs").read_text() == "theirs"
    with safe_open(path, "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
        assert sorted(file.keys()) == ["embed.weight", "lower", "upper"]
    net = Tied()
    net.upper, net.lower = net.upper.clone(), net.lower.clone()  # safetensors wants it
    load_model(net, path)
    assert bits(dict(net.state_dict())) == bits(dict(run.net.state_dict()))
    assert alone(net=Tied()).resume(checkpoint.save(tmp_path, run.state, 2)).facts() == run.facts()
