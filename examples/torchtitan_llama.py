"""AutoLR in torchtitan. One process, or any number of them.

    torchrun --nproc-per-node 2 examples/torchtitan_llama.py

A tiny Llama, from a hundredth of a good rate. Several processes are HSDP of two replicas. Its model
and data are in torchtitan_tiny.py.
"""

import sys
import tempfile

import torch
from torchtitan_tiny import NoTokenizer, Twice, llama  # before torchtitan

# isort: split
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

import hdet


def tiny(steps: int, replicas: int) -> Trainer.Config:
    return Trainer.Config(
        model_spec=llama(),
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Twice.Config(),
        optimizer=default_adamw(lr=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, decay_type="cosine"),
        training=TrainingConfig(
            local_batch_size=4,
            global_batch_size=8 * replicas,
            seq_len=16,
            steps=steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicas, spmd_backend="partial_dtensor"
        ),
        activation_checkpoint=None,
        checkpoint=CheckpointManager.Config(enable=True, interval=steps // 2),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=tempfile.mkdtemp(),
    )


def tiny_hdet(steps: int = 250, replicas: int = 1) -> Trainer.Config:
    # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
    return hdet.integrations.torchtitan.wrap(tiny(steps, replicas), search=hdet.AutoLR)


def main(steps: int = 250) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group()
    trainer = tiny_hdet(steps, 2 - torch.distributed.get_world_size() % 2).build()
    trainer.train()
    print(
        f"{trainer.ensemble.report()}\ncorrection of the rate: "
        f"{trainer.ensemble.corrections['lr']:.3g}"
    )
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
