"""A resumed run is the same run, bitwise: in every layout, and with everything that decides, is
scheduled, moves or steps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

import hdet
from hdet import checkpoint

from ..adversary.common import bits
from ..distributed import run_ranks
from ..harness import Run, Scripted, TwoReplicas, probe
from ..knobs.helpers import Given
from ..trial.common import WITHOUT, auto_run, not_numbers, searched
from . import helpers

Make = Callable[..., Any]


def interrupted(rank: int, world: int, build: Make, make: Make, root: str, at: int) -> Any:
    """What a run comes to that goes on after a save, and one that begins from it."""
    run = build(rank, world, make).steps(at)
    checkpoint.save(root, run.state, at)
    straight = run.steps(6).facts()
    run.ensemble.close()
    return straight, build(rank, world, make).resume(root).steps(6).facts()


H, ADAMW, FUSED = helpers, helpers.torch_adamw, helpers.fused_adamw
CASES = [
    (H.ddp, ADAMW, 2, 0), (H.ddp, FUSED, 2, 5), (H.ddp, H.torch_sgd, 2, 7),
    (partial(H.ddp, moments="reset"), H.torch_sgd, 2, 7),
    (H.ddp, H.fused_split, 2, 7), (H.ddp, H.fused_fp32, 2, 7),
    (H.shards, ADAMW, 4, 7), (H.groups, ADAMW, 4, 7), (H.hsdp, ADAMW, 4, 7),
    (H.hsdp, H.FusedEightBit, 4, 5), (H.hsdp_bf16, ADAMW, 4, 5), (H.compressed, ADAMW, 2, 13),
    (H.exact_local, H.fused_base_fp32, 2, 7), (H.local, FUSED, 2, 5),
    *((partial(H.local, moments=of), ADAMW, 2, 7) for of in ("keep", "average", "reset")),
    (H.local_fsdp, ADAMW, 4, 7), (H.outer, ADAMW, 2, 5), (H.outer_fsdp, ADAMW, 4, 5),
    (H.outer, ADAMW, 2, 7), (H.outer_equal, ADAMW, 2, 3), (H.outer_equal, ADAMW, 2, 7),
    (H.outer_shards, ADAMW, 2, 7),
    (H.drop_in, ADAMW, 2, 7),
    *((partial(of, scheduler=None), H.schedule_free, 2, 6) for of in (H.ddp, H.local)),
]  # fmt: skip


@pytest.mark.parametrize(("build", "make", "world", "at"), CASES)
def test_resumed_run_is_the_same_run(tmp_path, build, make, world, at) -> None:
    """Saved at the end of a cycle, in its middle, and before the first step."""
    for straight, resumed in run_ranks(interrupted, world, build, make, str(tmp_path), at):
        assert straight == resumed


# -- in one process --------------------------------------------------------------------------------

SOFTMAX = partial(hdet.SoftmaxController, 0.1)
CONTROLLERS: dict[str, Any] = {
    "none": None,
    "softmax": lambda net: SOFTMAX(decay=None),
    "softmax with a decay": lambda net: SOFTMAX(),
    "softmax that rests": lambda net: SOFTMAX(decay=None, freeze_after=2),
    "scripted": lambda net: Scripted([0.5, 2.0, 0.7]),
    "probe": probe,
    "shadow": lambda net: hdet.Shadow(SOFTMAX(decay=None)),
}
SCHEDULERS: dict[str, Any] = {
    "one cycle": "one cycle",
    "none": None,
    "milestones": lambda optimizer: torchs.MultiStepLR(optimizer, [2, 8, 8], 0.7),
    "lambda": lambda optimizer: torchs.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cyclic": lambda optimizer: torchs.CyclicLR(optimizer, 1e-4, 1e-2, 4, cycle_momentum=False),
    "sequence": lambda optimizer: torchs.SequentialLR(
        optimizer, [torchs.LinearLR(optimizer), torchs.ExponentialLR(optimizer, 0.9)], [6]
    ),
}
FREE = {"optimizer": helpers.schedule_free, "scheduler": None}
FREELY = {"of": {"budget": 0}}
MOVED = [hdet.LearningRate(0.3), hdet.WeightDecay(0.4, product=True), hdet.Betas(0.2)]
ALONE: dict[str, dict[str, Any]] = {
    **{f"controller {name}": {"controller": of} for name, of in CONTROLLERS.items()},
    **{f"schedule {name}": {"scheduler": of} for name, of in SCHEDULERS.items()},
    "several knobs": {
        "knobs": MOVED, "controller": Given([0.5, 0.8, 1.1], [1.2, 0.9, 1.1, 1.0]),
        "weight_decay": 0.1, "moments": "reset",
    },
    "two replicas": {"replicas": TwoReplicas(), "together": 1},
    "rollback": {"divergence": hdet.Divergence(rollback="device")},
    "split masters": {"optimizer": H.fused_split, "dtype": torch.bfloat16},
    "8 bits": {"optimizer": H.FusedEightBit},
    "outer step": {"converge": hdet.converge.Outer()},
    "outer step of split masters": {
        "converge": hdet.converge.Outer(momentum=0.0), "optimizer": H.fused_split,
        "dtype": torch.bfloat16,
    },
    "schedule-free": FREE,
    "schedule-free in eval mode": FREE,
}  # fmt: skip
TOGETHER = {
    f"{name}, together": {**settings, "together": 3}
    for name, settings in ALONE.items()
    if not {"replicas", "converge"} & settings.keys() and name != "several knobs"  # rates alone
}


def facts(run: Run) -> Any:
    sets = run.replicas.local if run.replicas else [0]
    stepped = [run.optimizer.replica_parameters(k) for k in sets] if run.replicas else run.weights()
    state = run.optimizer.state_dict()
    return bits((stepped, state["state"])), state["param_groups"], run.ensemble.state_dict()


@pytest.mark.parametrize("at", [5, 7])
@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
@pytest.mark.filterwarnings("ignore")
def test_whatever_a_run_is_made_of_it_goes_on_as_it_would_have(
    name: str, at: int, tmp_path
) -> None:
    """Loaded into a run that has gone elsewhere."""
    make = lambda: Run(**{"controller": CONTROLLERS["softmax"], **(ALONE | TOGETHER)[name]})
    run, other = make().steps(at), make().steps(3)
    if "eval" in name:
        run.ensemble.converge()
        run.optimizer.eval()
    checkpoint.save(tmp_path, checkpoint.RunState(run.net, run.ensemble), at)
    other.index = checkpoint.load(tmp_path, checkpoint.RunState(other.net, other.ensemble))
    for steps in (0, 12):
        if steps and "free" in name:
            run.optimizer.train(), other.optimizer.train()
        assert facts(run.steps(steps)) == facts(other.steps(steps))


@pytest.mark.parametrize(
    ("lr", "settings"),
    [(1e-3, {}), (30.0, {}), (1e-6, WITHOUT), (1e-3, {"data": not_numbers}), (1e-6, FREELY)],
)
def test_after_a_search_too(lr: float, settings: Any, tmp_path) -> None:
    make = lambda: auto_run(lr, every=1000, **settings)
    run, other = searched(make()), make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, checkpoint.RunState(run.net, run.ensemble), run.index)
        other.index = checkpoint.load(tmp_path, checkpoint.RunState(other.net, other.ensemble))
    before = re.sub(r", [\d.]+ s, .* of copies", "", run.ensemble.report())
    assert other.ensemble.report() == before.partition("\nthe median")[0]
    for steps in (0, 5):
        assert facts(run.steps(steps)) == facts(other.steps(steps))
