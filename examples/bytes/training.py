"""One run on one rank: an ordinary DDP loop, and what hdet adds to it. Reads top to bottom."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet

from .data import Batch, Corpus, sample_batch
from .model import GPT, GPTConfig, cross_entropy

HISTORY, CHECKPOINT = "history.jsonl", "checkpoint.pt"
LOG_EVERY = 10
PROBE_BATCHES = 8
VALIDATION_WINDOWS, VALIDATION_BATCHES, SHORT_VALIDATION = 32, 64, 16
"""The last validation scores all batches, those along the way fewer."""
FOR_ALL_SEEDS = 0
"""Runs with different seeds are validated on the same text."""


class Run:
    """Model, optimizer, schedule and Ensemble of one run.

    Args:
        settings: of `examples.bytes.__main__`, and ``replicas``, their number. With the method
            ``fixed`` the run has no Ensemble: plain data-parallel training under the schedule.
        folder: for the history and the checkpoint, which rank 0 writes.
    """

    def __init__(self, settings: Namespace, folder: Path, corpus: Corpus, device: str) -> None:
        self.settings, self.folder, self.corpus, self.device = settings, folder, corpus, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.local = range(settings.coresident) if settings.coresident else (self.rank,)
        """Replicas whose batches this process computes."""
        self.step, self.seconds, self.validation = 0, 0.0, 0.0
        self.interval = max(1, round(settings.steps / 10 / settings.sync_interval))
        """Cycles between two checkpoints: about ten in a run."""
        torch.manual_seed(settings.seed)
        self.model = GPT(GPTConfig()).to(device)
        ddp = self.world_size > 1
        self.forward: nn.Module = DistributedDataParallel(self.model) if ddp else self.model
        self.optimizer = hdet.FusedAdamW(
            self.model.parameter_groups(weight_decay=0.1), lr=settings.max_lr, betas=(0.9, 0.95)
        )
        self.scheduler = OneCycleLR(
            self.optimizer, settings.max_lr, total_steps=settings.steps, pct_start=0.1,
            cycle_momentum=False,
        )  # fmt: skip
        self.history: hdet.logging.History | None = None
        self.ensemble = None if settings.method == "fixed" else self._make_ensemble()

    # -- what hdet adds ----------------------------------------------------------------------------

    def _make_ensemble(self) -> hdet.Ensemble:
        settings = self.settings
        self.replicas = (
            hdet.CoresidentReplicas(self.model, settings.coresident)
            if settings.coresident
            else hdet.Replicas.default()
        )
        return hdet.Ensemble(
            self.optimizer,
            self.scheduler,
            knobs=[hdet.LearningRate(settings.spread)],
            search=self._make_search(),
            controller=self._make_controller(),
            replicas=self.replicas,
            sync=hdet.Sync(settings.sync_interval),
            warmup_steps=settings.steps // 10 if settings.method == "softmax" else 0,
            total_steps=settings.steps,
            seed=settings.seed,
            log=self._record_cycle if self.rank == 0 else None,
        )

    def _make_search(self) -> hdet.AutoLR | None:
        is_asked = self.settings.method in ("auto", "both")
        return hdet.AutoLR(self.forward, budget=self.settings.budget) if is_asked else None

    def _make_controller(self) -> hdet.Controller | None:
        if self.settings.method in ("probe", "both"):
            return hdet.ProbeController(
                self._probe_loss, self._probe_batches, chunks=PROBE_BATCHES, model=self.model,
                average_every=5,
            )  # fmt: skip
        softmax = self.settings.method == "softmax"
        return hdet.SoftmaxController(decay=None) if softmax else None  # the schedule decays

    def _probe_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def _probe_batches(self, cycle: int) -> list[Batch]:
        """The same fresh text on every rank: scores differ by the replicas' weights alone."""
        first = cycle * PROBE_BATCHES
        return [self._batch(self.corpus.train, "probe", first + i) for i in range(PROBE_BATCHES)]

    def _losses_again(self) -> torch.Tensor:
        """Of this step's windows, at the weights of the copies in a trial of `AutoLR`."""
        tokens, targets = self._batch(self.corpus.train, f"train/{self.rank}", self.step)
        return cross_entropy(self.forward(tokens), targets)

    # -- training ----------------------------------------------------------------------------------

    def train(self, resume: bool = False) -> None:
        """From step 0, or from the checkpoint, to the end."""
        if resume:
            self._load()
        if self.rank == 0:
            path, fresh = self.folder / HISTORY, not resume
            self.history = hdet.logging.History(path, None if fresh else self.step)
            if fresh:
                self._record("start", settings=vars(self.settings))
        if self.world_size > 1:
            # DDP rearranges its buckets after its first backward pass, and so the order of its
            # sums. Without this pass a resumed run would round differently.
            self._compute_gradients(self.rank)
            self.optimizer.zero_grad(set_to_none=True)
        while self.step < self.settings.steps:
            self._train_one_cycle()
            self._between_cycles()
        self._record("end", seconds=self.seconds)

    def _train_one_cycle(self) -> None:
        settings, begun, losses = self.settings, time.perf_counter(), []
        ends = min(
            settings.steps, (self.step // settings.sync_interval + 1) * settings.sync_interval
        )
        while self.step < ends:
            self.step += 1
            rate = self.optimizer.param_groups[0]["lr"]
            losses.append(self._train_one_step())
            if self.step % LOG_EVERY == 0 or self.step == ends:
                if self.rank == 0:  # reading a loss waits for the device, so not in every step
                    self._record("train", loss=torch.stack(losses).mean().item(), lr=rate)
                losses.clear()
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begun

    def _train_one_step(self) -> torch.Tensor:
        losses = [self._compute_gradients(replica) for replica in self.local]
        self.optimizer.step()
        if self.ensemble is None:
            self.scheduler.step()
        else:
            for replica, loss in zip(self.local, losses, strict=True):
                self.ensemble.observe(loss, replica=replica)
            self.ensemble.step(closure=self._losses_again)
        self.optimizer.zero_grad(set_to_none=True)
        return losses[0]

    def _compute_gradients(self, replica: int) -> torch.Tensor:
        """Of one replica's windows. Co-resident ones add up; between processes DDP averages."""
        tokens, targets = self._batch(self.corpus.train, f"train/{replica}", self.step)
        if self.ensemble is None:
            loss = cross_entropy(self.forward(tokens), targets)
        else:
            with self.replicas.use(replica):
                loss = cross_entropy(self.forward(tokens), targets)
        (loss / len(self.local)).backward()
        return loss.detach()

    def _batch(self, text: torch.Tensor, stream: str, index: int) -> Batch:
        size, seed = self.settings.batch_size, self.settings.seed
        if stream == "validation":
            size, seed = VALIDATION_WINDOWS, FOR_ALL_SEEDS
        context = self.model.config.context
        tokens, targets = sample_batch(text, size, context, seed=seed, stream=stream, index=index)
        return tokens.to(self.device), targets.to(self.device)

    # -- between cycles, where all replicas have the same weights ----------------------------------

    def _between_cycles(self) -> None:
        last = self.step == self.settings.steps
        if not last and self.step // self.settings.sync_interval % self.interval:
            return
        if last and self.ensemble is not None and not self.ensemble.in_sync:
            self.ensemble.converge()
        self.validation = self._validate(VALIDATION_BATCHES if last else SHORT_VALIDATION)
        self._record("validation", loss=self.validation)
        if self.history is not None:
            print(f"  step {self.step:5d}   validation loss {self.validation:.3f}", flush=True)
            self._save()

    @torch.no_grad()
    def _validate(self, count: int) -> float:
        """Mean loss in nats per byte, with the same bits for any number of ranks."""
        losses = torch.zeros(count, dtype=torch.float64, device=self.device)
        for i in range(self.rank, count, self.world_size):
            tokens, targets = self._batch(self.corpus.validation, "validation", i)
            losses[i] = cross_entropy(self.model(tokens), targets)
        if self.world_size > 1:
            dist.all_reduce(losses)
        return losses.mean().item()

    # -- files, of rank 0 --------------------------------------------------------------------------

    def _record(self, event: str, **values: Any) -> None:
        if self.history is not None:
            self.history.write({"event": event, "step": self.step, **values})

    def _record_cycle(self, record: dict[str, Any], step: int) -> None:
        if self.history is not None:
            self.history(record, step)
        for note in record["notes"]:
            print(f"  step {step:5d}   {note}", flush=True)

    def _save(self) -> None:
        """First the history's lines, then the checkpoint, which relies on them."""
        assert self.history is not None
        self.history.sync()
        state = {
            "settings": vars(self.settings),
            "text": self.corpus.digest,
            "step": self.step,
            "seconds": self.seconds,
            "validation": self.validation,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ensemble": None if self.ensemble is None else self.ensemble.state_dict(),
        }
        partial = self.folder / f".{CHECKPOINT}.partial"
        torch.save(state, partial)
        os.replace(partial, self.folder / CHECKPOINT)  # whole, or the one before

    def _load(self) -> None:
        state = torch.load(self.folder / CHECKPOINT, map_location="cpu", weights_only=True)
        now = {"settings": vars(self.settings), "text": self.corpus.digest}
        if any(state[key] != now[key] for key in now):
            raise ValueError(f"{self.folder / CHECKPOINT} is of other settings, or of another text")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.ensemble is not None:
            self.ensemble.load_state_dict(state["ensemble"])
        for name in ("step", "seconds", "validation"):
            setattr(self, name, state[name])
