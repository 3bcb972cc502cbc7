"""trl's SFTTrainer with a LoRA of peft, by the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hdet

from .frameworks import equal, example, needs, on_ranks, weights

needs("transformers", "peft", "trl")
import trl

SETTINGS = {
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 4,
    "max_grad_norm": 0.05,
}


def _plain(ensemble: dict[str, Any] | None) -> Any:
    module = example("trl_lora")
    if ensemble is None:
        module.Trainer = lambda ensemble, **settings: trl.SFTTrainer(**settings)
    trainer = module.main(8, ensemble or {}, **SETTINGS)
    lines = [
        {key: line[key] for key in ("loss", "learning_rate", "mean_token_accuracy", "num_tokens")}
        for line in trainer.state.log_history[:8]
    ]
    return weights(trainer.model), lines


def test_spread_0_is_the_plain_run_bit_for_bit() -> None:
    for world in (1, 2):
        plain, ours = (
            on_ranks(_plain, world, None),
            on_ranks(_plain, world, {"knobs": [hdet.LearningRate(0)]}),
        )
        assert all(
            torch.equal(a, b) and lines_a == lines_b
            for (a, lines_a), (b, lines_b) in zip(plain, ours, strict=True)
        )


def _spread() -> Any:
    trainer = example("trl_lora").main(
        7, {"knobs": [hdet.LearningRate(0.3)], "sync": hdet.Sync(5)}, **SETTINGS
    )
    saved = Path(trainer.args.output_dir, "checkpoint-4", "adapter_model.safetensors")
    adapters = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    driver = trainer._hdet
    counted = repr(trainer._metrics), trainer._total_train_tokens
    loss = driver.compute_again(driver._parts)
    same = counted == (repr(trainer._metrics), trainer._total_train_tokens)
    return (
        weights(trainer.model),
        adapters,
        saved.exists(),
        len(trainer.ensemble.parameters),
        float(loss),
        same,
    )


def test_adapters_alone_are_averaged_and_losses_anew_are_not_counted() -> None:
    found = on_ranks(_spread, 2)
    assert equal([of[0] for of in found]) and any(saved for _, _, saved, *_ in found)
    for _, adapters, _, averaged, loss, same in found:
        assert len(adapters) == averaged == 14 and all("lora" in name for name in adapters)
        assert loss > 0 and same


def test_the_example_raises_its_rate() -> None:
    assert example("trl_lora").main(100).ensemble.corrections["lr"] >= 2
