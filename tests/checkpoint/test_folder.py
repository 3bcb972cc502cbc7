"""The folder of checkpoints: what is kept, what is refused, and in which words."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet import checkpoint
from hdet.checkpoint import CheckpointError

from ..distributed import run_ranks
from . import helpers
from .helpers import Run, alone, ddp, mlp

pytestmark = pytest.mark.filterwarnings("error")


def saved(root: Path, *at: int) -> Run:
    run = alone()
    for step in at:
        checkpoint.save(root, run.steps(step - run.index).state, step, keep=10)
    return run


def refusal(path: Path, run: Run) -> str:
    """The error; model, optimizer and Ensemble are as they were."""
    before = run.facts()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, run.state)
    assert run.facts() == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_newest_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    assert checkpoint.latest(root) is None
    run = alone()
    for step in (3, 6, 9):
        assert checkpoint.save(root, run.steps(3).state, step) == root / f"step-{step:08d}"
    assert sorted(entry.name for entry in root.iterdir()) == ["step-00000006", "step-00000009"]
    assert checkpoint.latest(root) == root / "step-00000009"
    fresh = alone().steps(1)
    assert checkpoint.load(root, fresh.state) == 9
    assert fresh.facts() == run.facts()
    assert checkpoint.load(root / "step-00000006", fresh.state) == 6
    assert fresh.facts() != run.facts()


def test_going_on_from_an_older_one_warns_and_keeps_the_later_ones(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9)
    run = alone().resume(tmp_path / "step-00000003").steps(1)
    with pytest.warns(UserWarning, match="holds a later checkpoint than the one saved now.*step-00000009"):
        checkpoint.save(tmp_path, run.state, 4, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000006", "step-00000009"]


def test_a_step_that_was_put_aside_for_another_comes_back(tmp_path: Path) -> None:
    run = saved(tmp_path, 2, 3)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.replaced")  # killed between the two renames that replace a step
    checkpoint.save(tmp_path, run.steps(3).state, 6, keep=10)
    assert sorted(e.name for e in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000006"]


def first_data(folder: Path) -> Path:
    return min(folder.glob("*.distcp"))


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def damage(folder: Path, how: str) -> None:
    data, manifest = first_data(folder), folder / "manifest.json"
    if how == "flipped":
        flip(data, data.stat().st_size // 2)
    elif how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif how == "missing":
        data.unlink()
    elif how == "metadata flipped":
        flip(folder / ".metadata", 200)
    elif how == "no manifest":
        manifest.unlink()
    elif how == "manifest truncated":
        manifest.write_text(manifest.read_text()[:-20])
    elif how == "manifest changed":
        manifest.write_text(manifest.read_text().replace('"step": 6', '"step": 7'))
    else:
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9'))


DAMAGES = {
    "flipped": "has changed: it is damaged",
    "truncated": "bytes instead of",
    "missing": "is missing: it is damaged",
    "metadata flipped": "'.metadata' of checkpoint",
    "no manifest": "has no manifest.json: it is damaged",
    "manifest truncated": "has an unreadable manifest.json",
    "manifest changed": "has been changed: it is damaged",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(tmp_path: Path, how: str) -> None:
    saved(tmp_path, 3, 6)
    damage(tmp_path / "step-00000006", how)
    message = refusal(tmp_path if how != "no manifest" else tmp_path / "step-00000006", alone().steps(2))
    assert DAMAGES[how] in message and str(tmp_path / "step-00000006") in message
    assert message.endswith(f"; load the one before, '{tmp_path / 'step-00000003'}'")
    alone().resume(tmp_path / "step-00000003")


def test_no_checkpoint_and_another_version(tmp_path: Path) -> None:
    run = alone()
    assert "holds no checkpoint: pass a folder step-XXXXXXXX" in refusal(tmp_path, run)
    saved(tmp_path, 3)
    damage(tmp_path / "step-00000003", "version")
    assert f"has version 9, this hdet reads 1: load it with the hdet that wrote it ('{hdet.__version__}')" in refusal(tmp_path, run)


def test_a_run_begins_where_nothing_is_and_continues_where_something_is(tmp_path: Path) -> None:
    run = alone().steps(3)
    before = run.facts()
    assert checkpoint.load(tmp_path / "not yet", run.state, missing=7) == 7
    assert checkpoint.load(tmp_path, run.state, missing=0) == 0 and run.facts() == before
    assert checkpoint.save(tmp_path, run.state).name == "step-00000003"  # the steps that the Ensemble has counted
    fresh = alone()
    assert checkpoint.load(tmp_path, fresh.state, missing=0) == 3 and fresh.ensemble.engine.step == 3
    assert checkpoint.save(tmp_path, fresh.steps(2).state).name == "step-00000005"
    damage(tmp_path / "step-00000005", "truncated")
    with pytest.raises(CheckpointError, match="it is damaged; load the one before"):
        checkpoint.load(tmp_path, fresh.state, missing=0)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):  # somebody meant this one
        checkpoint.load(tmp_path / "step-00000099", fresh.state, missing=0)


class Renamed(nn.Sequential):
    def __init__(self) -> None:
        net = mlp()
        super().__init__()
        self.first, self.between, self.last = net


def two_groups(params: Any, **settings: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], **settings)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    assert "it lacks 'first.weight', 'first.bias', 'last.weight' and 1 more and has '0.weight', '0.bias', '2.weight' and 1 more" in refusal(
        tmp_path, alone(net=Renamed())
    )
    wide = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    assert "'0.weight' has the shape (8, 6) there and (7, 6) here" in refusal(tmp_path, alone(net=wide))
    assert "parameter groups of [4] parameters, this one of [2, 2]" in refusal(tmp_path, alone(two_groups))
    run = alone()
    run.extra = {}
    state = checkpoint.RunState(run.net, run.ensemble)
    assert checkpoint.load(tmp_path, state) == 3  # an extra that nobody asks for is left
    checkpoint.save(tmp_path, state, 4)
    assert "it has no extra" in refusal(tmp_path, alone())


def one_cycle_scheduler() -> hdet.OneCycleAutoLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    return hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=10, controller=None)


LATE = "extra['open'] holds what a checkpoint cannot give back"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda root, run: checkpoint.save(root, {}, 1), TypeError, "state must be an hdet.checkpoint.RunState, got dict"),
        (lambda root, run: checkpoint.load(root, {}), TypeError, "state must be an hdet.checkpoint.RunState, got dict"),
        (lambda root, run: checkpoint.save(root, run.state, -1), ValueError, "step must be a whole number >= 0, got -1"),
        (lambda root, run: checkpoint.save(root, run.state, 1, keep=0), ValueError, "keep must be a whole number >= 1, got 0"),
        (lambda root, run: checkpoint.load(root, run.state, missing=-1), ValueError, "missing must be a whole number >= 0, got -1"),
        (lambda root, run: checkpoint.RunState(run, run.ensemble), TypeError, "model must be a torch.nn.Module, got Run"),
        (lambda root, run: checkpoint.RunState(run.net, run), TypeError, "ensemble must be an hdet.Ensemble, got Run"),
        (
            lambda root, run: checkpoint.RunState(run.net, one_cycle_scheduler()),
            TypeError,
            "ensemble must be an hdet.Ensemble, got OneCycleAutoLR: pass its .ensemble",
        ),
        (lambda root, run: checkpoint.RunState(mlp(), run.ensemble), ValueError, "parameter 0 of group 0 of the optimizer is not in model"),
        (lambda root, run: checkpoint.RunState(run.net, run.ensemble, [1]), TypeError, "extra must be a dict, or have state_dict and"),
        (lambda root, run: checkpoint.RunState(run.net, run.ensemble, {"index": 1, "open": Path}), ValueError, LATE),
    ],
)
def test_arguments(tmp_path: Path, call: Callable[[Path, Run], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        call(tmp_path, alone())


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    run = alone()
    state = checkpoint.RunState(run.net, run.ensemble, {"index": 1})
    state.extra["open"] = Path
    with pytest.raises(CheckpointError, match=re.escape(LATE)):
        checkpoint.save(tmp_path, state, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="FileExistsError|NotADirectoryError"):
        checkpoint.save(tmp_path / "file", run.state, 1)


class Loader:
    """As a stateful data loader."""

    def __init__(self) -> None:
        self.at = 0
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def things() -> dict[str, Any]:
    return {
        "loader": Loader(), "generator": torch.Generator(), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "epoch": 0
    }  # fmt: skip


def test_extra_has_objects_with_a_state_generators_and_plain_values(tmp_path: Path) -> None:
    run, extra = alone().steps(1), things()
    state = checkpoint.RunState(run.net, run.ensemble, extra)
    assert extra["loader"].asked == 0, "a data loader may start its workers for it"
    extra["loader"].at, extra["epoch"] = 17, 3
    extra["scaler"].load_state_dict({**extra["scaler"].state_dict(), "scale": 32.0})
    extra["generator"].manual_seed(5)
    torch.rand(3, generator=extra["generator"])
    checkpoint.save(tmp_path, state)

    fresh, other = alone(), things()
    objects = dict(other)
    assert checkpoint.load(tmp_path, checkpoint.RunState(fresh.net, fresh.ensemble, other)) == 1
    assert other["loader"].at == 17 and other["epoch"] == 3 and other["scaler"].get_scale() == 32.0
    assert all(other[key] is objects[key] for key in ("loader", "generator", "scaler"))
    assert torch.equal(torch.rand(3, generator=other["generator"]), torch.rand(3, generator=extra["generator"]))

    other["sampler"] = Loader()
    before = fresh.facts()
    with pytest.raises(CheckpointError, match=r"it has no extra\['sampler'\]"):
        checkpoint.load(tmp_path, checkpoint.RunState(fresh.net, fresh.ensemble, other))
    assert fresh.facts() == before
    with pytest.raises(CheckpointError, match="not with a dict|it has no extra"):
        checkpoint.save(tmp_path / "b", checkpoint.RunState(fresh.net, fresh.ensemble, Counted()))
        checkpoint.load(tmp_path / "b", checkpoint.RunState(fresh.net, fresh.ensemble, things()))


class Counted(Loader):
    def state_dict(self) -> Any:
        return [self.at]


# -- on several ranks ------------------------------------------------------------------------------------------------------


def errors_of_ranks(rank: int, world: int, root: str) -> list[str]:
    run = ddp(rank, world).steps(10)
    folder = checkpoint.save(root, run.state, 10)
    before, found = run.facts(), []
    for how in ("flipped", "truncated", "manifest changed"):
        copy = Path(root, how.replace(" ", "-"), "step-00000010")
        if rank == 0:
            shutil.copytree(folder, copy)
            damage(copy, "flipped" if how == "manifest changed" else how)
        torch.distributed.barrier()
        try:
            checkpoint.load(copy, run.state)
        except CheckpointError as error:
            found.append(str(error))
    # Only one rank's part does not fit.
    other = ddp(rank, world)
    if rank == 1:
        other.optimizer.param_groups[0]["params"].reverse()
    try:
        checkpoint.load(folder, other.state)
    except CheckpointError as error:
        found.append(str(error))
    assert run.facts() == before
    run.steps(2)  # nobody hangs, and training goes on
    return found


def test_every_rank_raises_the_same_error(tmp_path: Path) -> None:
    one, two = run_ranks(errors_of_ranks, 2, str(tmp_path))
    assert one == two and len(one) == 4
    assert "parameter groups" in one[3] and "(on rank 1 of 2)" in one[3]


def begun(rank: int, world: int, root: str) -> int:
    return checkpoint.load(Path(root, str(rank)), ddp(rank, world).state, missing=2)


def test_the_first_rank_says_whether_there_is_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "1", 3)  # on a disk that only the second rank sees
    assert run_ranks(begun, 2, str(tmp_path)) == [2, 2]


def misused(rank: int, world: int, root: str, how: str) -> tuple[str, str]:
    """What is said on this rank, and in a file of the root what is there at the end."""
    run, place, step = ddp(rank, world).steps(5), Path(root), 5
    checkpoint.save(place, run.state, 1)
    if how == "folders of their own":
        place = place / f"host {rank}"
    if how == "steps of their own":
        step += rank
    if how == "moments of their own" and rank == 1:
        next(iter(run.optimizer.state.values()))["exp_avg"].mul_(1.5)
    if how == "parameters of their own" and rank == 1:
        with torch.no_grad():
            run.net.module[0].bias.add_(1)
    with pytest.MonkeyPatch.context() as patch:
        if how == "index unreadable on one" and rank == 1:
            patch.setattr("hdet.checkpoint.reader.read_index", lambda *_: Path(root, "nothing").read_bytes())
        try:
            if how == "index unreadable on one":
                checkpoint.load(place, run.state)
            else:
                checkpoint.save(place, run.state, step, keep=1)
        except CheckpointError as error:
            return str(error), str(checkpoint.latest(place))
    return "nothing", ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("folders of their own", "is not one folder for all ranks: '__1_0.distcp' has been written there, and is not seen by all"),
        ("steps of their own", r"different \(step, keep\) on different ranks: \[\(5, 1\), \(6, 1\)\]"),
        ("moments of their own", "the optimizer's state differ between ranks 0 and 1"),
        ("parameters of their own", "the parameters differ between ranks 0 and 1"),
        ("index unreadable on one", r"does not fit this run: FileNotFoundError.*\(on rank 1 of 2\)"),
    ],
)
def test_what_ranks_do_not_do_alike_is_said_by_all_and_nothing_is_published(tmp_path: Path, how: str, says: str) -> None:
    found = run_ranks(misused, 2, str(tmp_path), how)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("step-")] == ["step-00000001"]
    assert all(re.search(says, text) for text, _ in found), found
    assert found[0][0].replace("host 0", "") == found[1][0].replace("host 0", "").replace("host 1", "")
    assert how != "folders of their own" or found[0][1] == found[1][1] == "None"


def files_of(rank: int, world: int, root: str) -> Any:
    run = helpers.ddp(rank, world).steps(5)
    folder = checkpoint.save(root, run.state, 5)
    return sum(entry.stat().st_size for entry in folder.glob("*.distcp")), json.loads((folder / "manifest.json").read_text())


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    sizes = [run_ranks(files_of, world, str(tmp_path / str(world)))[0] for world in (2, 4)]
    (two, manifest), (four, _) = sizes
    extras = 2 * 12_000  # bytes of two more ranks' generators, of some 8 kB each in torch's packing
    assert abs(four - two) < extras
    assert manifest["replicas"] == 2 and manifest["members"] == 1 and manifest["step"] == 5
