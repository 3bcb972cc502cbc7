"""AutoLR inside trl's SFTTrainer, with a LoRA of peft: `python examples/trl_lora.py`.

A tiny Llama with random weights is fine-tuned on sentences in which every word stands twice. Only
its adapters are trained, copied and averaged.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hdet

WORDS = 29


class Trainer(hdet.integrations.transformers.HdetMixin, SFTTrainer):
    """The same for trl's other trainers."""


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(count: int) -> Dataset:
    rows = torch.randint(
        WORDS, (count, 6), generator=torch.Generator().manual_seed(0)
    ).repeat_interleave(2, 1)
    return Dataset.from_dict({"text": [" ".join(f"w{i}" for i in row) for row in rows.tolist()]})


def main(steps: int = 250, ensemble: dict | None = None, **settings) -> Trainer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3 + WORDS, max_position_embeddings=16, **sizes))
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "log_level": "info",
        "bf16": False,
    }
    run = {
        "max_steps": steps,
        "learning_rate": 1e-4,
        "max_length": 16,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1 + steps // 6,
    }
    trainer = Trainer(
        model=model,
        args=SFTConfig(output_dir=tempfile.mkdtemp(), **{**quiet, **run, **settings}),
        train_dataset=sentences(4000),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        ensemble={"search": hdet.AutoLR} if ensemble is None else ensemble,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    print(f"correction of the rate: {main(*map(int, sys.argv[1:])).ensemble.corrections['lr']:.3g}")
