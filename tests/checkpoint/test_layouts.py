"""What loads into what: shards anew, hand-made shards never mixed, one model out of any layout; and its export as safetensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hdet.checkpoint.keys import Keys
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed import checkpoint as dcp

import hdet
from hdet import checkpoint
from hdet.checkpoint import CheckpointError
from hdet.replicas import Replicas

from ..adversary.common import bits
from ..distributed import run_ranks
from .helpers import Run, alone, ddp, groups, hsdp, mlp, shards


def whole(run: Run) -> Any:
    """Parameters, and the optimizer's state by name of entry, as every rank would see them without shards."""

    def full(value: Any) -> Any:
        return bits(value.full_tensor() if hasattr(value, "full_tensor") else value)

    model = {name.removeprefix("module."): full(t) for name, t in run.net.state_dict().items()}
    states = run.optimizer.state_dict()["state"]
    return model, [{key: full(value) for key, value in states[i].items()} for i in sorted(states)]


def saved(rank: int, world: int, root: str, build: Callable[..., Run], at: int) -> Any:
    run = build(rank, world).steps(at)
    folder = checkpoint.save(root, run.state, at)
    return whole(run), sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def loaded(rank: int, world: int, root: str, build: Callable[..., Run]) -> Any:
    run = build(rank, world)
    checkpoint.load(root, run.state)
    state = whole(run)
    run.index = 10
    run.steps(6)
    return state


unsharded = partial(hsdp, shard=1)


@pytest.mark.parametrize(("build", "others"), [(hsdp, [(ddp, 2), (unsharded, 4)]), (ddp, [(hsdp, 4)])])
def test_shards_are_cut_anew(tmp_path: Path, build: Callable[..., Run], others: list[tuple[Callable[..., Run], int]]) -> None:
    states = run_ranks(saved, 4, str(tmp_path), build, 12)
    assert all(state == states[0] for state in states), "no mixture: every rank sees the one averaged model"
    assert not any("member" in key and not key.startswith("extra") for key in states[0][1])
    for other, world in others:
        assert run_ranks(loaded, world, str(tmp_path), other) == [states[0][0]] * world
    with pytest.warns(UserWarning, match="one replica explores nothing"):
        run = alone(controller=hdet.SoftmaxController(decay=None))
    checkpoint.load(tmp_path, run.state)
    assert whole(run) == states[0][0]


def test_groups_of_equal_ranks_store_one_model(tmp_path: Path) -> None:
    _, keys = run_ranks(saved, 4, str(tmp_path), groups, 5)[0]
    assert [key for key in keys if key.startswith("model")] == ["model.0.bias", "model.0.weight", "model.2.bias", "model.2.weight"]
    assert run_ranks(loaded, 2, str(tmp_path), ddp)[0][0] == run_ranks(loaded, 4, str(tmp_path), groups)[3][0]


def refused(rank: int, world: int, root: str, build: Callable[..., Run]) -> str:
    run = build(rank, world)
    before = run.facts()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root, run.state)
    assert run.facts() == before
    return str(caught.value)


def test_hand_made_shards_are_stored_by_member(tmp_path: Path) -> None:
    states = run_ranks(saved, 4, str(tmp_path), shards, 7)
    (zero, keys), (one, _) = states[0], states[1]
    assert [state[0] for state in states] == [zero, one, zero, one] and zero != one
    assert {key for key in keys if "up.weight" in key} == {
        f"{section}member{m}/up.weight{entry}"
        for m in (0, 1)
        for section, entry in [("model.", ""), *(("optimizer.state.", f".{name}") for name in ("step", "exp_avg", "exp_avg_sq"))]
    }
    assert len(set(run_ranks(refused, 2, str(tmp_path), ddp))) == 1
    assert "saved with replicas of 2 ranks, this run's have 1" in run_ranks(refused, 2, str(tmp_path), ddp)[0]


class Laid(torch.Tensor):
    """A tensor that says it lies on a mesh of these ranks."""

    def to_local(self) -> torch.Tensor:
        return self

    @classmethod
    def over(cls, *ranks: int) -> Laid:
        tensor = torch.Tensor._make_subclass(cls, torch.zeros(2))
        tensor.device_mesh = SimpleNamespace(mesh=torch.tensor(ranks))
        return tensor


def test_a_tensor_that_part_of_a_replica_holds_is_named_after_its_first_member() -> None:
    """tp 2 x pp 2 x dp 2: a name on both stages means two tensors, whether they are DTensors over tp or plain."""
    ranks = [[0, 1, 4, 5], [2, 3, 6, 7]]
    tp = [(0, 1), (2, 3), (4, 5), (6, 7)]
    found = {}
    for rank in range(8):
        index, member = next((r, row.index(rank)) for r, row in enumerate(ranks) if rank in row)
        keys = Keys(nn.Module(), Replicas(index, 2, ranks=ranks, member=member))
        over_tp = Laid.over(*next(group for group in tp if rank in group))
        found[rank] = (
            keys.shared(over_tp),
            keys.shared(torch.zeros(2)),
            keys.shared(Laid.over(*ranks[index])),
            keys.shared(Laid.over(*range(8))),
        )
    stages = {0: "member0/", 1: "member0/", 4: "member2/", 5: "member2/", 2: "member0/", 3: "member0/", 6: "member2/", 7: "member2/"}
    plain = {rank: f"member{m}/" for row in ranks for m, rank in enumerate(row)}
    assert found == {rank: (stages[rank], plain[rank], "", "") for rank in range(8)}


# -- safetensors -------------------------------------------------------------------------------------------------------------


def exported(rank: int, world: int, path: str, build: Callable[..., Run]) -> Any:
    run = build(rank, world).steps(7)
    if run.ensemble.replicas.count > 1:
        try:
            checkpoint.export_safetensors(path, run.net, run.ensemble)
        except ValueError as error:
            assert "call ensemble.converge() on all ranks before" in str(error)
        else:
            raise AssertionError("a mixture was exported")
    run.ensemble.converge()
    files = checkpoint.export_safetensors(path, run.net, run.ensemble)
    return [file.name for file in files], whole(run)[0], run.ensemble.values()


@pytest.mark.parametrize("build", [ddp, hsdp, groups])
def test_the_averaged_model_as_safetensors(tmp_path: Path, build: Callable[..., Run]) -> None:
    path = tmp_path / "new" / "model.safetensors"
    world = 2 if build is ddp else 4
    for names, model, values in run_ranks(exported, world, str(path), build):
        assert names == ["model.safetensors"] == [entry.name for entry in path.parent.iterdir()]
        assert {name: bits(tensor) for name, tensor in load_file(path).items()} == model
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "pt" and metadata["step"] == "7" and metadata["replicas"] == "2"
        assert json.loads(metadata["base_values"]) == values
    net = mlp(seed=7)
    load_model(net, path)
    assert {name: bits(tensor) for name, tensor in net.state_dict().items()} == model


def exported_at_the_start(rank: int, world: int, path: str) -> Any:
    run = ddp(rank, world)
    with torch.no_grad():
        run.net.module[0].bias.add_(0.1 * rank)  # a noisy start: replicas differ before the first step
    with pytest.raises(CheckpointError, match="the parameters differ between ranks 0 and 1, which should hold the same after a converge"):
        checkpoint.export_safetensors(path, run.net, run.ensemble)
    run.ensemble.converge()
    return checkpoint.export_safetensors(path, run.net, run.ensemble)


def test_before_the_first_step_replicas_that_differ_are_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert run_ranks(exported_at_the_start, 2, str(path)) == [[path], [path]]


def lost_in_an_export(rank: int, world: int, path: str) -> Any:
    run = ddp(rank, world).steps(5)

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(hdet.ReplicaLost) as caught:
        patch.setattr(dist, "all_gather_object", closed)
        checkpoint.export_safetensors(path, run.net, run.ensemble)
    return caught.value.phase, caught.value.step


def test_a_rank_that_is_lost_in_an_export_is_named(tmp_path: Path) -> None:
    assert run_ranks(lost_in_an_export, 2, str(tmp_path / "model.safetensors")) == [("checkpoint", 5)] * 2


def test_members_write_parts_and_an_index(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    results = run_ranks(exported, 4, str(path), shards)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert results[0][0] == names == sorted(entry.name for entry in tmp_path.iterdir())
    index = json.loads((tmp_path / names[2]).read_text())
    models = [results[m][1] for m in (0, 1)]
    assert index["weight_map"] == {f"member{m}/{name}": names[m] for m in (0, 1) for name in sorted(models[m])}
    for m in (0, 1):
        content = load_file(tmp_path / names[m])
        assert {name.removeprefix(f"member{m}/"): bits(tensor) for name, tensor in content.items()} == models[m]
    assert index["metadata"]["total_size"] == sum(len(memory) for model in models for _, _, memory in model.values())


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
    net.upper, net.lower = net.upper.clone(), net.lower.clone()  # safetensors wants memory of their own
    load_model(net, path)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), run.net.state_dict().values(), strict=True))
    assert alone(net=Tied()).resume(checkpoint.save(tmp_path, run.state, 2)).facts() == run.facts()


def test_export_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = alone()
    with pytest.raises(ValueError, match="path must end in .safetensors, got"):
        checkpoint.export_safetensors(tmp_path / "model.pt", run.net, run.ensemble)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        checkpoint.export_safetensors(tmp_path / "file" / "model.safetensors", run.net, run.ensemble)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.export_safetensors(tmp_path / "model.safetensors", run.net, run.ensemble)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
