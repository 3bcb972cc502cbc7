"""Arguments that cannot be used are refused by name, by whatever takes them alone. (In their own
folders: knobs, optimizers and kernels, layouts, checkpoints, an Ensemble's settings.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hdet
from hdet import Decision, Divergence
from hdet.controllers.probe_rule import ProbeRule
from hdet.converge import Compressed, ExactLocal, Outer, average_tensors
from hdet.core.scale import Scale
from hdet.replicas import Replicas

from .converge.helpers import task
from .ensemble.helpers import watching
from .harness import Run, batch, loss_of, model

Row = tuple[Callable[[], Any], str]


def each(make: Callable[..., Any], message: str = "", **values: list[Any]) -> Iterator[Row]:
    """Each of these values of an argument, which the message names."""
    for name, wrong in values.items():
        yield from ((partial(make, **{name: value}), message or name) for value in wrong)


ONE, NAN = torch.ones(2), math.nan
auto = lambda **given: hdet.AutoLR(model(), **given)
average = lambda *last: average_tensors([ONE, last[0]], Replicas.single(), None, *last[1:])
observe = lambda loss=1.0, weight=1.0: Run().ensemble.observe(loss, weight)
measure = lambda result: watching(model(), lambda *_: result).measure(0)
probe = lambda loss_fn=loss_of, batches=(0,) * 8, **given: hdet.ProbeController(
    loss_fn, list(batches) if isinstance(batches, tuple) else batches, model=model(), **given
)
REFUSED: list[Row] = [
    *each(ProbeRule, freeze_after=[0, -1, 0.0, 1.5, -0.5, NAN, True, "half"]),
    *each(ProbeRule, step=[0, "a", True], dead=[-1, NAN], bound=[None, 1.0]),
    *each(probe, place=["disk"], chunks=[1], average_every=[0]),
    (lambda: probe(batches=[1, 2]), "batches holds 2"),
    # others would kill the run; a tensor would become a part of records and states
    *each(Decision, "must be a finite and positive int or float, got",
        factor=[0.0, -1.0, NAN, ONE[0], "0.5"], value=[0.0, math.inf, ONE[0]]),
    *each(Divergence, peer_bound=[1.0, NAN], rise_bound=[0.5], rollback=["disk"], lower=[1.0]),
    *each(Divergence, attempts=[0]),
    (lambda: Scale("cubic"), "scale must be 'log', 'linear'"),
    (lambda: Scale("linear", 0.0), r"unit must be a number in \(0, inf\)"),
    (lambda: Scale(low=1.0, high=1.0), "low < high"), (lambda: Scale(low=NAN), "low < high"),
    (lambda: Scale(low=-2.0, high=-1.0), "high > 0 with scale='log'"),
    (lambda: Compressed("fp8"), 'dtype must be "bf16" or "int8", got \'fp8\''),
    (lambda: Compressed("int8", 30), "block must be a multiple of 4 from 16 to 65536, got 30"),
    (lambda: ExactLocal(0), "check_every must be a whole number of cycles >= 1, got 0"),
    *each(Outer, "rate must be", rate=[0.0, NAN]), (lambda: Outer(momentum=1.0), "momentum must b"),
    (lambda: Outer().build(task([ONE], replicas=Replicas(0, 2))), "gradients='local'"),
    (lambda: average(ONE.long()), "tensor 1 has dtype torch.int64"),
    (lambda: average(ONE.to_sparse()), "tensor 1 has layout torch.sparse_coo"),
    (lambda: average(ONE, 10), "bucket_bytes"),
    *each(lambda nu: hdet.warm_noise_([ONE], nu), nu=[-0.1, NAN, math.inf]),
    (lambda: hdet.warm_noise_([ONE, ONE.long()]), "parameter 1.*int64"),
    *each(auto, "'device' or 'host'", place=["disk"]),
    *each(auto, "for 3 % write 0.03", budget=[1.0]),
    *each(auto, "batch, got a function and a list_iterator", val_batches=[(loss_of, iter([1]))]),
    *each(auto, "at least one batch", val_batches=[(loss_of, [])]),
    *each(auto, "got a tuple and a tuple", val_batches=[[batch(0), batch(1)]]),
    *each(auto, "got a list", val_batches=[[batch(0)] * 3]),
    *each(observe, "loss must be", loss=[ONE, torch.tensor(3), "1.0", None]),
    *each(observe, weight=[-1.0, NAN, math.inf]),
    *each(measure, "loss_fn must return one number", result=[1.0, ONE]),
]  # fmt: skip
OF_ANOTHER_TYPE: list[Row] = [
    (lambda: probe(3), "loss_fn must be a function"),
    *each(probe, "list, or a function of the", batches=[DataLoader(TensorDataset(ONE))]),
    *each(auto, "write before_step=lambda: ...", before_step=[ONE]),
]


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [*((*row, ValueError) for row in REFUSED), *((*row, TypeError) for row in OF_ANOTHER_TYPE)],
)
def test_what_cannot_be_is_refused_by_name(
    call: Callable[[], Any], message: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=message):
        call()
