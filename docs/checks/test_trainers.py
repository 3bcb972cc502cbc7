"""The pages on trainers: their blocks run as written, with toys for what is the reader's, and the
examples that they show find a rate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from tests.integrations.frameworks import (
    Text,
    accelerate_reset,
    correction_in,
    example,
    launched,
    llama,
    needs,
)
from torch import nn

from .test_pages import PAGES, Block, blocks
from .toys import run

needs(
    "transformers", "accelerate", "lightning", "trl", "tensorboard", "torchtitan", "megatron.core"
)

NAMES = ("huggingface", "lightning", "torchtitan-megatron", "frameworks")
TRAINERS = [next(page for page in PAGES if page.stem == name) for name in NAMES]
BLOCKS = [block for page in TRAINERS for block in blocks(page)]


QUIET = {"max_steps": 3, "use_cpu": True, "report_to": "none", "save_strategy": "no"}


def _trainer(folder: str) -> dict[str, Any]:
    from transformers import TrainingArguments

    args = TrainingArguments(folder, **QUIET)
    return {"model": llama(), "args": args, "train_dataset": Text(), "eval_dataset": Text(8)}


def _trl(folder: str) -> dict[str, Any]:
    from trl import SFTConfig

    lora, args = example("trl_lora"), SFTConfig(folder, bf16=False, max_length=12, **QUIET)
    toys = {"train_dataset": lora.sentences(40), "tokenizer": lora.tokenizer()}
    return {"model": llama(), "args": args, **toys}


def _accelerate(folder: str) -> dict[str, Any]:
    import accelerate

    return {"accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)}


def _lightning(folder: str) -> dict[str, Any]:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    class Short(pl.Trainer):
        def __init__(self, **settings: Any) -> None:
            quiet = dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "logger"], False)
            short = {"max_steps": 3, "accelerator": "cpu", "default_root_dir": folder}
            super().__init__(**{**settings, **quiet, **short})

    data: Any = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return {"module": Net(), "short": Short, "loader": loader}


def _torchtitan(folder: str) -> dict[str, Any]:
    example("torchtitan_cpu")  # before torchtitan, which takes a GPU for granted
    return {}


def _megatron(folder: str) -> dict[str, Any]:
    """Of one rank, in the middle of a script."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tiny = example("megatron_tiny")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model = [tiny.gpt()]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0, clip_grad=1.0), model
    )
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=20_000,
        lr_decay_style="cosine", start_wd=0.0, end_wd=0.0, wd_incr_steps=1,
        wd_incr_style="constant",
    )  # fmt: skip
    sizes = {"num_microbatches": 2, "seq_length": tiny.LENGTH, "micro_batch_size": tiny.BATCH}
    forward_backward = partial(
        get_forward_backward_func(), forward_step_func=tiny.forward_step, **sizes
    )
    batches = [[tiny.batch(2 * step), tiny.batch(2 * step + 1)] for step in range(3)]
    made = {"optimizer": optimizer, "model": model, "scheduler": scheduler, "increment": 1}
    return {**made, "loader": batches, "forward_backward": forward_backward}


TOYS: list[Callable[[str], dict[str, Any]]] = [
    _trainer, _trl, _accelerate, _lightning, _torchtitan, _megatron, lambda folder: {},
]  # fmt: skip


class Cosine:
    """The part of timm's CosineLRScheduler that the example uses, in updates: timm asks for
    torchvision, whose wheels fit one build of torch."""

    def __init__(
        self, optimizer: Any, t_initial: int, warmup_t: int, warmup_lr_init: float, **others: Any
    ) -> None:
        self.groups, self.length = optimizer.param_groups, t_initial
        self.warmup, self.low = warmup_t, warmup_lr_init
        for group in self.groups:  # as timm's base class does
            group.setdefault("initial_lr", group["lr"])
        self.peaks = [group["lr"] for group in self.groups]
        self.step_update(0)

    def step(self, epoch: int, metric: Any = None) -> None:
        pass

    def step_update(self, num_updates: int, metric: Any = None) -> None:
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * (1 + math.cos(math.pi * num_updates / self.length)) / 2
            if num_updates < self.warmup:
                group["lr"] = self.low + num_updates * (peak - self.low) / self.warmup

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def printed(name: str, *args: Any) -> float:
    """The correction that an example finds."""
    with redirect_stdout(StringIO()) as out:
        example(name).main(*args)
    return correction_in(out.getvalue())


def titan() -> float:
    trainer = example("torchtitan_llama").tiny_hdet(60, 1).build()
    trainer.train()
    return trainer.ensemble.corrections["lr"]


def of_megatron() -> float:
    from tests.integrations.test_megatron import on_megatron

    return on_megatron(printed, 1, "megatron_gpt", 60)[0]


EXAMPLES: dict[str, tuple[Callable[[], float], float]] = {
    "hf_trainer": (lambda: printed("hf_trainer", 60), 1),
    "trl_lora": (lambda: example("trl_lora").main(100).ensemble.corrections["lr"], 2),
    "accelerate_loop": (lambda: printed("accelerate_loop", 200), 2),
    "lightning_module": (lambda: printed("lightning_module", 100), 2),
    "timm_scheduler": (lambda: printed("timm_scheduler", Cosine), 2),
    "torchtitan_llama": (lambda: launched(titan, 1)[0], 1),
    "megatron_gpt": (of_megatron, 1),
}


def test_the_pages_show_the_examples() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in TRAINERS)
    assert re.findall(r'^--8<-- "examples/(\w+)\.py"$', text, re.MULTILINE) == [*EXAMPLES]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_finds_a_rate(name: str) -> None:
    find, least = EXAMPLES[name]
    with accelerate_reset():
        assert find() >= least


@pytest.mark.parametrize(
    ("block", "toys"), list(zip(BLOCKS, TOYS, strict=True)), ids=[str(block) for block in BLOCKS]
)
def test_the_block_runs_as_written(
    block: Block, toys: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if toys is _megatron:
            stack.enter_context(example("megatron_cpu").cpu_for_cuda())
            stack.callback(_no_group)
        _run(block, toys(str(tmp_path)), monkeypatch)


def _no_group() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _run(block: Block, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "short" in names:  # what the block asks for would take long
        monkeypatch.setattr("lightning.pytorch.Trainer", names.pop("short"))
    with accelerate_reset():
        run(block.source, str(block), **names)
