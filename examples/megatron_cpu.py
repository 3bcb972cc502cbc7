"""Lets Megatron-Core run on a machine without a GPU: whatever it makes on "cuda" is made on the
CPU. With a GPU it does nothing."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode


class CpuForCuda(TorchFunctionMode):
    """Megatron asks for device="cuda" by name, and tells 16-bit parameters by types such as
    'torch.cuda.BFloat16Tensor'."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = args[0] if function is torch.Tensor.cuda else function(*args, **kwargs)
        return (
            found.replace("torch.", "torch.cuda.")
            if function is torch.Tensor.type and isinstance(found, str)
            else found
        )


@contextmanager
def cpu_for_cuda():
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        mock.patch("torch.cuda.current_device", lambda: "cpu"),
        mock.patch(
            "torch.cuda.synchronize", lambda *device: None
        ),  # a pipeline's stages wait for what they send
        mock.patch.object(
            CudaRNGStatesTracker, "fork", lambda self, name=None: nullcontext()
        ),  # no dropout here, so no random states
        torch._dynamo.config.patch(
            disable=True
        ),  # it compiles small functions, which takes longer than they run here
        CpuForCuda(),
    ):
        yield
