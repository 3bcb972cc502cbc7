"""transformers' Trainer with hdet in it, in one process and in two: the plain run where nothing is
explored, equal replicas where there should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet

from .frameworks import (
    EVERY,
    FLOAT16,
    LOOKED,
    MOVED,
    SPREAD,
    STEPS,
    STILL,
    TRIED,
    Halved,
    Moved,
    Text,
    check_looked_at,
    check_same_run,
    check_skipped,
    correction_in,
    equal,
    example,
    listening,
    llama,
    looked_at,
    needs,
    on_ranks,
    told,
    trial,
    weights,
)

needs("transformers", "accelerate")
import transformers

HdetTrainer = hdet.integrations.transformers.HdetTrainer


def args(folder: Any, **settings: Any) -> transformers.TrainingArguments:
    """Two micro-batches a step, and gradients that are clipped."""
    settings = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        **settings,
    }
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "ddp_find_unused_parameters": False,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **quiet, **settings)


class Seen(transformers.TrainerCallback):
    """Weights after each step, the rate that a step has really had (of SGD), and the weights that
    are evaluated."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.evaluated: list[torch.Tensor] = []
        self.rates: list[float] = []
        self.gradients: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self._before, self._gradient = (
            weights(model),
            torch.cat([p.grad.flatten() for p in model.parameters()]),
        )
        self.gradients.append(self._gradient.clone())

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self.rates.append(
            float(
                ((self._before - weights(model)) @ self._gradient)
                / (self._gradient @ self._gradient)
            )
        )

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self.weights[state.global_step] = weights(model)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        self.evaluated.append(weights(model))


def logged(trainer: Any, *names: str) -> list[list[float]]:
    return [
        [line[name] for name in names]
        for line in trainer.state.log_history
        if "learning_rate" in line
    ]


def trained(
    folder: str,
    ensemble: dict[str, Any] | None,
    resume: str | None = None,
    examples: int = 160,
    **settings: Any,
) -> Any:
    """A trainer that has trained; None: the plain one."""
    seen = Seen()
    common = {
        "model": llama(),
        "args": args(folder, **settings),
        "train_dataset": Text(examples),
        "eval_dataset": Text(8, seed=1),
        "callbacks": [seen],
    }
    trainer = (
        transformers.Trainer(**common)
        if ensemble is None
        else HdetTrainer(**common, ensemble=ensemble)
    )
    trainer.seen = seen
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# -- the plain run ---------------------------------------------------------------------------------


def _plain(folder: str, ensemble: dict[str, Any] | None, settings: dict[str, Any]) -> Any:
    trainer = trained(folder, ensemble, **settings)
    return weights(trainer.model), logged(trainer, "loss", "learning_rate", "grad_norm")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_spread_0_is_the_plain_run_bit_for_bit(tmp_path: Path, world: int, bf16: bool) -> None:
    settings = {"bf16": bf16, "warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 7}
    plain = on_ranks(_plain, world, str(tmp_path), None, settings)
    ours = on_ranks(_plain, world, str(tmp_path), STILL, settings)
    check_same_run(plain, ours)


def test_a_cycles_loss_is_the_mean_of_the_trainers(tmp_path: Path) -> None:
    records: list[Any] = []
    trainer = trained(
        str(tmp_path),
        {"sync": hdet.Sync(EVERY), "log": lambda record, step: records.append(record["losses"][0])},
    )
    losses = [loss for (loss,) in logged(trainer, "loss")]
    assert records == pytest.approx(
        [sum(losses[:5]) / 5, sum(losses[5:10]) / 5, sum(losses[10:]) / 2], rel=1e-5
    )


def _looked_at(folder: str, ensemble: dict[str, Any] | None, lr: float) -> Any:
    trainer = trained(folder, ensemble, max_steps=LOOKED, learning_rate=lr)
    return (
        weights(trainer.model),
        logged(trainer, "loss", "learning_rate", "grad_norm"),
        ensemble is not None and looked_at(trainer.ensemble),
    )


@pytest.mark.parametrize("world", [1, 2])
def test_by_default_the_first_steps_are_looked_at_which_costs_nothing_and_leaves_no_trace(
    tmp_path: Path, world: int
) -> None:
    check_looked_at(lambda of, lr: on_ranks(_looked_at, world, str(tmp_path), of, lr), 1e-2, 1e-6)


# -- float16 ---------------------------------------------------------------------------------------


class Counted(Seen):
    """Which steps the scaler has skipped, and how many are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[bool] = []
        self.counted: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_step_end(args, state, control, **others)
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)
        ensemble = getattr(self.trainer, "ensemble", None)
        self.counted.append(0 if ensemble is None else ensemble.engine.step)


def _float16(folder: str, kind: str, **settings: Any) -> Any:
    seen, ensemble = Counted(), FLOAT16[kind]
    own = {} if ensemble is None else {"ensemble": ensemble}
    made = transformers.Trainer if ensemble is None else HdetTrainer
    trainer = made(
        llama(),
        args(folder, fp16=True, optim="sgd", **settings),
        train_dataset=Text(1600),
        callbacks=[seen],
        **own,
    )
    # A CPU computes in float32 then, without a word: accelerate makes no scaler there. This is what
    # it makes on a GPU.
    assert trainer.accelerator.scaler is None
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    seen.trainer = trainer
    trainer.train()
    if kind in ("trial", "told"):
        auto = trainer.ensemble.engine.controller.search
        assert auto.scaler is trainer.accelerator.scaler and all(
            arm.losses for arm in auto.interval.trial.arms[:2]
        )
        return weights(trainer.model), trainer.ensemble.corrections["lr"]
    lines = logged(trainer, "loss", "learning_rate", "grad_norm")
    return (weights(trainer.model), seen.skipped, lines, seen.counted), seen.weights


@pytest.mark.parametrize("world", [1, 2])
def test_under_float16_spread_0_is_the_plain_run_and_skipped_steps_do_not_count(
    tmp_path: Path, world: int
) -> None:
    check_skipped(_float16, world, str(tmp_path))


def test_under_float16_a_trial_has_the_trainers_scaler_and_its_clipping(tmp_path: Path) -> None:
    settings = {"max_steps": TRIED, "learning_rate": 1e-2}
    _, correction = _float16(str(tmp_path), "trial", **settings)
    assert correction >= 8
    (told, _), ((plain, *_), _) = (
        _float16(str(tmp_path), kind, **settings) for kind in ("told", "plain")
    )
    assert torch.equal(told, plain)


@pytest.mark.parametrize("kind", ["spread", "outer"])
def test_under_float16_replicas_differ_within_a_cycle_and_are_equal_after_it(
    tmp_path: Path, kind: str
) -> None:
    ((last, skipped, _, counted), one), ((same, also, _, and_counted), two) = on_ranks(
        _float16, 2, str(tmp_path), kind
    )
    assert skipped == also and counted == and_counted and any(skipped[3:]) and counted[-1] > EVERY
    assert [torch.equal(one[step], two[step]) for step in one] == [
        count % EVERY == 0 for count in counted
    ]
    assert torch.equal(last, same) and last.isfinite().all()


# -- replicas --------------------------------------------------------------------------------------


def _spread(folder: str) -> Any:
    settings = {
        "optim": "sgd",
        "eval_strategy": "steps",
        "eval_steps": 7,
        "save_strategy": "steps",
        "save_steps": 8,
    }
    trainer = trained(folder, {**SPREAD, "controller": Halved()}, **settings)
    saved = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-8")
    evaluations = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    lines = logged(trainer, "learning_rate", "hdet/corrections/lr", "hdet/multipliers/lr")
    return trainer.seen, evaluations, weights(saved), weights(trainer.model), lines


def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(tmp_path: Path) -> None:
    seen, evaluations, saved, last, lines = zip(*on_ranks(_spread, 2, str(tmp_path)), strict=True)
    # Step 7 is seen before its evaluation, step 8 before its save; both have parted since step 5.
    assert {step: equal([of.weights[step] for of in seen]) for step in seen[0].weights} == {
        step: step in (5, 10, 12) for step in range(1, 13)
    }
    assert (
        equal([of.evaluated[0] for of in seen])
        and evaluations[0] == evaluations[1]
        and equal(list(saved))
        and equal(list(last))
    )
    mean = sum(of.weights[8] for of in seen) / 2
    torch.testing.assert_close(saved[0], mean, rtol=0, atol=1e-7)
    assert not torch.equal(saved[0], seen[0].weights[8])
    # The rate in the log is the base value; a step has had the multiplier on it.
    schedule = [
        rate for (rate,) in logged(trained(str(tmp_path), None, optim="sgd"), "learning_rate")
    ]
    for rank, (of, table) in enumerate(zip(seen, lines, strict=True)):
        assert [rate for rate, _, _ in table] == pytest.approx(
            [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(schedule)], rel=1e-9
        )
        # What is logged beside it is in force from there on.
        multipliers = [m for _, _, m in table]
        used = [multipliers[0], *multipliers[:-1]]
        expected = [rate * m for (rate, _, _), m in zip(table, used, strict=True)]
        assert of.rates == pytest.approx(expected, rel=2e-2), rank
        assert [c for _, c, _ in table] == [1.0] * (EVERY - 1) + [0.5] * (STEPS - EVERY + 1)
    assert sorted(m for _, _, m in (lines[0][0], lines[1][0])) == pytest.approx([0.7, 1.3])


def _stopped(folder: str) -> Any:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    trainer = HdetTrainer(
        llama(), args(folder), train_dataset=Text(), callbacks=[Stop()], ensemble=SPREAD
    )
    trainer.train()
    first = weights(trainer.model)
    trainer.train()  # anew, with an Ensemble of its own
    assert trainer.ensemble.engine.step == 3
    return first, weights(trainer.model)


def test_a_run_that_is_stopped_within_a_cycle_ends_with_equal_replicas_and_can_be_trained_again(
    tmp_path: Path,
) -> None:
    first, again = zip(*on_ranks(_stopped, 2, str(tmp_path)), strict=True)
    assert equal(list(first)) and equal(list(again)) and not torch.equal(first[0], again[0])


# -- checkpoints -----------------------------------------------------------------------------------


def _resumed(folder: str, at: int, settings: dict[str, Any]) -> Any:
    ensemble = {**SPREAD, "controller": Halved()}
    saves = {"save_strategy": "steps", "save_steps": at, "bf16": True, **settings}
    whole = trained(f"{folder}/whole", ensemble, **saves)
    resumed = trained(f"{folder}/resumed", ensemble, f"{folder}/whole/checkpoint-{at}", **saves)
    names = (
        "step",
        "loss",
        "learning_rate",
        "hdet/corrections/lr",
        "hdet/multipliers/lr",
        "hdet/cycle",
    )
    return (
        weights(whole.model),
        weights(resumed.model),
        logged(whole, *names),
        logged(resumed, *names),
        resumed.ensemble.engine.step,
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("at", [EVERY, EVERY + 2])
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
    tmp_path: Path, world: int, at: int
) -> None:
    for whole, resumed, log_whole, log_resumed, steps in on_ranks(
        _resumed, world, str(tmp_path), at, {}
    ):
        assert torch.equal(whole, resumed) and len(log_whole) == steps == STEPS
        assert (
            log_whole[at:] == log_resumed[at:]
        )  # what was before comes from the first process's checkpoint


def test_checkpoints_of_a_plain_trainer_go_on_here_and_ours_there(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4}
    still = {"knobs": [hdet.LearningRate(0)]}
    plain = trained(str(tmp_path / "plain"), None, **saves)
    ours = trained(str(tmp_path / "ours"), still, str(tmp_path / "plain/checkpoint-4"), **saves)
    back = trained(str(tmp_path / "back"), None, str(tmp_path / "ours/checkpoint-8"), **saves)
    assert torch.equal(weights(plain.model), weights(ours.model)) and torch.equal(
        weights(plain.model), weights(back.model)
    )
    assert ours.ensemble.engine.step == STEPS


def test_without_hdet_the_correction_of_a_checkpoint_is_lost_which_is_said_when_it_is_saved(
    tmp_path: Path,
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 8, "log_level": "info"}
    with listening(*LOG) as lines:
        trained(str(tmp_path / "ours"), {**SPREAD, "controller": Halved()}, **saves)
    said = (
        "saved with the correction 0.5 of lr, which only hdet reads. To go on without hdet, "
        "multiply your lr by it"
    )
    assert [line for line in lines if "saved" in line] == [
        f"hdet, step 8: {said}"
    ]  # and not once more at 12
    saved = json.loads((tmp_path / "ours/checkpoint-8/trainer_state.json").read_text())
    assert saved["log_history"][-1]["hdet/corrections/lr"] == 0.5
    plain = trained(str(tmp_path / "plain"), None, **saves)
    back = trained(str(tmp_path / "back"), None, str(tmp_path / "ours/checkpoint-8"), **saves)
    assert logged(back, "learning_rate")[9:] == logged(plain, "learning_rate")[9:]


# -- what it has decided ---------------------------------------------------------------------------


def test_cycles_end_at_multiples_of_t_where_the_warm_up_begins_at_0(tmp_path: Path) -> None:
    trainer = trained(str(tmp_path), {**SPREAD, "controller": Halved()}, warmup_steps=3)
    assert [cycle for (cycle,) in logged(trainer, "hdet/cycle")] == [0.0] * 4 + [1.0] * 5 + [
        2.0
    ] * 2 + [3.0]
    assert trainer.ensemble.history["step"] == trainer.state.global_step == STEPS


def test_moves_are_told_in_the_trainers_log(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "constant", "log_level": "info"}
    with listening(*LOG) as lines:
        trained(str(tmp_path), {**SPREAD, "controller": Moved()}, **settings)
    assert lines == [f"hdet, step 5: {MOVED.format(value=0.005)}"]


# -- losses anew -----------------------------------------------------------------------------------


def _mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return (
        outputs.logits[:, :-1] - torch.nn.functional.one_hot(labels[:, 1:].clamp(min=0), 32)
    ).square().mean() / 2


def _closed(folder: str, kind: str) -> Any:
    """The closure after a step that has not moved anything, and what the step itself has had."""
    settings: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 2, "bf16": kind == "bf16"}
    if kind == "smoothed":
        settings["label_smoothing_factor"] = 0.1
    seen = Seen()
    own = {"compute_loss_func": _mean_loss} if kind == "own" else {}
    trainer = HdetTrainer(
        llama(),
        args(folder, **settings),
        train_dataset=Text(),
        callbacks=[seen],
        ensemble={"controller": hdet.AutoLR},
        **own,
    )
    if kind == "mean":
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    driver, model = trainer._hdet, trainer._hdet.model
    trainer.counted = {"a": [1]}
    trainer.compute_loss = _counting(trainer)
    for p in model.parameters():
        p.grad = None
    loss = driver.compute_again(driver._parts)
    trainer.ensemble.engine.controller.before_step()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    with torch.no_grad():
        scored = driver.compute_again(driver._parts)
    return driver.loss, loss, scored, seen.gradients[-1], gradient, trainer.counted


def _counting(trainer: Any) -> Any:
    """As trl's trainers do."""
    inner = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        trainer.counted["a"].append(2)
        return inner(*args, **kwargs)

    return compute_loss


@pytest.mark.parametrize(
    ("world", "kind"),
    [(1, "tokens"), (2, "tokens"), (1, "bf16"), (1, "smoothed"), (2, "own"), (1, "mean")],
)
def test_losses_and_gradients_are_computed_anew_as_the_trainer_has_made_them(
    tmp_path: Path, world: int, kind: str
) -> None:
    for of_step, loss, scored, gradient_of_step, gradient, counted in on_ranks(
        _closed, world, str(tmp_path), kind
    ):
        assert torch.equal(loss, of_step) and torch.equal(scored, of_step) and float(loss) > 0
        assert torch.equal(gradient, gradient_of_step) and float(gradient.norm()) <= 0.5 + 1e-6
        assert counted == {"a": [1]}


LOG = ("transformers", "hdet")
"""What hdet says in the Trainer's log."""


def _auto(folder: str, lr: float, controller: Any) -> Any:
    with listening(*LOG) as lines:
        settings = {
            "max_steps": TRIED,
            "learning_rate": lr,
            "logging_steps": 20,
            "log_level": "info",
        }
        trainer = trained(
            folder, {"controller": controller, "sync": hdet.Sync(EVERY)}, examples=1600, **settings
        )
    return weights(trainer.model), trainer.ensemble.corrections["lr"], lines


@pytest.mark.parametrize("world", [1, 2])
def test_auto_lr_raises_a_rate_that_is_far_too_low_and_says_so_in_the_trainers_log(
    tmp_path: Path, world: int
) -> None:
    found = on_ranks(_auto, world, str(tmp_path), 1e-6, trial)
    assert equal([w for w, _, _ in found]) and all(correction >= 8 for _, correction, _ in found)
    # transformers tells the others to be quiet
    assert found[0][2][0].startswith("hdet, auto: a trial in the first 56 steps")
    assert any(line.startswith("hdet, step 60: learning rate 1e-06 -> ") for line in found[0][2])


def test_trials_leave_no_trace_in_the_run(tmp_path: Path) -> None:
    plain = trained(str(tmp_path), None, examples=1600, max_steps=TRIED, logging_steps=20)
    [(of_shadow, correction, lines)] = on_ranks(_auto, 1, str(tmp_path), 1e-2, told)
    assert (
        torch.equal(weights(plain.model), of_shadow)
        and correction == 1
        and any("good rates for" in line for line in lines)
    )


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example("hf_trainer").main(60)
    assert correction_in(capsys.readouterr().out) >= 1


# -- refusals --------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        TypeError, match="must be a dict by name, such as {'controller': hdet.AutoLR}, got AutoLR"
    ):
        HdetTrainer(llama(), args(tmp_path), train_dataset=Text(), ensemble=hdet.AutoLR)
    with pytest.raises(
        TypeError,
        match=(
            r"behind the Trainer in class Wrong\(Trainer, HdetMixin\).*write class "
            r"Wrong\(HdetMixin, ...\)"
        ),
    ):
        type("Wrong", (transformers.Trainer, hdet.integrations.transformers.HdetMixin), {})
    with pytest.raises(TypeError, match="no setting 'controler' here, only controller, design"):
        HdetTrainer(llama(), args(tmp_path), train_dataset=Text(), ensemble={"controler": None})
    trainer = HdetTrainer(
        llama(),
        args(tmp_path, lr_scheduler_type="greedy", eval_strategy="steps"),
        train_dataset=Text(),
        eval_dataset=Text(8),
    )
    with pytest.raises(
        ValueError, match="GreedyLR, which steps by a metric: use a schedule of steps"
    ):
        trainer.train()
    monkeypatch.setattr(
        transformers.Trainer, "__init__", lambda self: setattr(self, "is_deepspeed_enabled", True)
    )
    with pytest.raises(
        ValueError, match="DeepSpeed, which keeps one copy of the optimizer's state.*for DDP"
    ):
        HdetTrainer()
