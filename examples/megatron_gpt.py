"""AutoLR with Megatron-Core.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py
    torchrun --nproc-per-node 2 examples/megatron_gpt.py 250 1 2    (two stages of a pipeline)

A tiny GPT, from a hundredth of a good rate; arguments are steps, tensor and pipeline parallel size.
Its model and data are in megatron_tiny.py.
"""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_cpu import cpu_for_cuda
from megatron_tiny import BATCH, LENGTH, batch, forward_step, gpt

import hdet

PARTS = 2


def main(steps=250, tp=1, pp=1):
    parallel_state.initialize_model_parallel(tp, pp)
    model = [gpt()]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, min_lr=0.0, weight_decay=0.01, clip_grad=1.0),
        model,
    )
    rates = {
        "init_lr": 0.0,
        "max_lr": 1e-4,
        "min_lr": 0.0,
        "lr_warmup_steps": 5,
        "lr_decay_steps": steps,
        "lr_decay_style": "cosine",
    }
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": steps, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, **rates, **decay)
    # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
    settings = {"total_steps": steps, "search": hdet.AutoLR}
    scheduler = hdet.integrations.megatron.wrap(optimizer, scheduler, model, **settings)
    rank = parallel_state.get_data_parallel_rank()
    for step in range(steps):
        batches = [batch(1000 * (PARTS * step + part) + rank) for part in range(PARTS)]

        def losses(forward_only=False, batches=batches):
            sizes = {"num_microbatches": PARTS, "seq_length": LENGTH, "micro_batch_size": BATCH}
            forward_backward = get_forward_backward_func()
            return forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=model,
                forward_only=forward_only,
                **sizes,
            )

        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        found = losses()
        successful, _, _ = optimizer.step()
        if successful:
            scheduler.step(
                1, found, closure=lambda: losses(forward_only=not torch.is_grad_enabled())
            )
    scheduler.converge()
    print(
        f"{scheduler.ensemble.report()}\ncorrection of the rate: "
        f"{scheduler.ensemble.corrections['lr']:.3g}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group()
    with cpu_for_cuda():
        main(*map(int, sys.argv[1:]))
    torch.distributed.destroy_process_group()
