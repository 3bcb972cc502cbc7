"""AutoLR with Megatron-Core: `torchrun --nproc-per-node 2 examples/megatron_gpt.py`, or with parameters in two stages of a pipeline: `... 250 1 2`.

A tiny GPT, from a hundredth of a good rate; arguments are steps, tensor parallel size, pipeline parallel size.
"""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cpu import cpu_for_cuda

import hdet

LENGTH, BATCH, PARTS = 16, 2, 2


def gpt(tp, pp):
    quiet = dict.fromkeys(["gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"], False)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "pipeline_dtype": torch.float32}
    config = TransformerConfig(**sizes, **layout, **quiet, use_cpu_initialization=True, finalize_model_grads_func=finalize_model_grads)
    stage = {"pre_process": parallel_state.is_pipeline_first_stage(), "post_process": parallel_state.is_pipeline_last_stage()}
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=LENGTH, **stage)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def forward_step(batches, model):
    tokens = next(batches)
    later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    losses = model(tokens[:, :-1], torch.arange(LENGTH).expand(BATCH, -1), later, labels=tokens[:, 1:].contiguous())
    return losses, lambda losses: (losses.float().mean(), {"lm loss": losses.detach().float().mean()})


def main(steps=250, tp=1, pp=1):
    parallel_state.initialize_model_parallel(tp, pp)
    model = [gpt(tp, pp)]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, min_lr=0.0, weight_decay=0.01, clip_grad=1.0), model)
    rates = {"init_lr": 0.0, "max_lr": 1e-4, "min_lr": 0.0, "lr_warmup_steps": 5, "lr_decay_steps": steps, "lr_decay_style": "cosine"}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": steps, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, **rates, **decay)
    # This run is short: trials may take more than the 3 % that they have by default, as with controller=hdet.AutoLR.
    settings = {"total_steps": steps, "controller": lambda model: hdet.AutoLR(model, budget=0.5)}
    scheduler = hdet.integrations.megatron.wrap(optimizer, scheduler, model, **settings)
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    for _ in range(steps):
        batches = [torch.randint(32, (BATCH, LENGTH), generator=generator).repeat_interleave(2, 1)[:, : LENGTH + 1] for _ in range(PARTS)]

        def losses(forward_only=False):
            sizes = {"num_microbatches": PARTS, "seq_length": LENGTH, "micro_batch_size": BATCH}
            return get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter(batches), model=model, forward_only=forward_only, **sizes)

        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        found = losses()
        successful, _, _ = optimizer.step()
        if successful:
            scheduler.step(1, found, closure=lambda: losses(forward_only=not torch.is_grad_enabled()))
    scheduler.converge()
    print(f"{scheduler.ensemble.engine.controller.report()}\ncorrection of the rate: {scheduler.ensemble.corrections['lr']:.3g}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group()
    with cpu_for_cuda():
        main(*map(int, sys.argv[1:]))
    torch.distributed.destroy_process_group()
