"""transformers' Trainer with hdet in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.testing.adapters import SPREAD, STEPS, STILL, Halved

from .contract import Float16, Trained
from .frameworks import (
    Text,
    closures,
    computed_again,
    equal,
    listening,
    llama,
    needs,
    on_ranks,
    weights,
)

needs("transformers", "accelerate")
import transformers

HdetTrainer = hdet.integrations.transformers.HdetTrainer


def args(folder: Any, **settings: Any) -> transformers.TrainingArguments:
    """Two micro-batches a step, and gradients that are clipped."""
    return transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": STEPS, "save_strategy": "no", "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
            "use_cpu": True, "per_device_train_batch_size": 4, "log_level": "info",
            "ddp_find_unused_parameters": False, **settings,
        },
    )  # fmt: skip


class Seen(transformers.TrainerCallback):
    """What is to be seen after each step, and the weights that are evaluated."""

    def __init__(self, until: int = 0) -> None:
        self.until, self.weights, self.evaluated = until, {}, []
        self.skipped: list[bool] = []
        self.counted: list[int] = []
        self.gradient = torch.zeros(0)
        self.trainer: Any = None

    def on_pre_optimizer_step(self, *others: Any, model: Any = None, **more: Any) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()])

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self.weights[state.global_step] = weights(model)
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)
        ensemble = getattr(self.trainer, "ensemble", None)
        self.counted.append(0 if ensemble is None else ensemble.steps_done)
        control.should_training_stop |= state.global_step == self.until

    def on_prediction_step(self, *others: Any, model: Any = None, **more: Any) -> None:
        self.evaluated.append(weights(model))


def trainer_of(folder: str, ensemble: Any, until: int = 0, own: Any = (), **settings: Any) -> Any:
    seen = Seen(until)
    kind = transformers.Trainer if ensemble is None else HdetTrainer
    trainer = kind(
        model=llama(), args=args(folder, **settings), train_dataset=Text(1600),
        eval_dataset=Text(8, seed=1), callbacks=[seen],
        **({} if ensemble is None else {"ensemble": ensemble}), **dict(own),
    )  # fmt: skip
    trainer.seen, seen.trainer = seen, trainer
    return trainer


def train(
    folder: str,
    ensemble: Any,
    *,
    lr: float = 1e-2,
    steps: int = STEPS,
    until: int = 0,
    save: int = 0,
    resume: int = 0,
    evaluate: int = 0,
    float16: bool = False,
    **settings: Any,
) -> Trained:
    settings |= {
        "learning_rate": lr,
        "max_steps": steps,
        "optim": "sgd" if float16 else "adamw_torch",
    }
    if save:
        settings |= {"save_strategy": "steps", "save_steps": save}
    if evaluate:
        settings |= {"eval_strategy": "steps", "eval_steps": evaluate}
    with listening("transformers", "hdet") as lines:
        trainer = trainer_of(folder, ensemble, until, fp16=float16, **settings)
        if float16:
            # A CPU computes in float32 then, without a word: accelerate makes no scaler there. This
            # is what it makes on a GPU.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
            trainer.accelerator.native_amp, trainer.accelerator.scaler = True, scaler
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{resume}" if resume else None)
    log = [line for line in trainer.state.log_history if "learning_rate" in line]
    seen, saved = trainer.seen, None
    if save and Path(folder, f"checkpoint-{save}").exists():
        saved = weights(
            transformers.LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-{save}")
        )
    return Trained(
        last=weights(trainer.model),
        weights=seen.weights,
        lines=[[line["loss"], line["learning_rate"], line["grad_norm"]] for line in log],
        rates=[line["learning_rate"] for line in log],
        losses=[line["loss"] for line in log],
        metrics=[{key: line[key] for key in line if "hdet" in key} for line in log],
        evaluated=seen.evaluated[:1],
        saved=saved,
        told=lines,
        skipped=seen.skipped,
        counted=seen.counted,
    ).see([] if ensemble is None else [trainer.ensemble])


def _mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return (
        outputs.logits[:, :-1] - torch.nn.functional.one_hot(labels[:, 1:].clamp(min=0), 32)
    ).square().mean() / 2


def again(folder: str, accepts_items: bool = True, own: Any = (), **settings: Any) -> Any:
    still = {"learning_rate": 0.0, "max_steps": 1}
    trainer = trainer_of(folder, STILL, own=own, **still, **settings)
    trainer.model_accepts_loss_kwargs = accepts_items
    with closures() as kept:
        trainer.train()
    trainer.counted, inner = {"a": [1]}, trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        trainer.counted["a"].append(2)  # as trl's trainers do
        return inner(*args, **kwargs)

    trainer.compute_loss = compute_loss
    found = computed_again(trainer._hdet, trainer.model, kept[-1])
    assert trainer.counted == {"a": [1]}
    return [trainer.state.log_history[0]["loss"]], trainer.seen.gradient, found


class TestContract(Float16):
    train, again = staticmethod(train), staticmethod(again)
    plain = ((1, {}), (2, {"bf16": True, "warmup_steps": 2}))
    anew = (
        (1, {"label_smoothing_factor": 0.1}), (1, {"accepts_items": False}), (2, {"bf16": True}),
        (2, {"own": {"compute_loss_func": _mean_loss}}),
    )  # fmt: skip


def _stopped(folder: str) -> Any:
    trainer = trainer_of(folder, SPREAD, until=3)
    trainer.train()
    first = weights(trainer.model)
    trainer.train()  # anew, with an Ensemble of its own
    assert trainer.ensemble.steps_done == 3
    return first, weights(trainer.model)


def test_a_run_that_is_stopped_within_a_cycle_ends_with_equal_replicas_and_can_be_trained_again(
    tmp_path: Path,
) -> None:
    first, again = zip(*on_ranks(_stopped, 2, str(tmp_path)), strict=True)
    assert equal(list(first)) and equal(list(again)) and not torch.equal(first[0], again[0])


def test_cycles_end_at_multiples_of_t_where_the_warm_up_begins_at_0(tmp_path: Path) -> None:
    run = train(str(tmp_path), {**SPREAD, "controller": Halved()}, warmup_steps=3)
    assert [line["hdet/cycle"] for line in run.metrics] == [0.0] * 4 + [1.0] * 5 + [2.0] * 2 + [3.0]


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    mixin = hdet.integrations.transformers.HdetMixin
    with pytest.raises(TypeError, match=r"behind the Trainer.*write class Wrong\(HdetMixin, ...\)"):
        type("Wrong", (transformers.Trainer, mixin), {})
    greedy = {"lr_scheduler_type": "greedy", "eval_strategy": "steps"}
    with pytest.raises(ValueError, match="GreedyLR, whose step needs 'metrics'"):
        trainer_of(str(tmp_path), STILL, **greedy).train()
