"""AutoLR inside transformers' Trainer.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

A tiny Llama learns sequences in which every token stands twice. It begins at a thirtieth of a good
rate, with accumulation, clipping and evaluations.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import hdet

VOCABULARY, LENGTH = 32, 16


def texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(
        1, VOCABULARY, (count, LENGTH // 2), generator=torch.Generator().manual_seed(seed)
    ).repeat_interleave(2, 1)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main(steps: int = 250) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=steps // 3,
        logging_steps=steps // 6,
        log_level="info",  # shows what AutoLR is going to do, and what it has measured
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = hdet.integrations.transformers.HdetTrainer(
        model,
        args,
        train_dataset=texts(4000, 0),
        eval_dataset=texts(64, 1),
        # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
        ensemble={"search": hdet.AutoLR},
    )
    trainer.train()
    print(
        f"correction of the rate: {trainer.ensemble.corrections['lr']:.3g}; held-out loss "
        f"{trainer.evaluate()['eval_loss']:.3f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
