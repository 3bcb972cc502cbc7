"""The folder of checkpoints: what is kept, what is refused, and in which words."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hdet
from hdet import checkpoint
from hdet.checkpoint import CheckpointError, folder, tensor_files
from hdet.optim.snapshot import inner_optimizer

from ..adversary.common import bits, tree
from ..distributed import run_ranks
from .helpers import Run, alone, ddp, fused_fp32, mlp

pytestmark = pytest.mark.filterwarnings("error")


def saved(root: Path, *at: int) -> Run:
    run = alone()
    for step in at:
        checkpoint.save(root, run.steps(step - run.index).state, step, keep=10)
    return run


def refusal(path: Path, run: Run) -> str:
    """The error; model, optimizer, scheduler, Ensemble and extra are as they were."""
    before, extra = run.facts(), bits(run.state.extra)
    scheduler = bits(run.scheduler.state_dict())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, run.state)
    assert run.facts() == before and bits(run.extra) == extra
    assert bits(run.scheduler.state_dict()) == scheduler
    assert "\n" not in str(caught.value)
    return str(caught.value)


def checkpoints(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.name != folder.LOCK)


def test_the_newest_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    assert checkpoint.latest(root) is None
    run = alone()
    for step in (3, 6, 9):
        assert checkpoint.save(root, run.steps(3).state, step) == root / f"step-{step:08d}"
    assert checkpoints(root) == ["step-00000006", "step-00000009"]
    assert checkpoint.latest(root) == root / "step-00000009"
    fresh = alone().steps(1)
    assert checkpoint.load(root, fresh.state) == 9
    assert fresh.facts() == run.facts()
    assert checkpoint.load(root / "step-00000006", fresh.state) == 6
    assert fresh.facts() != run.facts()


def test_going_on_from_an_older_one_warns_and_keeps_the_later_ones(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6, 9)
    run = alone().resume(tmp_path / "step-00000003").steps(1)
    with pytest.warns(UserWarning, match="holds a later checkpoint than.*step-00000009"):
        checkpoint.save(tmp_path, run.state, 4, keep=1)
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000006", "step-00000009"]


def test_a_run_begins_where_nothing_is_and_continues_where_something_is(tmp_path: Path) -> None:
    run = alone().steps(3)
    before = run.facts()
    assert checkpoint.load(tmp_path / "not yet", run.state, missing=7) == 7
    assert checkpoint.load(tmp_path, run.state, missing=0) == 0 and run.facts() == before
    assert checkpoint.save(tmp_path, run.state).name == "step-00000003"  # as the Ensemble counts
    fresh = alone()
    assert checkpoint.load(tmp_path, fresh.state, missing=0) == 3
    assert fresh.ensemble.steps_done == 3
    assert checkpoint.save(tmp_path, fresh.steps(2).state).name == "step-00000005"
    damage(tmp_path / "step-00000005", "truncated")
    with pytest.raises(CheckpointError, match="it is damaged; load the one before"):
        checkpoint.load(tmp_path, fresh.state, missing=0)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):  # somebody meant this one
        checkpoint.load(tmp_path / "step-00000099", fresh.state, missing=0)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


GONE, MANIFEST = "is missing, or no regular file: it is damaged", "is missing or has changed"
# of a file of tensors and the manifest
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "flipped": (lambda f, m: flip(f, f.stat().st_size // 2), "has changed: it is damaged"),
    "truncated": (lambda f, m: f.write_bytes(f.read_bytes()[:-100]), "bytes instead of"),
    "a link": (lambda f, m: f.symlink_to(f.rename(f.parents[1] / "elsewhere")), GONE),
    "a pipe": (lambda f, m: (f.unlink(), os.mkfifo(f)), GONE),
    "state flipped": (lambda f, m: flip(m.with_name("state.json"), 200), "'state.json' of checkp"),
    "no manifest": (lambda f, m: m.unlink(), MANIFEST),
    "manifest truncated": (lambda f, m: m.write_text(m.read_text()[:-20]), MANIFEST),
    "manifest changed":
        (lambda f, m: m.write_text(m.read_text().replace('"step": 6', '"step": 7')), MANIFEST),
}  # fmt: skip


def damage(path: Path, how: str) -> None:
    DAMAGES[how][0](min(path.glob("*.safetensors")), path / "manifest.json")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(tmp_path, how) -> None:
    saved(tmp_path, 3, 6)
    damage(tmp_path / "step-00000006", how)
    message = refusal(tmp_path, alone().steps(2))
    assert DAMAGES[how][1] in message and str(tmp_path / "step-00000006") in message
    assert message.endswith(f"; load the one before, '{tmp_path / 'step-00000003'}'")
    run = alone().resume(tmp_path / "step-00000003").steps(3)
    checkpoint.save(tmp_path, run.state, 6)  # it can be saved again
    assert alone().resume(tmp_path).facts() == run.facts()


def sign(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change manifest and state, with checksums that are right."""
    manifest, state = (json.loads((path / n).read_text()) for n in ("manifest.json", "state.json"))
    change(manifest, state)
    content = json.dumps(state).encode()
    (path / "state.json").write_bytes(content)
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if manifest["files"]:
        manifest["files"]["state.json"] = sums
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))


WEIGHT, FITS = "model.0.weight", "does not fit this run"
MOMENT = "optimizer.state.0.weight.exp_avg"


def values(state: dict[str, Any], part: str) -> dict[str, Any]:
    return state["parts"][part]["values"][0]


# of manifest and state
CHANGES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a gap": (lambda m, s: s["tensors"][WEIGHT][0].update(offsets=[1, 0]), f"no file.*'{WEIGHT}'"),
    "a shape": (lambda m, s: s["tensors"][WEIGHT][0].update(sizes=[8, 5]), "6] in its file"),
    "too large": (lambda m, s: s["tensors"][MOMENT][0].update(shape=[1 << 60]), FITS),
    "another dtype": (lambda m, s: s["tensors"][MOMENT][0].update(dtype="int32"), "torch.int32"),
    "a file outside": (lambda m, s: s["tensors"][MOMENT][0].update(file="../x"), "no file of it"),
    "no list of the state": (lambda m, s: m["files"].clear(), MANIFEST),
    "no step": (lambda m, s: m.pop("step"), FITS),
    "no chunk": (lambda m, s: s["tensors"].update({"model.0.bias": []}), FITS),
    "float64": (lambda m, s: s["tensors"][WEIGHT][0].update(dtype="float64"), "is torch.float64 o"),
    "no optimizer": (lambda m, s: s["parts"].pop("optimizer"), FITS),
    "a file elsewhere": (lambda m, s: m["files"].update({"../x": {}}), "no regular file"),
    "a correction":
        (lambda m, s: values(s, "ensemble").update(corrections=[-1.0]), f"{FITS}.*corrections"),
    "a wrong schedule": (lambda m, s: values(s, "ensemble").update(scheduler=3), FITS),
    "the last part":
        (lambda m, s: values(s, "extra")["generator"].update({"$tensor": "none"}), FITS),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGES)
def test_contents_that_are_wrong_under_right_checksums_change_nothing(tmp_path, how) -> None:
    saved(tmp_path, 3)
    change, says = CHANGES[how]
    sign(tmp_path / "step-00000003", change)
    assert re.search(says, refusal(tmp_path, alone().steps(2)))


class Wrapper(torch.optim.Optimizer):
    """As Lightning's: it has all that the inner optimizer has, which steps and loads."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        vars(self).update({**vars(optimizer), "optimizer": optimizer})

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        vars(self).update(param_groups=self.optimizer.param_groups, state=self.optimizer.state)


class InPlace(torch.optim.SGD):
    """Writes into the state that there is, too."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, saved in zip(self.state.values(), state["state"].values(), strict=False):
            own["momentum_buffer"].copy_(saved["momentum_buffer"])
        super().load_state_dict(state)


class Part(nn.Identity):
    """Takes its own state over, also where it refuses it then."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen[:] = state["seen"]
        if self.refuses:
            refuse()


def refuse(*_: Any) -> None:
    raise ValueError("not this one")


class Picky(torch.optim.lr_scheduler.OneCycleLR):
    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if state["last_epoch"] == 3:
            refuse()


# who refuses when all has been read and checked
REFUSING: dict[str, Callable[[Run, list[Part]], object]] = {
    "an extra state": lambda run, parts: setattr(parts[0], "refuses", True),
    "the last object": lambda run, parts: setattr(parts[2], "refuses", True),
    "a module's hook": lambda run, parts: run.net[2].register_load_state_dict_post_hook(refuse),
    "an optimizer's hook": lambda run, parts:
        inner_optimizer(run.optimizer).register_load_state_dict_post_hook(refuse),
    "the scheduler": lambda run, parts: setattr(run.scheduler, "__class__", Picky),
}  # fmt: skip
WRAPPED: list[Callable[..., torch.optim.Optimizer]] = [
    lambda params, **settings: Wrapper(Wrapper(torch.optim.AdamW(params, **settings))),
    lambda params, **settings: Wrapper(InPlace(params, momentum=0.9, **settings)),
    fused_fp32,
]


@pytest.mark.parametrize("make", WRAPPED)
@pytest.mark.parametrize("who", REFUSING)
def test_what_refuses_when_it_takes_over_leaves_all_as_it_was(tmp_path, who, make) -> None:
    def build(steps: int) -> tuple[Run, list[Part]]:
        parts = [Part(), Part(), Part()]
        dtype = torch.bfloat16 if make is fused_fp32 else torch.float32
        run = alone(make, net=mlp(dtype).append(parts[0]))
        run.extra |= {"first": parts[1], "last": parts[2]}
        REFUSING[who](run, parts)
        return run.steps(steps), parts

    run, parts = build(3)
    for part in parts:
        part.seen += [1]
    checkpoint.save(tmp_path, run.state, 3)
    (run, parts), (twin, _) = build(2), build(2)
    assert "not this one" in refusal(tmp_path, run)
    assert [part.seen for part in parts] == [[0]] * 3
    assert run.steps(3).facts() == twin.steps(3).facts()


def test_a_checkpoint_of_the_former_format_is_refused_by_name(tmp_path: Path) -> None:
    run, path = alone(), tmp_path / "step-00000003"
    path.mkdir()
    (path / ".metadata").write_bytes(b"torch's pickle")
    old = {"format": "hdet-checkpoint", "version": 1, "hdet": "0.1.0", "step": 3}
    (path / "manifest.json").write_text(json.dumps(old))
    message = refusal(tmp_path, run)
    assert "has format 1, and this hdet reads format 2" in message
    assert message.endswith("load it with the hdet that wrote it (0.1.0)")
    with pytest.raises(CheckpointError, match="holds what this version of hdet does not write"):
        checkpoint.save(tmp_path, run.state, 3)


def two_groups(params: Any, **settings: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], **settings)


OTHERS: dict[str, tuple[Callable[[], Run], str]] = {
    "names": (
        lambda: alone(net=nn.Sequential(OrderedDict(zip("abc", mlp(), strict=True)))),
        "'a.weight' is nothing there and torch.float32 of shape .* here, and 7 more tensors differ",
    ),
    "shapes": (
        lambda: alone(net=nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))),
        r"'0.weight' is torch.float32 of shape \(8, 6\) there and torch.float32 of shape \(7, 6\)",
    ),
    "a dtype": (lambda: alone(net=mlp(torch.bfloat16)), "and torch.bfloat16 of shape"),
    "groups": (lambda: alone(two_groups), r"groups of \[4\] parameters, this one of \[2, 2\]"),
    "an optimizer": (lambda: alone(hdet.FusedSGD), "not that of a FusedSGD"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, how: str) -> None:
    saved(tmp_path, 3)
    build, says = OTHERS[how]
    assert re.search(says, refusal(tmp_path, build()))


def one_cycle() -> hdet.OneCycleAutoLR:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    return hdet.OneCycleAutoLR(optimizer, max_lr=0.1, total_steps=10, controller=None)


def later(run: Run, value: Any) -> checkpoint.RunState:
    """Put in after the constructor has looked."""
    state = State(run.net, run.ensemble, {"index": 1})
    state.extra["open"] = value
    return state


FLOAT4 = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
DEEP = reduce(lambda inner, _: [inner], range(101), [])


State, save, load = checkpoint.RunState, checkpoint.save, checkpoint.load
export = checkpoint.export_safetensors
LOST = "open.* holds what a checkpoint cannot give back"
NO_FOLDER = "FileExistsError|NotADirectoryError"
ARGUMENTS: list[tuple[Callable[[Path, Run], object], type[Exception], str]] = [
    (lambda at, run: save(at, run.state, -1), ValueError, "step must be a whole number"),
    (lambda at, run: save(at, run.state, 1, keep=0), ValueError, "keep must be a whole"),
    (lambda at, run: save(at, later(run, Path), 1), CheckpointError, f"extra.{LOST}"),
    (lambda at, run: save(at, later(run, FLOAT4), 1), CheckpointError, "open' is F4.*, and not"),
    (lambda at, run: save(at, later(run, DEEP), 1), CheckpointError, "open.* more than 100 deep"),
    (lambda at, run: save(at / "file", run.state, 1), CheckpointError, NO_FOLDER),
    (lambda at, run: load(at, run.state, missing=-1), ValueError, "missing must be a"),
    (lambda at, run: State(run.net, one_cycle()), TypeError, "OneCycleAutoLR.*pass its .ensemble"),
    (lambda at, run: State(mlp(), run.ensemble), ValueError, "parameters that are not in model"),
    (lambda at, run: State(run.net, run.ensemble, run), TypeError, "extra must be a dict, got Run"),
    (lambda at, run: State(run.net, run.ensemble, {"open": Path}), ValueError, LOST),
    (lambda at, run: State(run.net, run.ensemble, {"open": np.ones(2)}), ValueError, r"\.tolist"),
    (lambda at, run: export(at / "model.pt", run.net, run.ensemble), ValueError,
        "path must end in .safetensors, got"),
    (lambda at, run: export(at / "file" / "model.safetensors", run.net, run.ensemble),
        CheckpointError, NO_FOLDER),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), ARGUMENTS)
def test_arguments_that_cannot_be_are_refused_by_name(tmp_path, call, error, says) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=says):
        call(tmp_path, alone())
    assert [name for name in checkpoints(tmp_path) if "partial" not in name] == ["file"]


def test_what_others_have_there_stays(tmp_path: Path) -> None:
    """Also a checkpoint that its owner has moved to another disk, with a link in its place. A save
    that it is in the way of is refused before anything is written."""
    for path in ("step-00000001/weights", "step-00000002/manifest.json", "step-00000003"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text('{"format": "of another tool"}')
    run = saved(tmp_path, 4)
    moved = (tmp_path / "step-00000004").rename(tmp_path / "moved")
    (tmp_path / "step-00000004").symlink_to(moved, target_is_directory=True)
    before, facts = tree(tmp_path), run.facts()
    for step in (1, 2, 3, 4):
        with pytest.raises(CheckpointError, match=f"step-0000000{step}.*holds what this version"):
            checkpoint.save(tmp_path, run.state, step, keep=1)
        assert tree(tmp_path) == before and run.facts() == facts
    for step in (5, 6, 7):
        checkpoint.save(tmp_path, run.steps(1).state, step, keep=1)
    found = tree(tmp_path)
    assert {name: found[name] for name in before} == before
    assert found.keys() - before.keys() == {"step-00000007"}
    assert alone().resume(tmp_path).facts() == run.facts()
    assert checkpoint.load(tmp_path / "step-00000004", run.state) == 4, "and reads as before"


def test_a_second_writer_is_refused_and_the_first_is_not_disturbed(tmp_path, monkeypatch) -> None:
    said: list[str] = []
    run, second = alone().steps(3), alone(net=mlp(seed=1)).steps(3)
    facts, write_files = second.facts(), tensor_files.write_files

    def intrude(*args: Any) -> None:
        monkeypatch.undo()
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, second.state, 3)
        said.append(str(caught.value))
        write_files(*args)

    monkeypatch.setattr("hdet.checkpoint.saving.write_files", intrude)
    checkpoint.save(tmp_path, run.state, 3)
    assert len(said) == 1 and "is being written by another process" in said[0]
    assert second.facts() == facts and checkpoints(tmp_path) == ["step-00000003"]
    assert alone().resume(tmp_path).facts() == run.facts()
    checkpoint.save(tmp_path, second.state, 3)  # nothing is held any more
    assert alone().resume(tmp_path).facts() == second.facts()


def errors_of_ranks(rank: int, world: int, root: str) -> list[str]:
    run = ddp(rank, world).steps(10)
    run.extra["part"] = Part()
    # The first rank says whether there is one: the other is on a disk that only the second sees.
    assert checkpoint.load(Path(root, "own", str(rank)), run.state, missing=2) == 2
    path = checkpoint.save(root, run.state, 10)
    # Only one rank's part does not fit: nothing is changed on the other one either.
    other = ddp(rank, world).steps(2)
    if rank == 1:
        other.optimizer.param_groups[0]["params"].reverse()
    picky, twin = (ddp(rank, world).steps(2) for _ in range(2))
    picky.extra["part"] = Part()
    picky.extra["part"].refuses = rank == 1
    before, found, cases = (run.facts(), other.facts()), [], [(path, other), (path, picky)]
    for how in ("flipped", "truncated"):
        cases.append((Path(root, how, "step-00000010"), run))
        if rank == 0:
            shutil.copytree(path, cases[-1][0])
            damage(cases[-1][0], how)
    torch.distributed.barrier()
    for place, into in cases:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(place, into.state)
        found.append(str(caught.value))
    assert (run.facts(), other.facts()) == before and picky.extra["part"].seen == [0]
    assert picky.steps(5).facts() == twin.steps(5).facts()
    run.steps(2)  # nobody hangs, and training goes on
    return found


def test_every_rank_raises_the_same_error(tmp_path: Path) -> None:
    saved(tmp_path / "own" / "1", 3)
    one, two = run_ranks(errors_of_ranks, 2, str(tmp_path))
    assert one == two and len(one) == 4
    assert one[1].endswith("not this one (on rank 1)")
    assert one[0].endswith("build the optimizer as the saved run did (on rank 1)")


UNLIKE = {
    "folders": "is not one folder for all ranks",
    "steps": r"different \(step, keep\) on different ranks: \[\(5, 1\), \(6, 1\)\]",
    "moments": "the optimizer's state differ between replicas 0 and 1",
    "parameters": "the parameters differ between replicas 0 and 1 .in 'model.0.bias'",
}


def misused(rank: int, world: int, root: str) -> list[str]:
    """Of each: the second rank has one of its own."""
    found = []
    for how in UNLIKE:
        run, place, step = ddp(rank, world).steps(5), Path(root, how), 5
        checkpoint.save(place, run.state, 1)
        if how == "folders":
            place = place / f"host {rank}"
        if how == "steps":
            step += rank
        if how == "moments" and rank == 1:
            next(iter(run.optimizer.state.values()))["exp_avg"].mul_(1.5)
        if how == "parameters" and rank == 1:
            run.net.module[0].bias.data.add_(1)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(place, run.state, step, keep=1)
        found.append(str(caught.value))
    return found


def test_what_ranks_do_not_do_alike_is_said_by_all_and_nothing_is_published(tmp_path: Path) -> None:
    one, two = run_ranks(misused, 2, str(tmp_path))
    assert one == two
    for (how, says), text in zip(UNLIKE.items(), one, strict=True):
        assert re.search(says, text)
        assert [path.name for path in tmp_path.glob(f"{how}/step-*")] == ["step-00000001"]
    assert not list(tmp_path.glob("*/host */step-*"))
