"""How many functions and files of hdet three everyday things go through.

    python -m benchmarks.calls [--list]

A rate: one optimizer step and one ``ensemble.step`` in which nothing is to be done. A loss: the end
of a cycle of two replicas whose probe losses move the rate. A checkpoint: saved, and loaded. Calls
are counted by ``sys.setprofile``, of functions whose code lies in hdet; a generator counts each
time that it goes on, and so does each comprehension before Python 3.12.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hdet

ROOT = str(Path(hdet.__file__).parent)


def calls_of(what: Callable[[], object]) -> list[str]:
    """ "file:function" of each call, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.append(f"{code.co_filename[len(ROOT) + 1 :]}:{code.co_name}")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return found


def loss_of(net: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


class Run:
    """A linear model, an optimizer, a cosine."""

    def __init__(self, optimizer: Any = torch.optim.SGD, **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = settings.pop("net", None) or nn.Linear(4, 1)
        self.optimizer = optimizer(self.net.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.ensemble = hdet.Ensemble(self.optimizer, scheduler, total_steps=1000, **settings)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.net, self.ensemble.steps_done)
        loss.backward()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.backward()
            self.optimizer.step()
            self.ensemble.step(loss)


def a_rate() -> list[str]:
    """One step in the middle of a cycle, without a controller."""
    run = Run()
    run.train(3)
    loss = run.backward()

    def step() -> None:
        run.optimizer.step()
        run.ensemble.step(loss)

    return calls_of(step)


def a_loss() -> list[str]:
    """The last ``ensemble.step`` of a cycle, after which a probe has decided."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    replicas = hdet.CoresidentReplicas(net, 2)
    batches = lambda cycle: list(range(1000 + 8 * cycle, 1008 + 8 * cycle))
    probe = hdet.ProbeController(loss_of, batches, model=net)
    run = Run(
        hdet.FusedSGD, net=net, replicas=replicas, controller=probe, sync=hdet.Sync(5),
        knobs=[hdet.LearningRate(0.3)],
    )  # fmt: skip
    calls: list[str] = []
    for step in range(10):
        run.optimizer.zero_grad()
        for k in range(2):
            with replicas.use(k):
                loss = loss_of(net, step)
                run.ensemble.observe(loss)
            (loss / 2).backward()
        run.optimizer.step()
        calls = calls_of(run.ensemble.step)
    assert run.ensemble.cycle == 2
    return calls


def a_checkpoint() -> tuple[list[str], list[str]]:
    """Saved, and loaded into a run that has just begun."""
    run, other = Run(), Run()
    run.train(3)
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = (hdet.checkpoint.RunState(one.net, one.ensemble) for one in (run, other))
        save = lambda: hdet.checkpoint.save(folder, mine)
        return calls_of(save), calls_of(lambda: hdet.checkpoint.load(folder, theirs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="each call, in order")
    options = parser.parse_args()
    saved, loaded = a_checkpoint()
    flows = {"a rate": a_rate(), "a loss": a_loss(), "saved": saved, "loaded": loaded}
    print("| what | calls | files |\n|---|---|---|")
    for name, calls in flows.items():
        print(f"| {name} | {len(calls)} | {len({call.split(':')[0] for call in calls})} |")
    for name, calls in flows.items() if options.list else ():
        print(f"\n{name}:", *calls, sep="\n  ")


if __name__ == "__main__":
    main()
