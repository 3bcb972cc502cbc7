"""Megatron-Core with hdet in it, on its own parallel_state, schedules, DDP and optimizers; a CPU
stands in for the GPU (examples/megatron_cpu.py)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import hdet

from ..distributed import RankError
from .frameworks import (
    EVERY,
    FIRST,
    LOOKED,
    PARTS,
    SPREAD,
    STEPS,
    STILL,
    TRIED,
    Halved,
    check_looked_at,
    correction_in,
    equal,
    example,
    halved,
    launched,
    listening,
    looked_at,
    needs,
    told,
    trial,
)

needs("megatron.core")
for file in ("megatron_cpu", "megatron_tiny", "megatron_gpt"):
    example(file)
import megatron_tiny  # type: ignore[import-not-found]
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_cpu import cpu_for_cuda  # type: ignore[import-not-found]

wrap = hdet.integrations.megatron.wrap


class Loop:
    """A training loop as Megatron's: accumulation, clipping, its schedules, an evaluation in the
    middle."""

    def __init__(
        self,
        ensemble: dict[str, Any] | None,
        *,
        tp: int = 1,
        pp: int = 1,
        lr: float = 1e-2,
        steps: int = STEPS,
        bf16: bool = False,
        optimizer: str = "adam",
        tied: bool = False,
        constant: bool = False,
        **others: Any,
    ) -> None:
        ep = others.get("expert_model_parallel_size", 1)
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.model, self.steps = [megatron_tiny.gpt(bf16, tied, **others)], steps
        settings = {
            "optimizer": optimizer,
            "lr": lr,
            "min_lr": None if constant else lr / 10,
            "weight_decay": 0.01,
            "clip_grad": 0.5,
            "sgd_momentum": 0.0,
            "bf16": bf16,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**settings), self.model)
        rates = {
            "init_lr": lr / 4,
            "max_lr": lr,
            "min_lr": lr / 10,
            "lr_warmup_steps": 2,
            "lr_decay_steps": steps,
            "lr_decay_style": "constant" if constant else "cosine",
        }
        decay = {
            "start_wd": 0.01,
            "end_wd": 0.02,
            "wd_incr_steps": steps,
            "wd_incr_style": "linear",
        }
        self.scheduler = OptimizerParamScheduler(self.optimizer, **rates, **decay)
        self.wrapped = (
            None
            if ensemble is None
            else wrap(
                self.optimizer, self.scheduler, self.model, **{"total_steps": steps, **ensemble}
            )
        )
        self.weights: dict[int, torch.Tensor] = {}
        self.lines: list[tuple[Any, ...]] = []
        self.rates: list[float] = []
        self.saved: Any = None

    def losses(self, step: int, forward_only: bool = False) -> Any:
        rank = parallel_state.get_data_parallel_rank()
        batches = [
            megatron_tiny.batch(1000 * (PARTS * step + part) + rank) for part in range(PARTS)
        ]
        sizes = {
            "num_microbatches": PARTS,
            "seq_length": megatron_tiny.LENGTH,
            "micro_batch_size": megatron_tiny.BATCH,
        }
        return get_forward_backward_func()(
            forward_step_func=megatron_tiny.forward_step,
            data_iterator=iter(batches),
            model=self.model,
            forward_only=forward_only,
            **sizes,
        )

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def flat(self) -> torch.Tensor:
        """What the optimizer steps: masters, where there are any."""
        return torch.cat([p.detach().flatten() for p in self.parameters()]).clone()

    def gradients(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters()]).clone()

    def evaluated(self) -> list[float]:
        with torch.no_grad():
            return [float(part["lm loss"]) for part in self.losses(-1, forward_only=True)]

    def step(self, step: int) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.losses(step)
        before, self.had = self.flat(), found
        rate = self.optimizer.param_groups[0]["lr"]
        successful, norm, _ = self.optimizer.step()
        assert successful
        gradient = self.gradients()
        self.rates.append(float((before - self.flat()) @ gradient / (gradient @ gradient)))
        if self.wrapped is None:
            self.scheduler.step(1)
        else:
            self.wrapped.step(
                1, found, lambda: self.losses(step, forward_only=not torch.is_grad_enabled())
            )
        self.weights[step + 1] = self.flat()
        self.lines.append((step, [float(part["lm loss"]) for part in found], norm, rate))

    def train(self, start: int = 0, save_at: int = 0, until: int = 1000) -> Loop:
        for step in range(start, min(self.steps, until)):
            self.step(step)
            if self.wrapped is not None and step + 1 in (7, save_at, self.steps):
                self.wrapped.converge()
            if step + 1 == 7:
                self.lines.append(("evaluated", self.evaluated()))
            if step + 1 == save_at:
                self.saved = self.state()
        return self

    def state(self) -> Any:
        """A checkpoint of this rank, by the names of Megatron-LM's."""
        import copy

        states = {"model": self.model[0].state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(
            {**states, "opt_param_scheduler": (self.wrapped or self.scheduler).state_dict()}
        )

    def load(self, state: Any) -> Loop:
        self.model[0].load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        (self.wrapped or self.scheduler).load_state_dict(state["opt_param_scheduler"])
        return self


def on_megatron(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    return launched(_with_megatron, world, function, *args)


def _with_megatron(function: Callable[..., Any], *args: Any) -> Any:
    # Megatron's router asks whether Transformer Engine has a product for it, by a name that is not
    # there where the library is not.
    with (
        cpu_for_cuda(),
        mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
    ):
        try:
            return function(*args)
        finally:
            parallel_state.destroy_model_parallel()


def fresh(ensemble: dict[str, Any] | None, **settings: Any) -> Loop:
    parallel_state.destroy_model_parallel()
    return Loop(ensemble, **settings)


# -- the plain run ---------------------------------------------------------------------------------


def _still(settings: dict[str, Any]) -> Any:
    plain, ours = fresh(None, **settings).train(), fresh(STILL, **settings).train()
    decays = [
        [group["weight_decay"] for group in of.optimizer.param_groups] for of in (plain, ours)
    ]
    return (
        [torch.equal(plain.weights[step], ours.weights[step]) for step in plain.weights],
        plain.lines == ours.lines,
        decays[0] == decays[1],
    )


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {"bf16": True}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "bf16": True}),
        (4, {"pp": 2, "tied": True}),
    ],
)
def test_spread_0_is_the_plain_run_bit_for_bit(world: int, settings: dict[str, Any]) -> None:
    for weights, lines, decays in on_megatron(_still, world, settings):
        assert weights == [True] * STEPS and lines and decays


def _looked_at(settings: dict[str, Any], ensemble: dict[str, Any] | None, lr: float) -> Any:
    loop = fresh(ensemble, lr=lr, steps=LOOKED, **settings).train()
    return loop.flat(), loop.lines, loop.wrapped and looked_at(loop.wrapped.ensemble)


@pytest.mark.parametrize(("world", "settings"), [
    (1, {"bf16": True}), (2, {"pp": 2}), (2, {}),
])  # fmt: skip
def test_by_default_the_first_steps_are_looked_at_which_costs_nothing_and_leaves_no_trace(
    world: int, settings: dict[str, Any]
) -> None:
    check_looked_at(lambda of, lr: on_megatron(_looked_at, world, settings, of, lr), 1e-2, 1e-6)


# -- replicas --------------------------------------------------------------------------------------


def _spread(settings: dict[str, Any]) -> Any:
    records: list[Any] = []
    ensemble = {
        **SPREAD,
        "controller": Halved(),
        "log": lambda record, step: records.append(record["losses"]),
    }
    loop = fresh(ensemble, optimizer="sgd", **settings).train()
    plain = fresh(None, optimizer="sgd", **settings).train()
    schedule = [line[-1] for line in plain.lines if len(line) == 4]
    rates = [line[-1] for line in loop.lines if len(line) == 4]
    losses = [line[1] for line in loop.lines if len(line) == 4]
    evaluated = next(line[1] for line in loop.lines if len(line) == 2)
    group = loop.optimizer.param_groups[0]
    model = [p for p in loop.model[0].parameters() if hasattr(p, "main_param")]
    copies = all(torch.equal(p, p.main_param.bfloat16().view_as(p)) for p in model) and bool(
        model
    ) == bool(settings.get("bf16"))
    return SimpleNamespace(
        weights=loop.weights,
        last=loop.flat(),
        schedule=schedule,
        rates=rates,
        losses=losses,
        evaluated=evaluated,
        had=loop.rates,
        max_lr=group["max_lr"],
        metrics=loop.wrapped.metrics(),
        copies=copies,
        records=records,
        embedding=_embedding(loop) if settings.get("tied") else None,
    )


def _embedding(loop: Loop) -> torch.Tensor:
    chunk = loop.model[0].module
    return (
        (chunk.module if hasattr(chunk, "module") else chunk)
        .shared_embedding_or_output_weight()
        .detach()
        .clone()
    )


@pytest.mark.parametrize(
    ("world", "settings", "peers"),
    [
        (2, {"bf16": True}, [(0, 1)]),
        (4, {"tp": 2}, [(0, 2), (1, 3)]),
        (4, {"pp": 2, "tied": True}, [(0, 1), (2, 3)]),
    ],
)
def test_replicas_differ_within_a_cycle_and_are_equal_where_others_look(
    world: int, settings: dict[str, Any], peers: list[tuple[int, int]]
) -> None:
    found = on_megatron(_spread, world, settings)
    for first, second in peers:
        one, two = found[first], found[second]
        apart = [
            step
            for step in range(1, STEPS + 1)
            if not torch.equal(one.weights[step], two.weights[step])
        ]
        assert apart == [
            1,
            2,
            3,
            4,
            6,
            7,
            8,
            9,
            11,
        ]  # 7 before it is converged for the evaluation; 12 ends the run
        assert torch.equal(one.last, two.last) and sorted(
            of.metrics["hdet/multipliers/lr"] for of in (one, two)
        ) == pytest.approx([0.7, 1.3])
    for of in found:
        assert of.rates == pytest.approx(
            [rate * (0.5 if step >= EVERY else 1) for step, rate in enumerate(of.schedule)],
            rel=1e-9,
        )
        assert of.max_lr == 1e-2 and of.metrics["hdet/corrections/lr"] == 0.5 and of.copies
        # A step has had the base rate that is logged for it, times the multiplier: the same one
        # within a cycle.
        multipliers = [had / rate for had, rate in zip(of.had, of.rates, strict=True)]
        for cycle in (multipliers[:5], multipliers[5:10], multipliers[10:]):
            assert min(abs(cycle[0] - 0.7), abs(cycle[0] - 1.3)) < 0.05 and cycle == pytest.approx(
                [cycle[0]] * len(cycle), rel=0.05
            )
    # The last stage's loss: of each replica the mean over a cycle, in the record that the first
    # rank is told.
    last = [of for of in found if of.losses[0]]
    means = [sum(map(sum, of.losses[:EVERY])) / (PARTS * EVERY) for of in last]
    assert sorted(set(found[0].records[0])) == pytest.approx(sorted(set(means)), rel=1e-5)
    if settings.get("tied"):
        assert equal([of.embedding for of in found])


# -- checkpoints -----------------------------------------------------------------------------------


def _resumed(settings: dict[str, Any], at: int) -> Any:
    ensemble = {**SPREAD, "controller": lambda model: Halved()}
    whole = fresh(ensemble, **settings).train(save_at=at)
    resumed = fresh(ensemble, **settings).load(whole.saved).train(start=at, save_at=at)
    return (
        whole.flat(),
        resumed.flat(),
        whole.lines[-len(resumed.lines) :],
        resumed.lines,
        whole.wrapped.state_dict(),
        resumed.wrapped.state_dict(),
    )


@pytest.mark.parametrize(("world", "settings"), [(1, {}), (2, {"bf16": True})])
@pytest.mark.parametrize("at", [EVERY, EVERY + 3])
def test_it_resumes_bit_for_bit_at_a_cycles_end_and_in_its_middle(
    world: int, settings: dict[str, Any], at: int
) -> None:
    for whole, resumed, lines, again, state, same in on_megatron(_resumed, world, settings, at):
        assert (
            torch.equal(whole, resumed)
            and lines == again
            and state == same
            and len(again) >= STEPS - at
        )


def _both_ways() -> Any:
    plain, still = fresh(None).train(save_at=4), fresh(STILL).train(save_at=8)
    ours = fresh(STILL).load(plain.saved).train(start=4)
    back = fresh(None).load(still.saved).train(start=8)
    return [of.flat() for of in (plain, still, ours, back)]


def test_checkpoints_of_the_scheduler_alone_go_on_here_and_ours_there() -> None:
    [found] = on_megatron(_both_ways, 1)
    assert equal(found)


# -- losses anew, AutoLR ---------------------------------------------------------------------------


def _closed(settings: dict[str, Any]) -> Any:
    """The closure after the last step, of rate 0, and what the step itself has had."""
    loop = fresh(STILL, lr=0.0, steps=3, **settings)
    kept: list[Any] = []
    inner = loop.wrapped.ensemble.step
    loop.wrapped.ensemble.step = lambda closure: (kept.append(closure), inner(closure=closure))
    loop.step(0)
    own = loop.gradients()
    loss = kept[0]()
    again = loop.gradients()
    with torch.no_grad():
        scored = kept[0]()
    for p in loop.parameters():
        p.grad.zero_()
    loop.wrapped._restore_run()
    buffers = torch.cat([p.main_grad.flatten() for p in loop.model[0].parameters()])
    return (
        [float(part["lm loss"]) for part in loop.had],
        loss,
        scored,
        own,
        again,
        float(buffers.norm()),
    )


@pytest.mark.parametrize(("world", "settings"), [(1, {}), (2, {"bf16": True}), (2, {"pp": 2})])
def test_losses_and_gradients_are_computed_anew_as_megatron_has_made_them(
    world: int, settings: dict[str, Any]
) -> None:
    for losses, loss, scored, own, again, norm in on_megatron(_closed, world, settings):
        assert torch.equal(own, again) and 0 < float(own.norm()) <= 0.5 + 1e-6 and norm > 0
        if losses:
            assert torch.equal(loss, scored) and float(loss) == pytest.approx(
                sum(losses) / PARTS, rel=1e-6
            )
        else:  # a stage that is not the last one
            assert loss is None and scored is None


def _auto(settings: dict[str, Any], controller: Any) -> Any:
    with listening("megatron.hdet") as lines:
        loop = fresh(
            None if controller is None else {**STILL, "controller": controller},
            steps=TRIED,
            **settings,
        ).train(until=FIRST)
    return (
        loop.flat(),
        1.0 if controller is None else loop.wrapped.ensemble.corrections["lr"],
        lines,
        loop.lines,
    )


@pytest.mark.parametrize(("world", "settings"), [(2, {"pp": 2})])
def test_auto_lr_raises_a_rate_that_is_far_too_low_and_says_so(
    world: int, settings: dict[str, Any]
) -> None:
    found = on_megatron(_auto, world, {"lr": 1e-6, **settings}, trial)
    assert (
        all(correction >= 8 for _, correction, *_ in found)
        and len({correction for _, correction, *_ in found}) == 1
    )
    lines = found[0][2]
    assert lines[0].startswith("hdet, auto: a trial in the first 56 steps") and any(
        "learning rate 1e-06 -> " in line for line in lines
    )


def test_trials_leave_no_trace_in_the_run_nor_in_the_models_copies_of_its_masters() -> None:
    plain = on_megatron(_auto, 1, {"bf16": True}, None)
    ours = on_megatron(_auto, 1, {"bf16": True}, told)
    for (a, _, _, lines), (b, correction, _, same) in zip(plain, ours, strict=True):
        assert torch.equal(a, b) and lines == same and correction == 1
    assert any("good rates for" in line for line in ours[0][2])


def _example(steps: int) -> str:
    import megatron_gpt  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(io.StringIO()) as out:
        megatron_gpt.main(steps)
    return out.getvalue()


def test_the_example_runs() -> None:
    assert correction_in(on_megatron(_example, 1, 60)[0]) >= 1


# -- chains, refusals ------------------------------------------------------------------------------

EXPERTS = {
    "num_moe_experts": 2,
    "expert_model_parallel_size": 2,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "add_bias_linear": False,
    "sequence_parallel": False,
}


def _experts(controller: Any) -> Any:
    loop = fresh({**SPREAD, "controller": controller}, **EXPERTS)
    kinds = [type(loop.optimizer).__name__, len(loop.optimizer.chained_optimizers)]
    loop.train()
    return (
        loop.weights,
        loop.flat(),
        kinds,
        loop.wrapped.metrics(),
        loop.wrapped.state_dict()["num_steps"],
    )


def test_a_chain_has_an_ensemble_for_each_optimizer() -> None:
    """Experts are trained by one of their own; a replica has all of them."""
    found = on_megatron(_experts, 4, halved)
    for first, second in ((0, 2), (1, 3)):
        (weights, last, kinds, metrics, steps), (others, also, *_) = found[first], found[second]
        assert [step for step in weights if torch.equal(weights[step], others[step])] == [
            5,
            10,
            12,
        ] and torch.equal(last, also)
        assert kinds == ["ChainedOptimizer", 2] and steps == STEPS
        assert (
            metrics["optimizer 0/hdet/corrections/lr"]
            == metrics["optimizer 1/hdet/corrections/lr"]
            == 0.5
        )
    with pytest.raises(
        RankError,
        match=(
            "AutoLR trains copies of a run with one optimizer, and there are 2: train all "
            "parameters with one"
        ),
    ):
        on_megatron(_experts, 4, trial)
    with pytest.raises(
        RankError, match="several optimizers, each with a controller of its own: pass a function"
    ):
        on_megatron(_experts, 4, Halved())


def _refused() -> None:
    loop = fresh(None)
    args = (loop.optimizer, loop.scheduler, loop.model)
    with pytest.raises(TypeError, match="no setting 'controler' here"):
        wrap(*args, controler=None)
    with pytest.raises(TypeError, match="must be what get_megatron_optimizer gives, got AdamW"):
        wrap(loop.optimizer.chained_optimizers[0].optimizer, *args[1:])
    with pytest.raises(ValueError, match="no parameters to train"):
        wrap(ChainedOptimizer([]), *args[1:])
    for group in loop.optimizer.param_groups:
        group["min_lr"] = None  # as of an OptimizerConfig without it
    with pytest.raises(
        ValueError,
        match=(
            r"groups have no min_lr, .*first step after the warm-up. Set min_lr in the "
            r"OptimizerConfig"
        ),
    ):
        wrap(*args)
    for group in loop.optimizer.param_groups:
        group["min_lr"] = 0.0
    member = loop.optimizer.chained_optimizers[0]
    for name, message in (
        ("use_distributed_optimizer", "no replicas: set use_distributed_optimizer=False"),
        ("fp16", "no loss scale looks after: use bf16"),
    ):
        setattr(member.config, name, True)
        with pytest.raises(ValueError, match=message):
            wrap(*args, controller=trial, total_steps=9)
        setattr(member.config, name, False)
    member.__class__ = type(
        "LayerWiseOptimizer",
        (type(member).__mro__[1],),
        {name: None for name in type(member).__abstractmethods__}
        | {
            name: getattr(type(member), name)
            for name in type(member).__mro__[1].__abstractmethods__
        },
    )
    with pytest.raises(
        ValueError, match="is a LayerWiseOptimizer, which hdet does not know: use 'adam' or 'sgd'"
    ):
        wrap(*args)
    ours = fresh(STILL)
    with pytest.raises(ValueError, match="the state is of 2 optimizers, and there are 1"):
        ours.wrapped.load_state_dict({**ours.scheduler.state_dict(), "hdet": [{}, {}]})


def test_what_cannot_work_is_refused_by_name() -> None:
    on_megatron(_refused, 1)


def _constant() -> Any:
    plain, ours = (fresh(ensemble, constant=True).train() for ensemble in (None, STILL))
    groups = [group["min_lr"] for group in ours.optimizer.param_groups]
    return torch.equal(plain.flat(), ours.flat()), plain.lines == ours.lines, groups


def test_a_constant_rate_needs_no_min_lr() -> None:
    assert on_megatron(_constant, 1) == [(True, True, [None, None])]


def test_losses_are_taken_as_megatron_reports_them() -> None:
    numbers_of = hdet.integrations.megatron._weigh
    found = numbers_of(
        [
            {"lm loss": torch.tensor([6.0, 3.0])},
            {"lm loss": torch.tensor(4.0), "aux": torch.tensor(9.0)},
            5.0,
        ]
    )
    assert [(float(loss), float(weight)) for loss, weight in found] == [
        (2, 3),
        (4, 1),
        (5, 1),
    ] and numbers_of([]) == []
