"""The main job as one rank sees it: a small GPT on real text, with the fixed schedule or with HDET. Reads top to bottom."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet.cli.job.checkpoint import load_checkpoint, save_checkpoint
from hdet.cli.job.config import TrainConfig
from hdet.cli.job.data import Batch, Corpus, load_corpus, sample_batch
from hdet.cli.job.model import GPT, GPTConfig, cross_entropy
from hdet.cli.job.place import Place
from hdet.cli.job.run_files import CHECKPOINT, HISTORY, SAMPLE, Recorder, RunFolderError, plain, truncate_history
from hdet.core.controller import Controller
from hdet.owned_folder import atomic_file

PROMPT = b"import "
VALIDATION_WINDOWS = 32
SHORT_VALIDATION = 16
"""mini-batches in the validations along the way; the last one scores ``validation_batches``"""
VALIDATION_SEED = 0
"""not the run's: runs with different seeds are compared on the same text"""

MEASURED = ("seconds", "probe_ms", "converge_ms", "validation")
"""what a run has measured of itself, and a checkpoint keeps"""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunSpec:
    """A run and where its files go; ``resume`` continues from the checkpoint there."""

    config: TrainConfig
    folder: Path
    resume: bool = False


def train_all(specs: Sequence[RunSpec], place: Place, emit: Emit) -> None:
    """Train one run after the other in the same processes. Inside the process group; every rank calls it.

    ``emit`` gets every record of rank 0's history (but for what `hdet replay` reads), and ``start`` and ``checkpoint`` events, as they happen.
    """
    corpora: dict[str | None, Corpus] = {}
    for spec in specs:
        data = spec.config.data
        if data not in corpora:
            corpora[data] = load_corpus(data)
        Run(spec, corpora[data], place, emit).train()


def run_alone(spec: RunSpec, corpus: Corpus) -> Run:
    """The run in this process alone, on the CPU, built and restored without touching its files: what does not fit is found before others start.
    Raises RunFolderError for a checkpoint, and ValueError for a controller, that cannot work in this run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one replica explores nothing")  # nor is it to train
        warnings.filterwarnings("ignore", "AutoLR: the checkpoint was saved during the search")
        return Run(spec, corpus, Place(), lambda event: None)


class Run:
    """Model, optimizer, schedule and (for HDET) the ensemble of one run, on one rank: with one replica, or with all if co-resident."""

    def __init__(self, spec: RunSpec, corpus: Corpus, place: Place, emit: Emit) -> None:
        self.config, self.folder, self.corpus, self.place = spec.config, spec.folder, corpus, place
        self._emit = emit
        self.step = 0
        self.seconds = self.probe_ms = self.converge_ms = 0.0
        self.validation: float | None = None
        config = spec.config
        torch.manual_seed(config.seed)
        shape = GPTConfig(context=config.context, width=config.width, layers=config.layers, heads=config.heads)
        self.model = GPT(shape).to(place.device)
        self.forward: nn.Module = DistributedDataParallel(self.model) if place.world_size > 1 else self.model
        self.optimizer = hdet.FusedAdamW(self.model.parameter_groups(config.weight_decay), lr=config.max_lr, betas=(0.9, 0.95))
        self.schedule = OneCycleLR(
            self.optimizer, config.max_lr, total_steps=config.steps, pct_start=config.pct_start, cycle_momentum=False
        )
        self.local = range(config.replicas) if config.coresident else (place.rank,)
        """replicas whose batches this process computes; on the fixed schedule co-resident ones are plain gradient accumulation"""
        together = config.coresident and config.mode == "hdet"
        self.replicas = hdet.CoresidentReplicas(self.model, config.replicas) if together else hdet.Replicas.default()
        self.ensemble = self._make_ensemble() if config.mode == "hdet" else None
        if spec.resume:
            self._resume()
        self.history: Recorder | None = None

    def _make_controller(self) -> Controller | None:
        config = self.config
        if config.controller == "probe":
            return hdet.ProbeController(
                _batch_loss, self._probe_batches, chunks=config.probe_batches, model=self.model, average_every=config.average_every
            )
        if config.controller == "auto":
            return hdet.AutoLR(self.forward, budget=config.budget)
        if config.controller == "softmax":
            return hdet.SoftmaxController(decay=None)  # the correction multiplies the schedule, which already decays
        assert config.controller == "none", config.controller  # a name added to CONTROLLERS must not train without a controller
        return None

    def _make_ensemble(self) -> hdet.Ensemble:
        config = self.config
        return hdet.Ensemble(
            self.optimizer,
            self.schedule,
            knobs=[hdet.LearningRate(config.spread)],
            replicas=self.replicas,
            sync=hdet.Sync(config.sync_interval),
            warmup_steps=config.warmup_steps if config.controller == "softmax" else 0,
            controller=self._make_controller(),
            seed=config.seed,
            total_steps=config.steps,
            log=self._record_cycle if self.place.is_first else None,
        )

    # -- training --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """From the step of the checkpoint, or 0, to the end."""
        config = self.config
        if self.place.is_first:
            path = self.folder / HISTORY
            truncate_history(path, self.step)
            self.history = Recorder(path)
        self._emit({
            "event": "start", "folder": str(self.folder), "step": self.step,
            "config": config.to_dict(), "device": self.place.device, "search": self._search(),
        })  # fmt: skip
        with nullcontext() if self.ensemble is None else self.ensemble.guard():  # a process that is gone is named
            self._train_to_the_end()
        self._finish()

    def _search(self) -> str:
        """What controller auto is going to do, or has found."""
        controller = None if self.ensemble is None else self.ensemble.engine.controller
        search = None if controller is None else controller.search
        if search is None:
            return ""
        return "the search begins again: " * (self.step > 0 and not search.done) + search.report()

    def _train_to_the_end(self) -> None:
        config = self.config
        self._fix_bucket_layout()
        total, count = torch.zeros((), device=self.place.device), 0
        self._clock = time.perf_counter()
        while self.step < config.steps:
            self.step += 1
            used = {"lr": self.optimizer.param_groups[0]["lr"], "correction": self._correction()}
            total, count = total + self._train_step(), count + 1
            if self.step % config.log_interval == 0 or config.ends_cycle(self.step):
                if self.place.is_first:  # reading the loss waits for the device, so not in every step
                    self._record({"event": "train", "step": self.step, "loss": total.item() / count, **used})
                total, count = torch.zeros_like(total), 0
            if config.ends_cycle(self.step):
                with self._off_the_clock():
                    self.between_cycles()

    def _train_step(self) -> torch.Tensor:
        losses = [self._loss_and_gradients(replica) for replica in self.local]
        self.optimizer.step()
        if self.ensemble is not None:
            for replica, loss in zip(self.local, losses, strict=True):
                self.ensemble.observe(loss, replica=replica)
            self.ensemble.step(closure=self._losses_again)
        else:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses[0]

    def _loss_and_gradients(self, replica: int) -> torch.Tensor:
        tokens, targets = self._batch(self.corpus.train, f"train/{replica}", self.step)
        with self.replicas.use(replica):
            loss = cross_entropy(self.forward(tokens), targets)
            (loss / len(self.local)).backward()  # between processes DDP takes the mean
        return loss.detach()

    def _losses_again(self) -> torch.Tensor:
        """Losses of the step's own windows, at the weights of the copies in a trial of `AutoLR`."""
        tokens, targets = self._batch(self.corpus.train, f"train/{self.place.rank}", self.step)
        return cross_entropy(self.forward(tokens), targets)

    def _fix_bucket_layout(self) -> None:
        """One backward pass whose gradients are thrown away: DDP rearranges its buckets after its first.

        The layout decides in which order replicas' gradients are added up, so a resumed run would round differently without it.
        """
        if self.place.world_size > 1:
            self._loss_and_gradients(self.place.rank)
            self.optimizer.zero_grad(set_to_none=True)

    def _batch(self, text: torch.Tensor, stream: str, index: int, *, size: int | None = None, seed: int | None = None) -> Batch:
        config = self.config
        seed = config.seed if seed is None else seed
        tokens, targets = sample_batch(text, size or config.batch_size, config.context, seed=seed, stream=stream, index=index)
        return tokens.to(self.place.device), targets.to(self.place.device)

    def _probe_batches(self, cycle: int) -> list[Batch]:
        """The same fresh training text on every rank: what differs between replicas' scores is their weights alone."""
        count = self.config.probe_batches
        return [self._batch(self.corpus.train, "probe", cycle * count + i) for i in range(count)]

    # -- between cycles: weights are equal on all ranks, and the clock stands ------------------------------------------------

    def between_cycles(self) -> None:
        config, last = self.config, self.step == self.config.steps
        if last and self.ensemble is not None and not self.ensemble.in_sync:
            self.ensemble.converge()
        if last or config.validates_at(self.step):
            count = config.validation_batches if last else min(SHORT_VALIDATION, config.validation_batches)
            self.validation = self._validate(count)
            self._record({"event": "validation", "step": self.step, "loss": self.validation, "batches": count})
        if config.saves_at(self.step) and self.history is not None:
            # First the lines, then the checkpoint, which relies on them.
            self.history.sync()
            save_checkpoint(self.folder / CHECKPOINT, self._state())
            self._emit({"event": "checkpoint", "step": self.step})

    @torch.no_grad()
    def _validate(self, count: int) -> float:
        """Mean loss in nats per byte over ``count`` fixed mini-batches of validation text; the same bits for any number of ranks."""
        losses = torch.zeros(count, dtype=torch.float64, device=self.place.device)
        training = self.model.training
        self.model.eval()
        for i in range(self.place.rank, count, self.place.world_size):
            batch = self._batch(self.corpus.validation, "validation", i, size=VALIDATION_WINDOWS, seed=VALIDATION_SEED)
            losses[i] = _batch_loss(self.model, batch)
        self.model.train(training)
        if self.place.world_size > 1:
            dist.all_reduce(losses)
        return losses.mean().item()

    def _finish(self) -> None:
        if self.history is None:
            return
        with atomic_file(self.folder / SAMPLE) as file:
            file.write(PROMPT + self.model.generate(PROMPT, 400, seed=self.config.seed) + b"\n")
        percent = 0.1 / self.seconds if self.seconds else 0.0  # milliseconds -> % of the training time
        end = {"event": "end", "step": self.step, "validation": self.validation, "seconds": self.seconds}
        self._record({**end, "probe_percent": self.probe_ms * percent, "converge_percent": self.converge_ms * percent})
        self.history.close()

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Validation and the writing of files do not count as training time."""
        if self.place.device != "cpu":
            torch.cuda.synchronize()  # so that the time on the clock is the time spent
        self.seconds += time.perf_counter() - self._clock
        yield
        self._clock = time.perf_counter()

    # -- records and files -------------------------------------------------------------------------------------------------

    def _correction(self) -> float:
        return 1.0 if self.ensemble is None else self.ensemble.engine.corrections[0]

    def _record_cycle(self, record: dict[str, Any], step: int) -> None:
        self.probe_ms += record["probe_ms"]
        self.converge_ms += record["converge_ms"]
        self._record(record)

    def _record(self, record: dict[str, Any]) -> None:
        if self.history is not None:
            self.history.write(record)
            self._emit({key: plain(value) for key, value in record.items() if key != "record"})  # that is for `hdet replay`, and large

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "text": self.corpus.digest,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.schedule.state_dict(),
            "ensemble": None if self.ensemble is None else self.ensemble.state_dict(),
            "rng": torch.get_rng_state(),
            **{name: getattr(self, name) for name in MEASURED},
        }

    def _resume(self) -> None:
        state = load_checkpoint(self.folder)
        try:
            self._restore(state)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:  # what torch raises for foreign contents
            reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
            path = str(self.folder / CHECKPOINT)
            raise RunFolderError(f"{path!r} does not fit this run ({reason}): it is damaged, start the run again") from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["scheduler"])
        if self.ensemble is not None:
            self.ensemble.load_state_dict(state["ensemble"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        for name in MEASURED:
            setattr(self, name, state[name])
        # Torch loads these unchecked, and the run would go on with other values.
        if self.schedule.last_epoch != self.step:
            raise ValueError(f"the schedule is at step {self.schedule.last_epoch}, the run at {self.step}")
        for name, parameter in self.model.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                if self.optimizer.state[parameter][moment].shape != parameter.shape:
                    raise ValueError(f"{moment} of {name} has another shape")


def _batch_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets = batch
    return cross_entropy(model(tokens), targets)
