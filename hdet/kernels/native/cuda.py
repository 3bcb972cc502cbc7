"""The native CUDA backend: a step is two launches, or three with a norm, on torch's current stream,
from tables in device memory.

Nothing here reads device memory. Of what changes between steps, settings come along as a kernel's
argument and stay in their table on the device; addresses of gradients that have moved, and more
settings than an argument holds, are copied from pinned memory without waiting.

Under capture a copy would be replayed with what the host had at the time, so there is none: what a
captured step reads must be on the device already, from a step before it (the warm-up that capturing
needs anyway). `upload` then changes rates between replays, by a copy.

The update is launched early: on compute capability 9.0 and newer its blocks come up while the
derive phase runs, and wait for it there (programmatic dependent launch); so does the derive phase
behind a norm.

A captured graph holds the addresses of tables. A plan may be replaced while its graph lives on (new
parameters, load_state_dict), so the tables of a plan that was captured stay in memory until the
process ends. They take 40 bytes for each chunk of at most 16 384 elements, 0.3 MB for GPT-2 (124M)
and 17 MB for 7 billion parameters, and 8 for each address of a tensor. The tensors they point to
are the caller's to keep, as with any other captured operation.
"""

from __future__ import annotations

from .. import native, tables
from .plans import Memory, NativeBackend


class CudaMemory(tables.DeviceMemory, Memory):
    """The tables of one plan in the memory of a CUDA device."""

    carries = native._C.CARRIED if native.missing is None else 0

    def call(self, operation: str, *arguments: object, norm: bool = False) -> None:
        """Launches kernels on this device and its current stream."""
        self.check_launched((operation, norm))
        with tables._on(self.device):
            getattr(native._C, "cuda_" + operation)(
                *arguments, -1 if self.device.index is None else self.device.index, self.stream()
            )


class CudaBackend(NativeBackend):
    name = "cuda"
    memory = CudaMemory
