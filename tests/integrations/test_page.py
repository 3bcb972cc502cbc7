"""docs/frameworks.md: its blocks run as written, with toys for what is the reader's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ..docs_toys import run
from ..test_docs import PAGES, Block, blocks
from .frameworks import Text, accelerate_reset, example, llama, needs

needs("transformers", "accelerate", "lightning", "trl", "tensorboard")

PAGE = next(page for page in PAGES if page.name == "frameworks.md")
BLOCKS = blocks(PAGE)


def _trainer(folder: str) -> dict[str, Any]:
    from transformers import TrainingArguments

    args = TrainingArguments(folder, max_steps=3, use_cpu=True, report_to="none", save_strategy="no")
    return {"model": llama(), "args": args, "train_dataset": Text(), "eval_dataset": Text(8)}


def _trl(folder: str) -> dict[str, Any]:
    from trl import SFTConfig

    lora = example("trl_lora")
    args = SFTConfig(folder, max_steps=3, use_cpu=True, bf16=False, report_to="none", save_strategy="no", max_length=12)
    return {"model": llama(), "args": args, "train_dataset": lora.sentences(40), "tokenizer": lora.tokenizer()}


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
            super().__init__(**{**settings, **quiet, "max_steps": 3, "accelerator": "cpu", "default_root_dir": folder})

    loader = torch.utils.data.DataLoader([(torch.randn(4), torch.randn(1)) for _ in range(40)], batch_size=4)  # type: ignore[arg-type]
    return {"module": Net(), "short": Short, "loader": loader}


TOYS: list[Callable[[str], dict[str, Any]]] = [_trainer, _trl, _accelerate, _lightning, lambda folder: {}]


def test_the_page_shows_the_examples() -> None:
    shown = re.findall(r'^--8<-- "examples/(\w+)\.py"$', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == ["hf_trainer", "trl_lora", "accelerate_loop", "lightning_module"]


@pytest.mark.parametrize(("block", "toys"), list(zip(BLOCKS, TOYS, strict=True)), ids=[str(block) for block in BLOCKS])
def test_the_block_runs_as_written(block: Block, toys: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = toys(str(tmp_path))
    if "short" in names:  # what the block asks for would take long
        monkeypatch.setattr("lightning.pytorch.Trainer", names.pop("short"))
    with accelerate_reset():
        run(block.source, str(block), **names)
