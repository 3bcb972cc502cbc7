"""Megatron-Core with hdet in it, on its own parallel_state, schedules, DDP and optimizers; a CPU
stands in for the GPU (examples/megatron_cpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hdet
from hdet.testing.adapters import STEPS, STILL

from .contract import Contract, Trained
from .frameworks import PARTS, closures, equal, example, flat, launched, listening, needs, trial

needs("megatron.core")
for file in ("megatron_cpu", "megatron_tiny"):
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
    """A training loop as Megatron's: accumulation, clipping, its schedules, an evaluation."""

    def __init__(
        self,
        ensemble: dict[str, Any] | None,
        *,
        tp: int = 1,
        pp: int = 1,
        lr: float = 1e-2,
        steps: int = STEPS,
        bf16: bool = False,
        tied: bool = False,
        **others: Any,
    ) -> None:
        ep = others.get("expert_model_parallel_size", 1)
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.model, self.done = [megatron_tiny.gpt(bf16, tied, **others)], 0
        low = lr / 10
        made = OptimizerConfig(
            optimizer="adam", lr=lr, min_lr=low, weight_decay=0.01, clip_grad=0.5, bf16=bf16
        )
        self.optimizer = get_megatron_optimizer(made, self.model)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=lr / 4, max_lr=lr, min_lr=low, lr_warmup_steps=2,
            lr_decay_steps=steps, lr_decay_style="cosine", start_wd=0.01, end_wd=0.02,
            wd_incr_steps=steps, wd_incr_style="linear",
        )  # fmt: skip
        self.wrapped: Any = None
        if ensemble is not None:
            settings = {"total_steps": steps, **ensemble}
            self.wrapped = wrap(self.optimizer, self.scheduler, self.model, **settings)
        self.seen = Trained(torch.zeros(0))

    def losses(self, step: int, forward_only: bool = False) -> Any:
        rank = parallel_state.get_data_parallel_rank()
        batches = [
            megatron_tiny.batch(1000 * (PARTS * step + part) + rank) for part in range(PARTS)
        ]
        return get_forward_backward_func()(
            forward_step_func=megatron_tiny.forward_step, data_iterator=iter(batches),
            model=self.model, forward_only=forward_only, num_microbatches=PARTS,
            seq_length=megatron_tiny.LENGTH, micro_batch_size=megatron_tiny.BATCH,
        )  # fmt: skip

    def flat(self, kind: str = "data") -> torch.Tensor:
        """Of what the optimizer steps: masters, where there are any."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        return flat(getattr(p, kind) for p in found)

    def step(self) -> None:
        step, seen, group = self.done, self.seen, self.optimizer.param_groups[0]
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = self.losses(step)
        seen.rates.append(group["lr"])
        successful, norm, _ = self.optimizer.step()
        assert successful and group["max_lr"] == self.scheduler.max_lr
        if self.wrapped is None:
            self.scheduler.step(1)
        else:
            closure = lambda: self.losses(step, forward_only=not torch.is_grad_enabled())
            self.wrapped.step(1, found, closure)
            seen.metrics.append(self.wrapped.metrics())
        self.done += 1
        losses = [float(part["lm loss"]) for part in found]
        seen.losses += losses
        seen.weights[self.done] = self.flat()
        seen.lines.append([losses, norm, group["lr"], group["weight_decay"]])

    def converge(self) -> None:
        if self.wrapped is not None:
            self.wrapped.converge()

    def state(self) -> dict[str, Any]:
        """Of this rank, by the names of Megatron-LM's checkpoints."""
        return {"model": self.model[0], "optimizer": self.optimizer,
                "opt_param_scheduler": self.wrapped or self.scheduler}  # fmt: skip

    def check_copies(self, tied: bool) -> None:
        """A model's weights are those of the masters, and embeddings of a pipeline's first and last
        stage are kept equal."""
        chunk = self.model[0].module
        chunk = getattr(chunk, "module", chunk)
        embedding = [chunk.shared_embedding_or_output_weight().detach()] if tied else []
        for own in embedding:
            found = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(found, own)
            assert equal(found)
        for p in self.model[0].parameters():
            if hasattr(p, "main_param"):
                assert torch.equal(p, p.main_param.bfloat16().view_as(p))


def train(
    folder: str,
    ensemble: Any,
    *,
    until: int = 0,
    save: int = 0,
    resume: int = 0,
    evaluate: int = 0,
    **settings: Any,
) -> Trained:
    parallel_state.destroy_model_parallel()
    file = Path(folder) / f"{torch.distributed.get_rank()}"
    with listening("megatron.hdet") as lines:
        loop = Loop(ensemble, **settings)
        if resume:
            saved = torch.load(f"{file}-{resume}", weights_only=False)
            for name, part in loop.state().items():
                part.load_state_dict(saved[name])
            loop.done = resume
        while loop.done < (until or settings.get("steps", STEPS)):
            loop.step()
            if loop.done == evaluate:
                loop.converge()
                with torch.no_grad():
                    loop.losses(-1, forward_only=True)
                loop.seen.evaluated.append(loop.flat())
            if save and loop.done % save == 0:
                loop.converge()
                state = {name: part.state_dict() for name, part in loop.state().items()}
                torch.save(state, f"{file}-{loop.done}")
                if loop.done == save:
                    loop.seen.saved = loop.flat()
    loop.converge()
    loop.check_copies(settings.get("tied", False))
    loop.seen.last, loop.seen.told = loop.flat(), lines
    return loop.seen.see([] if loop.wrapped is None else loop.wrapped.ensembles)


def again(folder: str, **settings: Any) -> Any:
    parallel_state.destroy_model_parallel()
    loop = Loop(STILL, lr=0.0, steps=3, **settings)
    with closures() as kept:
        loop.step()
    own = loop.flat("grad")
    loss = kept[0]()
    loop.wrapped.clip_gradients()
    gradient = loop.flat("grad")
    with torch.no_grad():
        scored = kept[0]()
    return [x / PARTS for x in loop.seen.losses], own, (loss, scored, gradient)


def on_megatron(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    return launched(_with_megatron, world, function, *args)


def _with_megatron(function: Callable[..., Any], *args: Any) -> Any:
    # Megatron's router asks whether Transformer Engine has a product for it, by a name that is not
    # there where the library is not.
    router = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
    with cpu_for_cuda(), mock.patch(router, None, create=True):
        try:
            return function(*args)
        finally:
            parallel_state.destroy_model_parallel()


EXPERTS = {
    "num_moe_experts": 2, "expert_model_parallel_size": 2, "moe_router_topk": 1,
    "moe_router_pre_softmax": True, "add_bias_linear": False, "sequence_parallel": False,
}  # fmt: skip
"""Experts are trained by an optimizer of their own, in a chain; a replica has all of them."""


class TestContract(Contract):
    train, again, ranks = staticmethod(train), staticmethod(again), staticmethod(on_megatron)
    plain = (
        (1, {}), (2, {"bf16": True}), (4, {"tp": 2, "bf16": True}), (4, {"pp": 2, "tied": True}),
    )  # fmt: skip
    anew = ((1, {}), (2, {"bf16": True}), (2, {"pp": 2}))
    trial_settings = (("bf16", True),)
    layouts = (
        (1, {}, ()), (4, {"tp": 2}, ((0, 2), (1, 3))),
        (4, {"pp": 2, "tied": True}, ((0, 1), (2, 3))),
    )  # fmt: skip
    several = 4, EXPERTS


# -- refusals --------------------------------------------------------------------------------------


def _refused() -> None:
    parallel_state.destroy_model_parallel()
    loop = Loop(None)
    args = (loop.optimizer, loop.scheduler, loop.model)
    with pytest.raises(ValueError, match="no parameters to train"):
        wrap(ChainedOptimizer([]), *args[1:])
    [member] = loop.optimizer.chained_optimizers
    for name, message in (
        ("use_distributed_optimizer", "no replicas: set use_distributed_optimizer=False"),
        ("fp16", "no loss scale looks after: use bf16"),
    ):
        with mock.patch.object(member.config, name, True), pytest.raises(ValueError, match=message):
            wrap(*args, search=trial, total_steps=9)
    other = mock.Mock(is_stub_optimizer=False, config=member.config, optimizer=member.optimizer)
    with pytest.raises(ValueError, match="a Mock of Adam.*, which hdet does not know: use 'adam'"):
        wrap(mock.Mock(chained_optimizers=[other]), *args[1:])
    parallel_state.destroy_model_parallel()
    ours = Loop(STILL)
    with pytest.raises(ValueError, match="the state is of 2 optimizers, and there are 1"):
        ours.wrapped.load_state_dict({**ours.scheduler.state_dict(), "hdet": [{}, {}]})


def test_what_cannot_work_is_refused_by_name() -> None:
    on_megatron(_refused, 1)


def test_losses_are_taken_as_megatron_reports_them() -> None:
    found = hdet.integrations.megatron._weigh(
        [
            {"lm loss": torch.tensor([6.0, 3.0])},
            {"lm loss": torch.tensor(4.0), "aux": torch.tensor(9.0)},
            5.0,
        ]
    )
    assert [(float(loss), float(weight)) for loss, weight in found] == [(2, 3), (4, 1), (5, 1)]
