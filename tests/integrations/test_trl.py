"""trl's SFTTrainer with a LoRA of peft, by the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hdet

from .frameworks import closures, equal, example, needs, on_ranks, weights

needs("transformers", "peft", "trl")

SETTINGS = {
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 4,
    "max_grad_norm": 0.05,
}


def _spread() -> Any:
    settings = {"knobs": [hdet.LearningRate(0.3)], "sync": hdet.Sync(5)}
    with closures() as kept:
        trainer = example("trl_lora").main(7, settings, **SETTINGS)
    saved = Path(trainer.args.output_dir, "checkpoint-4", "adapter_model.safetensors")
    adapters = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    counted = repr(trainer._metrics), trainer._total_train_tokens
    loss = kept[-1]()
    assert counted == (repr(trainer._metrics), trainer._total_train_tokens) and loss > 0
    averaged = len(trainer.ensemble.parameters)
    return weights(trainer.model), saved.exists(), adapters, averaged


def test_adapters_alone_are_averaged_and_losses_anew_are_not_counted() -> None:
    found = on_ranks(_spread, 2)
    assert equal([of[0] for of in found]) and any(saved for _, saved, *_ in found)
    for _, _, adapters, averaged in found:
        assert len(adapters) == averaged == 14 and all("lora" in name for name in adapters)
