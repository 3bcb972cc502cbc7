"""A tiny GPT of Megatron-Core's, tensor and pipeline parallel as parallel_state says, and random
sequences in which every token stands twice."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, BATCH, VOCABULARY = 16, 2, 32


def gpt(bf16=False, tied=False, **others):
    quiet = dict.fromkeys(
        ["gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"], False
    )
    sizes = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    layout = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "finalize_model_grads_func": finalize_model_grads,
    }
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        **sizes,
        **layout,
        **quiet,
        use_cpu_initialization=True,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **others,
    )
    stage = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    torch.manual_seed(0)  # replicas begin equal
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    model = GPTModel(
        config, spec, VOCABULARY, LENGTH, share_embeddings_and_output_weights=tied, **stage
    )
    if bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )


def batch(seed):
    """Of one micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).repeat_interleave(2, 1)[
        :, : LENGTH + 1
    ]


def forward_step(batches, model):
    tokens = next(batches)
    later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    losses = model(
        tokens[:, :-1].contiguous(),
        torch.arange(LENGTH).expand(BATCH, -1),
        later,
        labels=tokens[:, 1:].contiguous(),
    )
    return losses, lambda losses: (
        losses.float().mean(),
        {"lm loss": losses.detach().float().mean()},
    )
