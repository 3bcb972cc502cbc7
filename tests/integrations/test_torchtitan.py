"""torchtitan's Trainer with hdet in it, on one rank, as two replicas (HSDP of one shard), and as
HSDP and tensor parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import distribute_tensor

import hdet

from ..distributed import RankError
from .frameworks import (
    EVERY,
    FIRST,
    LOOKED,
    SPREAD,
    STEPS,
    STILL,
    TRIED,
    Halved,
    check_looked_at,
    check_same_run,
    equal,
    example,
    halved,
    launched,
    listening,
    looked_at,
    needs,
    told,
    trial,
    weights,
)

needs("torchtitan", "triton")
for file in (
    "torchtitan_cpu",
    "torchtitan_tiny",
):  # before torchtitan: the first says that there is no GPU
    example(file)
EXAMPLE = example("torchtitan_llama")

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


class Kept:
    """In the place of TensorBoard or W&B: what torchtitan tells them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.lines.append({"step": step, **metrics})

    def close(self) -> None:
        pass

    def of(self, *names: str) -> list[tuple[float, ...]]:
        return [tuple(line[name] for name in names) for line in self.lines if "grad_norm" in line]


class Watched(Trainer):
    """A user's subclass: keeps the weights after each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.metrics_processor.logger = self.kept = Kept()
        self.weights: dict[int, torch.Tensor] = {}

    until = STEPS * 1000

    def should_continue_training(self) -> bool:
        return super().should_continue_training() and self.step < self.until

    def train(self) -> None:
        with mock.patch(
            "torchtitan.trainer.time.sleep", lambda seconds: None
        ):  # of 2 seconds, at the end
            super().train()

    def train_step(self, data_iterator: Any) -> None:
        self.weights[self.step - 1] = weights(self.model_parts[0])
        super().train_step(data_iterator)
        self.weights[self.step] = weights(self.model_parts[0])


class Validated(Validator):
    """Keeps the weights that are validated."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[Any], step: int) -> None:
        self.weights = weights(model_parts[0])
        super().validate(model_parts, step)


def group(pattern: str, lr: float, name: str = "AdamW", **others: Any) -> ParamGroupConfig:
    return ParamGroupConfig(
        pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": lr, "fused": False, **others}
    )


def config(
    folder: str,
    world: int,
    *,
    lr: float = 1e-2,
    steps: int = STEPS,
    save: int = 0,
    validate: int = 0,
    bf16: bool = False,
    loss: Any = None,
    groups: Any = None,
    parallel: dict[str, int] | None = None,
    **checkpoint: Any,
) -> Any:
    """Two micro-batches a step, and gradients that are clipped. ``world``: replicas."""
    parallel = {"data_parallel_replicate_degree": world} if parallel is None else parallel
    ranks = parallel.get("data_parallel_replicate_degree", 1) * parallel.get(
        "data_parallel_shard_degree", 1
    )
    return Watched.Config(
        model_spec=torchtitan_tiny.llama(),
        loss=loss or CrossEntropyLoss.Config(),
        tokenizer=torchtitan_tiny.NoTokenizer.Config(),
        dataloader=torchtitan_tiny.Twice.Config(),
        optimizer=OptimizersContainer.Config(
            param_groups=groups or [group("norm", 2 * lr), group(".*", lr)]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=4 * ranks,
            seq_len=16,
            steps=steps,
            max_norm=0.5,
            disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if bf16 else "float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallel),
        checkpoint=CheckpointManager.Config(enable=bool(save), interval=save or 1, **checkpoint),
        validator=Validated.Config(
            enable=bool(validate),
            freq=validate or 1,
            steps=2,
            dataloader=torchtitan_tiny.Twice.Config(),
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=folder,
    )


def trained(
    folder: str,
    world: int,
    ensemble: dict[str, Any] | None,
    until: int = STEPS * 1000,
    **settings: Any,
) -> Any:
    """A trainer that has trained; None: torchtitan's own. ``until``: stopped before its end."""
    made = config(folder, world, **settings)
    trainer = (made if ensemble is None else wrap(made, **ensemble)).build()
    trainer.until = until
    trainer.train()
    trainer.close()
    return trainer


# -- the plain run ---------------------------------------------------------------------------------

RATES = ("lr/AdamW/0", "lr/AdamW/1")


def _plain(
    folder: str, world: int, ensemble: dict[str, Any] | None, settings: dict[str, Any]
) -> Any:
    trainer = trained(folder, world, ensemble, validate=7, save=4, **settings)
    validated = [
        line["validation_metrics/loss"]
        for line in trainer.kept.lines
        if "validation_metrics/loss" in line
    ]
    return (
        weights(trainer.model_parts[0]),
        trainer.kept.of("loss_metrics/global_avg_loss", "grad_norm", *RATES),
        validated,
    )


@pytest.mark.parametrize(("world", "settings"), [
    (1, {}), (2, {"bf16": True, "loss": ChunkedLossWrapper.Config(num_chunks=2)}),
    (4, {"parallel": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}}),
])  # fmt: skip
def test_spread_0_is_the_plain_run_bit_for_bit(
    tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    plain = launched(_plain, world, str(tmp_path / "plain"), world, None, settings)
    ours = launched(_plain, world, str(tmp_path / "ours"), world, STILL, settings)
    check_same_run(plain, ours)
    assert all(len(validated) == 2 for *_, validated in ours)


def _looked_at(folder: str, world: int, ensemble: dict[str, Any] | None, lr: float) -> Any:
    trainer = trained(folder, world, ensemble, groups=[group(".*", lr)], steps=LOOKED)
    lines = trainer.kept.of("loss_metrics/global_avg_loss", "grad_norm", "lr/AdamW")
    return (
        weights(trainer.model_parts[0]),
        lines,
        ensemble is not None and looked_at(trainer.ensemble),
    )


@pytest.mark.parametrize("world", [1, 2])
def test_by_default_the_first_steps_are_looked_at_which_costs_nothing_and_leaves_no_trace(
    tmp_path: Path, world: int
) -> None:
    check_looked_at(
        lambda of, lr: launched(_looked_at, world, str(tmp_path), world, of, lr), 1e-2, 1e-6
    )


def _losses(folder: str, world: int, parallel: dict[str, int] | None) -> Any:
    records: list[Any] = []
    ensemble = {
        **STILL,
        "log": lambda record, step: records.append(
            [loss for loss in record["losses"] if loss is not None]
        ),
    }
    trainer = trained(folder, world, ensemble, parallel=parallel)
    return records, [loss for (loss,) in trainer.kept.of("loss_metrics/global_avg_loss")]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, None),
        (2, None),
        (2, {"data_parallel_shard_degree": 2}),
        (2, {"tensor_parallel_degree": 2}),
        (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    ],
)
def test_a_cycles_loss_is_the_mean_of_torchtitans(
    tmp_path: Path, world: int, parallel: Any
) -> None:
    records, losses = launched(_losses, world, str(tmp_path), world, parallel)[0]
    found = [sum(of) / len(of) for of in records]  # replicas have equally many tokens
    assert len(records[0]) == (
        1
        if world == 1
        or (parallel or {}).get("data_parallel_replicate_degree", world if parallel is None else 1)
        == 1
        else 2
    )
    assert found == pytest.approx(
        [sum(losses[:5]) / 5, sum(losses[5:10]) / 5, sum(losses[10:]) / 2], rel=1e-5
    )


# -- replicas --------------------------------------------------------------------------------------


def saved_weights(folder: str, step: int, model: Any) -> torch.Tensor:
    """Of a checkpoint, in which torchtitan splits what is fused in the model."""
    state = {name: torch.empty(value.shape) for name, value in model.state_dict().items()}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint/step-{step}", no_dist=True)
    model.load_state_dict(
        {
            name: distribute_tensor(value, own.device_mesh, own.placements)
            for (name, value), own in zip(state.items(), model.state_dict().values(), strict=True)
        }
    )
    return weights(model)


def _spread(folder: str, world: int) -> Any:
    # Of moments that keep nothing a step is the rate, in the direction of the sign.
    signs = [group(".*", 1e-2, betas=(0.0, 0.0), eps=1e-30, weight_decay=0.0)]
    trainer = trained(
        folder, world, {**SPREAD, "controller": Halved()}, validate=7, save=8, groups=signs
    )
    last = weights(trainer.model_parts[0])
    table = trainer.kept.of("lr/AdamW", "hdet/corrections/lr", "hdet/multipliers/lr")
    return (
        trainer.weights,
        trainer.validator.weights,
        saved_weights(folder, 8, trainer.model_parts[0]),
        last,
        table,
    )


def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(tmp_path: Path) -> None:
    steps, validated, saved, last, tables = zip(
        *launched(_spread, 2, str(tmp_path), 2), strict=True
    )
    # As the next step finds them: 1 (torchtitan always does) and 7 have been validated, 8 has been
    # saved, 5 and 10 end a cycle, 12 the run.
    assert [step for step in steps[0] if not equal([of[step] for of in steps])] == [
        2,
        3,
        4,
        6,
        9,
        11,
    ]
    assert (
        equal(list(validated))
        and equal(list(last))
        and torch.equal(validated[0], steps[0][7])
        and torch.equal(saved[0], steps[0][8])
    )
    schedule = [rate for (rate,) in launched(_plain_rates, 1, str(tmp_path / "plain"))[0]]
    for of, table in zip(steps, tables, strict=True):
        assert [rate for rate, _, _ in table] == pytest.approx(
            [r * (0.5 if step >= EVERY else 1) for step, r in enumerate(schedule)], rel=1e-9
        )
        assert [c for _, c, _ in table] == [1.0] * EVERY + [0.5] * (STEPS - EVERY)
        # Steps after which nobody has averaged: the weights have moved by the rate and the
        # multiplier that are logged for them.
        for step in (2, 3, 4, 9, 11):
            rate, _, multiplier = table[step - 1]
            assert float((of[step] - of[step - 1]).abs().median()) == pytest.approx(
                rate * multiplier, rel=1e-3
            )
    assert sorted(table[0][2] for table in tables) == pytest.approx([0.7, 1.3])


def _plain_rates(folder: str) -> Any:
    return trained(folder, 1, None, groups=[group(".*", 1e-2)]).kept.of("lr/AdamW")


def _apart(folder: str, world: int) -> Any:
    trainer = trained(
        folder,
        world,
        SPREAD,
        parallel={"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
    )
    return trainer.weights


def test_in_hsdp_a_replica_is_a_row_of_the_mesh(tmp_path: Path) -> None:
    ranks = launched(_apart, 4, str(tmp_path), 4)
    first, second = ranks[:2], ranks[2:]
    for shard, other in zip(first, second, strict=True):
        assert [step for step in shard if torch.equal(shard[step], other[step])] == [0, 5, 10, 12]


# -- checkpoints -----------------------------------------------------------------------------------


def _resumed(folder: str, world: int, at: int) -> Any:
    ensemble = {**SPREAD, "controller": lambda model: Halved()}
    settings = {"save": at, "bf16": True, "keep_latest_k": 0}
    whole = trained(f"{folder}/whole", world, ensemble, **settings)
    resumed = trained(f"{folder}/whole", world, ensemble, load_step=at, **settings)
    names = (
        "step",
        "loss_metrics/global_avg_loss",
        *RATES,
        "hdet/corrections/lr",
        "hdet/multipliers/lr",
        "hdet/cycle",
    )
    return (
        weights(whole.model_parts[0]),
        weights(resumed.model_parts[0]),
        whole.kept.of(*names),
        resumed.kept.of(*names),
    )


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("at", [EVERY, EVERY + 2])
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
    tmp_path: Path, world: int, at: int
) -> None:
    for whole, resumed, log_whole, log_resumed in launched(
        _resumed, world, str(tmp_path), world, at
    ):
        assert (
            torch.equal(whole, resumed)
            and log_whole[at:] == log_resumed
            and len(log_resumed) == STEPS - at
        )


def _both_ways(folder: str) -> Any:
    settings = {"save": 4, "keep_latest_k": 0, "last_save_model_only": False}
    plain = trained(f"{folder}/plain", 1, None, **settings)
    ours = trained(
        f"{folder}/plain", 1, STILL, load_step=4, exclude_from_loading=["hdet"], **settings
    )
    back = trained(f"{folder}/plain", 1, None, load_step=8, **settings)  # which ours has written
    return (
        [weights(of.model_parts[0]) for of in (plain, ours, back)],
        ours.ensemble.engine.step,
        len(back.kept.lines),
    )


def test_checkpoints_of_a_plain_trainer_go_on_here_and_ours_there(tmp_path: Path) -> None:
    [(found, steps, lines)] = launched(_both_ways, 1, str(tmp_path))
    assert equal(found) and steps == STEPS and lines == STEPS - 8


# -- losses anew, AutoLR ---------------------------------------------------------------------------


class Closed(Watched):
    """Keeps the gradients of each step, as they are after clipping, and its loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(Watched.Config):
        pass

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.gradients = gradients(self)


def gradients(trainer: Any) -> torch.Tensor:
    found = [p.grad for p in trainer.model_parts[0].parameters()]
    return torch.cat(
        [(g.to_local() if hasattr(g, "to_local") else g).flatten() for g in found]
    ).clone()


def _closed(folder: str, world: int, settings: dict[str, Any]) -> Any:
    """The closure after a step of rate 0, and what the step itself has had."""
    made = config(folder, world, lr=0.0, steps=2, **settings)
    made = Closed.Config(**{field.name: getattr(made, field.name) for field in fields(made)})
    trainer = wrap(made, **STILL).build()
    kept: list[Any] = []
    begin = trainer.hdet.begin_run
    trainer.hdet.begin_run = lambda: (begin(), keep_closure(trainer.ensemble, kept))
    trainer.train()
    seen = trainer.ntokens_seen
    trainer.optimizers.zero_grad()
    loss = kept[-1]()
    trainer.hdet.clip_gradients()
    again = gradients(trainer)
    with torch.no_grad():
        scored = kept[-1]()
    return (
        trainer.kept.of("loss_metrics/global_avg_loss")[-1][0],
        loss,
        scored,
        trainer.gradients,
        again,
        trainer.ntokens_seen - seen,
    )


def keep_closure(ensemble: Any, kept: list[Any]) -> None:
    inner = ensemble.step
    ensemble.step = lambda closure: (kept.append(closure), inner(closure=closure))


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {"bf16": True}),
        (2, {"loss": ChunkedLossWrapper.Config(num_chunks=2)}),
        (2, {"parallel": {"data_parallel_shard_degree": 2}}),
    ],
)
def test_losses_and_gradients_are_computed_anew_as_the_trainer_has_made_them(
    tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    found = launched(
        _closed, world, str(tmp_path), world, {**settings, "groups": [group(".*", 0.0)]}
    )
    for _, loss, scored, gradients_of_step, again, counted in found:
        assert (
            torch.equal(gradients_of_step, again)
            and float(again.norm()) > 0
            and torch.equal(loss, scored)
            and counted == 0
        )
    assert sum(float(loss) for _, loss, *_ in found) / world == pytest.approx(found[0][0], rel=1e-6)


def _auto(
    folder: str, world: int, lr: float, controller: Callable[[Any], Any] | None, parallel: Any
) -> Any:
    with listening(hdet.integrations.torchtitan._LOG.name) as lines:
        ensemble = None if controller is None else {**STILL, "controller": controller}
        trainer = trained(
            folder,
            world,
            ensemble,
            groups=[group(".*", lr)],
            steps=TRIED,
            until=FIRST,
            parallel=parallel,
        )
    corrections = {} if controller is None else trainer.ensemble.corrections
    said = [
        line for line in lines if "hdet" in line or "a trial" in line
    ]  # by whomever: torchtitan's logger is the root of all
    return weights(trainer.model_parts[0]), corrections.get("lr"), said


@pytest.mark.parametrize(("world", "parallel"), [(2, {"data_parallel_shard_degree": 2})])
def test_auto_lr_raises_a_rate_that_is_far_too_low_and_says_so_in_torchtitans_log(
    tmp_path: Path, world: int, parallel: Any
) -> None:
    found = launched(_auto, world, str(tmp_path), world, 1e-6, trial, parallel)
    assert (
        all(correction >= 8 for _, correction, _ in found)
        and len({correction for _, correction, _ in found}) == 1
    )
    lines = found[0][2]
    assert lines[0].startswith("hdet, auto: a trial in the first 56 steps") and any(
        "learning rate 1e-06 -> " in line for line in lines
    )
    assert sum("a trial in the first" in line for line in lines) == 1 and len(set(lines)) == len(
        lines
    )


def test_trials_leave_no_trace_in_the_run(tmp_path: Path) -> None:
    plain = launched(_auto, 1, str(tmp_path / "plain"), 1, 1e-2, None, None)
    ours = launched(_auto, 1, str(tmp_path / "ours"), 1, 1e-2, told, None)
    assert all(
        torch.equal(a, b) and correction == 1
        for (a, *_), (b, correction, _) in zip(plain, ours, strict=True)
    )
    assert any("good rates for" in line for line in ours[0][2])


def _example() -> Any:
    trainer = EXAMPLE.tiny_hdet(60, 1).build()
    trainer.train()
    return trainer.ensemble.corrections["lr"]


def test_the_example_runs() -> None:
    [correction] = launched(_example, 1)
    assert correction >= 1


# -- configurations, refusals ----------------------------------------------------------------------


def from_registry() -> Any:
    """As a function of a config_registry."""
    return wrap(config("unused", 1, lr=1e-3), **SPREAD)


def test_torchtitans_command_line_takes_it() -> None:
    before = config("unused", 1)
    names = [
        "--module",
        __name__,
        "--config",
        "from_registry",
        "--training.steps",
        "7",
        "--lr_scheduler.warmup_steps",
        "3",
    ]
    made = ConfigManager().parse_args(names)
    assert isinstance(made, Watched.Config) and (
        made.training.steps,
        made.lr_scheduler.warmup_steps,
    ) == (7, 3)
    assert made.to_dict()["training"]["steps"] == 7
    assert type(made)._owner.__mro__[2] is Watched and type(before)._owner is Watched


def _several(folder: str, controller: Any) -> Any:
    groups = [group("norm", 2e-2, "Adam"), group(".*", 1e-2)]
    trainer = trained(folder, 2, {**SPREAD, "controller": controller}, groups=groups)
    line = trainer.kept.lines[-1]
    return (
        weights(trainer.model_parts[0]),
        len(trainer.ensembles),
        line["lr/Adam"] / line["lr/AdamW"],
        sorted(k for k in line if "corrections" in k),
    )


def test_several_optimizers_have_an_ensemble_each_and_auto_lr_refuses_them(tmp_path: Path) -> None:
    found = launched(_several, 2, str(tmp_path / "several"), halved)
    assert equal([w for w, *_ in found])
    assert found[0][1:] == (
        2,
        pytest.approx(2),
        ["optimizer 0/hdet/corrections/lr", "optimizer 1/hdet/corrections/lr"],
    )
    with pytest.raises(
        RankError,
        match=(
            "AutoLR trains copies of a run with one optimizer, and there are 2: train all "
            "parameters with one"
        ),
    ):
        launched(_several, 2, str(tmp_path / "auto"), trial)
    with pytest.raises(
        RankError, match="several optimizers, each with a controller of its own: pass a function"
    ):
        launched(_several, 2, str(tmp_path / "one"), Halved())


class OwnWay(Watched):
    """A Trainer of another kind of model, as torchtitan's of Flux."""

    @dataclass(kw_only=True, slots=True)
    class Config(Watched.Config):
        pass

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        return super().forward_backward_step(**inputs)


def _graphs(folder: str) -> None:
    trainer = wrap(config(folder, 1), controller=trial).build()
    trainer.fwd_bwd_fn = lambda *args: None  # as with CUDA graphs, which a CPU has not
    trainer.train()


def _own_way(folder: str, controller: Any) -> Any:
    made = config(folder, 1)
    made = OwnWay.Config(**{field.name: getattr(made, field.name) for field in fields(made)})
    trainer = wrap(made, **SPREAD, controller=controller).build()
    trainer.train()
    return trainer.ensemble.corrections["lr"]


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a torchtitan Trainer.Config, .* got dict"):
        wrap({})
    with pytest.raises(TypeError, match="no setting 'controler' here, only controller, design"):
        wrap(config("unused", 1), controler=None)
    with pytest.raises(
        ValueError,
        match="pipeline_parallel_degree is above 1, .*: set it to 1, and shard over more ranks",
    ):
        wrap(config("unused", 1, parallel={"pipeline_parallel_degree": 2})).build()
    with pytest.raises(
        RankError,
        match=(
            "AutoLR trains copies of the run, whose gradients a captured CUDA graph does not "
            "reach: set training.disable"
        ),
    ):
        launched(_graphs, 1, str(tmp_path / "graphs"))
    with pytest.raises(
        RankError,
        match=(
            "OwnWay.forward_backward_step is not the Trainer's, which hdet knows: use a controller "
            "that compares"
        ),
    ):
        launched(_own_way, 1, str(tmp_path / "own way"), trial)
    assert launched(_own_way, 1, str(tmp_path / "own way too"), halved) == [0.5]
