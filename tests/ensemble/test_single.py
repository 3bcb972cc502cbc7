"""The engine in one process: what holds at rest and inside a step; observe, records, refusals."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
from typing import Any

import numpy
import pytest
import torch

import hdet
from hdet import Ensemble
from tests.calls import of_a_step
from tests.harness import Run, TwoReplicas, batch, loss_of, model, policies, probe, sgd

from .helpers import same, trained, watching


def test_a_step_from_before_a_load_is_not_counted_after_it() -> None:
    run = Run().steps(3)
    state = run.ensemble.state_dict()
    run.optimizer.step()
    run.ensemble.load_state_dict(state)
    run.ensemble.step()  # of the schedule alone
    assert run.ensemble.steps_done == 3
    assert run.steps(1).ensemble.steps_done == 4


def test_losses_are_averaged_with_their_weights() -> None:
    """Those of this cycle."""
    run = Run(every=1)
    for mean, seen in {
        5.0: ((torch.tensor(4.0), 3), (8.0, torch.tensor(1.0)), (math.nan, 0)),
        2.0: ((2.0, 1), (2.0, 5)),
    }.items():
        for loss, weight in seen:
            run.ensemble.observe(loss, weight)
        run.backward()
        run.optimizer.step()
        run.ensemble.step()
        assert run.history["losses"] == [mean]


def test_observing_holds_no_graph_and_no_memory() -> None:
    run = Run()
    loss = loss_of(run.net, batch(0))
    run.ensemble.observe(loss)
    graph = loss.grad_fn
    del loss
    gc.collect()
    meter = run.ensemble._cycles.losses[0]
    assert graph is not None and not any(graph is r for r in gc.get_referrers(meter))
    assert not meter.stats().requires_grad


# -- the probe ---------------------------------------------------------------------------------


class Everything(torch.nn.Module):
    """Dropout, a frozen part in eval mode, and buffers that change even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        self.frozen = torch.nn.BatchNorm1d(8).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        return self.last(self.frozen(self.drop(self.norm(self.first(x)))))


def test_the_probe_changes_nothing() -> None:
    net, modes_seen = Everything(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def noisy_loss(m: torch.nn.Module, data: Any) -> torch.Tensor:
        modes_seen.append((m.training, m.norm.training, torch.is_grad_enabled()))
        random.random(), numpy.random.rand(), torch.rand(3)
        return loss_of(m, data)

    def failing(m: torch.nn.Module, data: Any) -> torch.Tensor:
        raise RuntimeError("in the user's loss")

    losses = watching(net, noisy_loss, optimizer)
    for position in range(1, 11):
        trained(net, optimizer, [position])
        losses.sample(position, 10)

    def everything() -> Any:
        places = [t.data_ptr() for t in (*net.parameters(), *net.buffers())]
        modes, gradients = [m.training for m in net.modules()], [p.grad for p in net.parameters()]
        rng = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]
        return copy.deepcopy([net.state_dict(), gradients, places, modes, rng])

    before = everything()
    row = losses.measure(0)
    assert same(everything(), before) and modes_seen == [(False, False, False)] * 8
    assert row is not None and row.shape == (1 + 8 + 1,) and row.isfinite().all()
    losses.loss_fn = failing
    with pytest.raises(RuntimeError, match="in the user's loss"):
        losses.measure(0)
    assert same(everything(), before)


def test_the_probe_scores_the_average_of_the_sampled_weights() -> None:
    net = torch.nn.Linear(1, 1, bias=False)
    losses = watching(net, lambda m, _: m.weight.sum(), average_every=4)
    for position in range(1, 11):
        torch.nn.init.constant_(net.weight, position)
        losses.sample(position, 10)
    # one rank's losses at the mean of positions 2, 6, 10
    assert losses.measure(0)[:9].tolist() == [1.0] + [6.0] * 8 and net.weight.item() == 10.0


def test_a_probe_loss_that_no_rank_has_seen_is_named() -> None:
    """One rank (a stage of a pipeline) may return None, all ranks of a replica may not."""
    losses = watching(model(), lambda m, b: None)
    silent = losses.measure(0).tolist()
    seen = [2.0, *[8.0] * 8, silent[-1]]
    assert silent[:9] == [0.0] * 9
    with pytest.raises(ValueError, match="returned None on every rank of replica 1"):
        losses.split([seen, silent])
    assert losses.split([seen]) == [[4.0] * 8]


# -- refusals and records ----------------------------------------------------------------------

LR, WARM = hdet.LearningRate, {"total_steps": 10, "warmup_steps": 10}
SOFTMAX = hdet.SoftmaxController(decay=None)


@pytest.mark.parametrize(("settings", "message"), [
    ({"every": 0}, "every"),
    ({"knobs": [LR(0.0), LR(0.1)]}, "different names"),
    ({"knobs": [LR(0.1), LR(0.2, groups=[0])]}, "share one parameter group"),
    *(({"knobs": knobs}, "knobs must be a list") for knobs in (LR(0.1), ["lr"])),
    ({"gradients": "local"}, "moments must be one of 'keep', 'average', 'reset'"),
    ({"gradients": "local", "moments": "halve"}, "got 'halve'"),
    ({"gradients": "none"}, "gradients must be"),
    ({"moments": "keep"}, "leave it out"),
    *(({"seed": seed}, "seed must be") for seed in (None, 1.5, True)),
    ({"log": 3}, "log must be callable"),
    ({"scheduler": "cosine"}, "scheduler must be one of torch.optim.lr_scheduler, got str"),
    ({"replicas": "x"}, "replicas must be"),
    ({"controller": hdet.SoftmaxController},
     r"controller must be an hdet.Controller, such as hdet.Probe.*got the class Softmax"),
    ({"controller": hdet.AutoLR(model())}, "an AutoLR is passed as search"),
    ({"search": "AutoLR"}, r"search must be an hdet.AutoLR, such as hdet.AutoLR\(model\)"),
    ({"controller": SOFTMAX, **WARM}, "warm-up"),
    ({"controller": hdet.SoftmaxController(decay=None, freeze_after=0.5)},
     r"freeze_after=0\.5.*total_steps"),
    ({"controller": probe(model())}, "no parameter of this optimizer"),
    ({"scheduler": torch.optim.lr_scheduler.StepLR(sgd(), 5)}, "another optimizer"),
    ({"bucket_bytes": 1}, "bucket_bytes"),
    *(({"converge": way}, "way of averaging") for way in ("plain", hdet.converge.Plain)),
    ({"divergence": 2.0}, "must be an hdet.Divergence, such as"),
    ({"tied": [(torch.zeros(1), None)]}, "none of the optimizer's parameters"),
    ({"refresh": 3}, r"refresh\(\)"),
    ({"buffers": [torch.ones(2, dtype=torch.long)]}, "buffer 0"),
    ({"buffers": [1]}, r"a list of tensors, got \[1\]"),
])  # fmt: skip
def test_wrong_settings_are_refused_before_anything_changes(settings: Any, message: str) -> None:
    optimizer = sgd()
    step, groups = optimizer.step, [dict(g) for g in optimizer.param_groups]
    with pytest.raises((ValueError, TypeError), match=message):
        Ensemble(optimizer, **policies(**{"replicas": TwoReplicas(), **settings}))
    assert optimizer.step == step and [dict(g) for g in optimizer.param_groups] == groups


def test_wrong_objects_are_refused() -> None:
    optimizer = sgd()
    with pytest.raises(TypeError, match="optimizer"):
        Ensemble(object())
    with pytest.raises(TypeError, match=r"got Linear: pass torch.optim.AdamW\(model.parameters"):
        Ensemble(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="the optimizer comes first, then its scheduler"):
        Ensemble(torch.optim.lr_scheduler.StepLR(optimizer, 5), optimizer)
    with pytest.raises(TypeError, match="got Wrapper: pass the one inside, its .optimizer"):
        Ensemble(type("Wrapper", (), {"optimizer": optimizer})())
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        Ensemble(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_record_is_plain_json_and_the_last_step_ends_a_cycle() -> None:
    seen: list[Any] = []
    Run(total=12, log=lambda record, step: seen.append((step, json.dumps(record)))).steps()
    assert [step for step, _ in seen] == [5, 10, 12]
    record = json.loads(seen[-1][1])
    assert record["event"] == "cycle" and record["cycle"] == 2 and record["step"] == 12
    assert set(record) == {
        "event", "cycle", "step", "values", "scheduled", "corrections", "slopes", "errors", "t",
        "multipliers", "tried", "losses", "probe", "left_out", "rolled_back", "rollbacks",
        "diverged_total", "converge_ms", "probe_ms", "notes", "record", "trial", "trial_steps",
        "trial_ms", "searching",
    }  # fmt: skip


def test_the_history_keeps_the_last_thousand_records() -> None:
    """A log gets all of them."""
    steps: list[int] = []
    optimizer = sgd()
    ensemble = Ensemble(optimizer, sync=hdet.Sync(1), log=lambda _, step: steps.append(step))
    for _ in range(1003):
        optimizer.step()
        ensemble.step()
    assert [record["step"] for record in ensemble.history] == steps[3:] and len(steps) == 1003


def test_a_copy_of_an_ensemble_is_refused_because_it_would_count_nothing() -> None:
    run = Run(spread=0.0).steps(3)
    for wanted in (run.ensemble, {"model": run.net, "trainer": [run.ensemble]}):
        with pytest.raises(TypeError, match=r"an Ensemble cannot be copied.*state_dict\(\)"):
            copy.deepcopy(wanted)
    assert run.steps(2).ensemble.cycle == 1


# -- calls -------------------------------------------------------------------------------------


def test_a_step_with_nothing_to_do_makes_at_most_15_calls() -> None:
    calls = of_a_step()
    assert len(calls) <= 15, calls
