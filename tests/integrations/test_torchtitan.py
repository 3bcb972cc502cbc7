"""torchtitan's Trainer with hdet in it, on one rank, as two replicas (HSDP of one shard), and as
HSDP and tensor parallel."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import distribute_tensor

import hdet
from hdet.testing.adapters import SPREAD, STEPS, STILL

from ..distributed import RankError
from .contract import Contract, Trained
from .frameworks import (
    closures,
    computed_again,
    example,
    gradients,
    launched,
    listening,
    needs,
    trial,
    weights,
)

needs("torchtitan", "triton")
for file in ("torchtitan_cpu", "torchtitan_tiny"):
    example(file)  # before torchtitan: the first says that there is no GPU

import torchtitan_tiny  # type: ignore[import-not-found]  # of examples/
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

wrap = hdet.integrations.torchtitan.wrap
CHUNKED = ChunkedLossWrapper.Config(num_chunks=2)
HSDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
SHARDED = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2}
TENSOR = {"data_parallel_replicate_degree": 1, "tensor_parallel_degree": 2}


class Kept:
    """In the place of TensorBoard or W&B: what torchtitan tells them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step, **metrics})

    def close(self) -> None:
        pass


class Watched(Trainer):
    """A user's subclass: keeps the weights after each of the first steps, 40 MB each."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.metrics_processor.logger = self.kept = Kept()
        self.weights: dict[int, torch.Tensor] = {}

    until = 0

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and (not self.until or self.step < self.until)

    def train(self) -> None:
        # At the end it sleeps for 2 seconds. Threads that watch a process sleep on.
        awake = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        with mock.patch("torchtitan.trainer.time", awake):
            super().train()

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.step <= STEPS:
            self.weights[self.step] = weights(self.model_parts[0])
        self.gradient = gradients(self.model_parts[0])

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        return super().forward_backward_step(**inputs)  # a way of its own, as Flux's


class Validated(Validator):
    """Keeps the weights that are validated."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[Any], step: int) -> None:
        self.weights = weights(model_parts[0])
        super().validate(model_parts, step)


def group(pattern: str, lr: float, name: str = "AdamW") -> ParamGroupConfig:
    kwargs = {"lr": lr, "fused": False}
    return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=kwargs)


def config(
    folder: str,
    *,
    lr: float = 1e-2,
    steps: int = STEPS,
    save: int = 0,
    resume: int = 0,
    evaluate: int = 0,
    bf16: bool = False,
    loss: Any = None,
    groups: Any = None,
    parallel: dict[str, int] | None = None,
    **checkpoint: Any,
) -> Any:
    """Two micro-batches a step, and gradients that are clipped."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallel = parallel or {"data_parallel_replicate_degree": world}
    ranks = parallel.get("data_parallel_replicate_degree", 1) * parallel.get(
        "data_parallel_shard_degree", 1
    )
    precision = "bfloat16" if bf16 else "float32"
    if resume:
        checkpoint["load_step"] = resume
    return Watched.Config(
        model_spec=torchtitan_tiny.llama(),
        loss=loss or CrossEntropyLoss.Config(),
        tokenizer=torchtitan_tiny.NoTokenizer.Config(),
        dataloader=torchtitan_tiny.Twice.Config(),
        optimizer=OptimizersContainer.Config(param_groups=groups or [group(".*", lr)]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=4 * ranks, seq_len=16, steps=steps, max_norm=0.5,
            disable_cuda_graphs=True, mixed_precision_param=precision,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallel),
        checkpoint=CheckpointManager.Config(
            enable=bool(save), interval=save or 1, keep_latest_k=0, last_save_model_only=False,
            **checkpoint,
        ),
        validator=Validated.Config(
            enable=bool(evaluate), freq=evaluate or 1, steps=2,
            dataloader=torchtitan_tiny.Twice.Config(),
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=folder,
    )  # fmt: skip


def saved_weights(folder: str, step: int, model: Any) -> torch.Tensor:
    """Of a checkpoint, in which torchtitan splits what is fused in the model."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: torch.empty(value.shape) for name, value in before.items()}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint/step-{step}", no_dist=True)
    model.load_state_dict(
        {
            name: distribute_tensor(value, before[name].device_mesh, before[name].placements)
            for name, value in state.items()
        }
    )
    found = weights(model)
    model.load_state_dict(before)
    return found


def train(
    folder: str,
    ensemble: Any,
    *,
    until: int = 0,
    **settings: Any,
) -> Trained:
    if resume := settings.get("resume"):
        reader = dcp.FileSystemReader(f"{folder}/checkpoint/step-{resume}")
        if not any("hdet" in key for key in reader.read_metadata().state_dict_metadata):
            settings["exclude_from_loading"] = ["hdet"]
    made = config(folder, **settings)
    with listening(hdet.integrations.torchtitan._LOG.name) as lines:
        trainer = (made if ensemble is None else wrap(made, **ensemble)).build()
        trainer.until = until
        trainer.train()
    trainer.close()
    model, save = trainer.model_parts[0], settings.get("save")
    log = [line for line in trainer.kept.lines if "grad_norm" in line]
    names = ("loss_metrics/global_avg_loss", "grad_norm", "lr/AdamW")
    evaluated = [trainer.validator.weights] if "evaluate" in settings else []
    return Trained(
        last=weights(model),
        weights=trainer.weights,
        lines=[[line.get(name) for name in names] for line in log],
        rates=[line["lr/AdamW"] for line in log if "lr/AdamW" in line],
        losses=[line[names[0]] for line in log],
        metrics=[{key: line[key] for key in line if "hdet" in key} for line in log],
        evaluated=evaluated,
        saved=saved_weights(folder, save, model) if save and not settings.get("resume") else None,
        told=[line for line in lines if "hdet" in line],
    ).see([] if ensemble is None else trainer.ensembles)


def again(folder: str, **settings: Any) -> Any:
    trainer = wrap(config(folder, lr=0.0, steps=1, **settings), **STILL).build()
    with closures() as kept:
        trainer.train()
    seen = trainer.ntokens_seen
    trainer.optimizers.zero_grad()
    found = computed_again(trainer.hdet, trainer.model_parts[0], kept[-1])
    assert trainer.ntokens_seen == seen
    return [trainer.kept.lines[0]["loss_metrics/global_avg_loss"]], trainer.gradient, found


class TestContract(Contract):
    train, again, ranks = staticmethod(train), staticmethod(again), staticmethod(launched)
    plain = ((1, {}), (2, {"bf16": True, "loss": CHUNKED}), (4, {"parallel": HSDP}))
    anew = ((2, {"bf16": True}), (2, {"loss": CHUNKED}), (2, {"parallel": SHARDED}))
    layouts = (
        (1, {}, ()), (2, {"parallel": SHARDED}, ()), (2, {"parallel": TENSOR}, ()),
        (4, {"parallel": HSDP}, ((0, 2), (1, 3))),
    )  # fmt: skip
    several = 2, {"groups": [group("norm", 2e-2, "Adam"), group(".*", 1e-2)]}


# -- configurations, refusals ----------------------------------------------------------------------


def from_registry() -> Any:
    """As a function of a config_registry."""
    return wrap(config("unused", lr=1e-3), **SPREAD)


def test_torchtitans_command_line_takes_it() -> None:
    before = config("unused")
    steps = ["--training.steps", "7", "--lr_scheduler.warmup_steps", "3"]
    made = ConfigManager().parse_args(["--module", __name__, "--config", "from_registry", *steps])
    assert isinstance(made, Watched.Config)
    assert (made.training.steps, made.lr_scheduler.warmup_steps) == (7, 3)
    assert made.to_dict()["training"]["steps"] == 7
    assert type(made)._owner.__mro__[2] is Watched and type(before)._owner is Watched


def _graphs(folder: str) -> None:
    trainer = wrap(config(folder), search=trial).build()
    trainer.config.training.disable_cuda_graphs = False  # a CPU has none
    trainer.hdet.begin_run()


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = config("unused", parallel={"pipeline_parallel_degree": 2})
    with pytest.raises(ValueError, match="_parallel_degree is above 1, .*: set it to 1, and shard"):
        wrap(pipeline).build()
    with pytest.raises(RankError, match="CUDA graph does not reach: set training.disable"):
        launched(_graphs, 1, str(tmp_path))
