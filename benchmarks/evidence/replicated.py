"""HDET: co-resident replicas, each on its quarter of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hdet

from .problems import Batch, Problem
from .training import BETAS, WARMUP, Parts, Schedule, one_cycle_schedule, wsd_schedule

REPLICAS, SPREAD, INTERVALS, CHUNKS = 4, 0.3, 20, 8
"""the same for all starts and problems: N, alpha, cycles in a run, mini-batches of a probe"""


def hdet_softmax(problem: Problem, model: nn.Module, rate: float, seed: int) -> Parts:
    softmax = lambda probed: hdet.SoftmaxController(decay=None)
    of = {"warmup": WARMUP, "schedule": one_cycle_schedule}
    return replicated(problem, model, rate, seed, softmax, **of)


def probe(
    problem: Problem,
    model: nn.Module,
    seed: int,
    probed: list[int],
    length: int,
    kind: Any = hdet.ProbeController,
    **settings: Any,
) -> Any:
    """On `CHUNKS` mini-batches of a replica's size, of data of the day that no step trains on.

    ``length``: steps of a cycle; ``kind``: its class; ``settings``: further ones of the
    controller.
    """

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = problem.losses(model, batch)
        probed.append(len(losses))
        return losses.mean()

    def batches(cycle: int) -> list[Batch]:
        numbers = range(2 * cycle, 2 * cycle + CHUNKS // REPLICAS)
        whole = [problem.spare(seed, (cycle + 1) * length, number) for number in numbers]
        return [part for batch in whole for part in parts(batch)]

    return kind(loss_fn, batches, chunks=CHUNKS, model=model, **settings)


def replicated(
    problem: Problem,
    model: nn.Module,
    rate: float,
    seed: int,
    controller: Callable[[list[int]], Any],
    *,
    warmup: float = 0.0,
    interval: int | None = None,
    schedule: Schedule = wsd_schedule,
) -> Parts:
    """``controller`` is given the list in which it counts the examples it scores; ``warmup``: part
    of the run in which it may not act; ``interval``: steps of a cycle."""
    probed: list[int] = []
    optimizer = hdet.FusedAdamW(problem.groups(model), lr=rate, betas=BETAS)
    replicas = hdet.CoresidentReplicas(model, REPLICAS)
    ensemble = hdet.Ensemble(
        optimizer,
        schedule(optimizer, problem.steps),
        total_steps=problem.steps,
        controller=controller(probed),
        knobs=[hdet.LearningRate(SPREAD)],
        replicas=replicas,
        sync=hdet.Sync(interval or max(1, problem.steps // INTERVALS)),
        warmup_steps=round(warmup * problem.steps),
        seed=seed,
    )

    def backward(batch: Batch) -> float:
        total = 0.0
        for k, part in enumerate(parts(batch)):
            with replicas.use(k):
                loss = problem.losses(model, part).mean()
                ensemble.observe(loss)
                (loss / REPLICAS).backward()
            total += loss.item() / REPLICAS
        return total

    return Parts(
        optimizer,
        backward,
        after=lambda batch: ensemble.step(),
        rate=lambda: optimizer.param_groups[0]["lr"],
        probed=probed,
        heals=True,
        crashes=(hdet.ReplicasDiverged,),
    )


def parts(batch: Batch) -> list[Batch]:
    """One for each replica."""
    return list(zip(*(tensor.chunk(REPLICAS) for tensor in batch), strict=True))
