"""What the tests of adapters share: which frameworks are here, a tiny language model, its data, and
two ranks as a launcher makes them."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import hdet
from hdet.testing.adapters import EVERY, Halved

from ..distributed import run_ranks

VOCABULARY, LENGTH = 32, 12
PARTS = 2
"""Micro-batches of a step."""
LOOKED, TRIED, FIRST = 30, 220, 60
"""Of runs in which the first steps are looked at, and in which there is a trial, which is over by
then."""
OUTER = {
    "sync": hdet.Sync(EVERY, gradients="local", moments="keep", converge=hdet.converge.Outer())
}


def needs(*names: str) -> None:
    """At the top of a module of tests: skips it where one of these frameworks is not installed, but
    where all have to be."""
    for name in () if os.environ.get("HDET_FRAMEWORKS") else names:
        reason = f"{name} is not installed: make test-frameworks has an environment with all"
        pytest.importorskip(name, reason=reason)


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Every token stands twice; lengths differ."""

    def __init__(self, count: int = 160, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(
            1, VOCABULARY, (count, LENGTH), generator=generator
        ).repeat_interleave(2, 1)[:, :LENGTH]
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[i].clone()
        labels[self.lengths[i] :] = -100
        return {"input_ids": self.tokens[i], "labels": labels}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=16,
        intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def example(name: str) -> Any:
    """The module of an example, of at most 45 statements, however they are broken into lines."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    with path.open(encoding="utf-8") as source:
        tokens = [token.type for token in tokenize.generate_tokens(source.readline)]
    assert tokens.count(tokenize.NEWLINE) <= 45
    if str(path.parent) not in sys.path:  # as for a script: some have a model in a file beside them
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def correction_in(text: str) -> float:
    """Of the rate, as an example prints it."""
    found = re.search(r"correction of the rate: (\S+?)(;|\s|$)", text)
    assert found is not None, text
    return float(found[1])


def flat(tensors: Any) -> torch.Tensor:
    """All of them; of sharded ones this rank's parts."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return torch.cat([x.detach().flatten() for x in local]).clone()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return flat(model.parameters())


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return flat(p.grad for p in model.parameters() if p.grad is not None)


def equal(found: list[Any]) -> bool:
    return all(torch.equal(found[0], other) for other in found[1:])


def trial(model: Any) -> hdet.AutoLR:
    """Of a short run, too."""
    return hdet.AutoLR(model, budget=0.95)


def told(model: Any) -> hdet.AutoLR:
    """What it finds is told, and not done."""
    return hdet.AutoLR(model, budget=0.95, report_only=True)


def halved(model: Any) -> hdet.Controller:
    """For several optimizers, or several runs."""
    return Halved()


def on_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(*args)`` in this process, or on several ranks in an environment as torchrun makes
    it; the results by rank."""
    if world == 1:
        with accelerate_reset():
            return [function(*args)]
    return launched(function, world, *args)


def launched(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """The same, also of one rank with a process group."""
    return run_ranks(_launched, world, function, *args)


def _launched(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }  # fmt: skip
    place = {name: str(value) for name, value in place.items()}
    with mock.patch.dict(os.environ, place), accelerate_reset():
        return function(*args)


@contextmanager
def closures() -> Iterator[list[Any]]:
    """Those that Ensembles are stepped with meanwhile."""
    kept: list[Any] = []
    step = hdet.Ensemble.step

    def keep(self: Any, loss: Any = None, closure: Any = None) -> None:
        kept.append(closure)
        step(self, loss, closure)

    with mock.patch.object(hdet.Ensemble, "step", keep):
        yield kept


def computed_again(adapter: Any, model: Any, closure: Any) -> tuple[Any, Any, torch.Tensor]:
    """(loss, the same without gradients, the clipped gradients) of a step's closure."""
    loss, search = closure(), adapter.ensembles[0].search
    adapter.prepare_step(search and search.before_step)
    gradient = gradients(model)
    with torch.no_grad():
        return loss, closure(), gradient


@contextmanager
def listening(name: str, start: str = "") -> Iterator[list[str]]:
    """The lines that a logger gets meanwhile, of those that begin so."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.getMessage().startswith(start))
    log = logging.getLogger(name)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def accelerate_reset() -> Iterator[None]:
    """accelerate keeps what it has found in the process, for ever."""
    try:
        yield
    finally:
        try:
            from accelerate.state import AcceleratorState, GradientState
        except ImportError:
            pass
        else:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
