"""What torchtitan lacks on a machine without a GPU, whose device, memory and kernels it takes for
granted. Imported before it."""

import importlib
from unittest import mock

import torch

WITHOUT_GPU = not torch.accelerator.is_available()
found = torch._utils._get_available_device_type
with mock.patch(
    "torch._utils._get_available_device_type", lambda: found() or "cpu"
):  # else torchtitan says CUDA
    importlib.import_module("torchtitan.tools.utils")
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama

if WITHOUT_GPU:
    memory = {
        "device_name": "",
        "get_peak_stats": lambda self: metrics.DeviceMemStats(*[0.0] * 6),
        "reset_peak_stats": lambda self: None,
    }
    metrics.build_device_memory_monitor = type("NoMemory", (), memory)
    metrics.utils.get_peak_flops = lambda name: 1e12
    utils.set_pg_timeouts = lambda **others: None  # its barrier names a GPU


def parallelize(model, **settings):
    """gloo has no PREMUL_SUM."""
    model = parallelize_llama(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def without_flex(blocks):
    """FlexAttention, which torchtitan has by default, is compiled for a GPU."""
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    return blocks
