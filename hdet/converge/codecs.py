"""Numbers on the wire in fewer bits: rows of a matrix to rows of bytes and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["BFloat16", "Codec", "Int8"]


class Codec(Protocol):
    """Rounds each row on its own, so that rows can be sent to different ranks."""

    @property
    def granule(self) -> int:
        """Rows have a multiple of so many elements."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """(k, n) float32 or float64 -> (k, bytes) uint8. ``rows`` stay."""

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The inverse, but for what rounding took; writes and returns ``out``, (k, n). Elementwise, so the same bits on every rank."""


@dataclass(frozen=True)
class BFloat16:
    """Rounded to nearest."""

    granule: int = 8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(coded.view(torch.bfloat16))


@dataclass(frozen=True)
class Int8:
    """x = scale * q with whole q in -127 .. 127, and scale = max |x| / 127 of each block, in fp32 behind the row's q."""

    granule: int

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count, size = rows.shape
        coded = torch.empty(count, size + 4 * (size // self.granule), dtype=torch.uint8, device=rows.device)
        levels, scales = self._split(coded)
        blocks = rows.view(count, -1, self.granule)
        scales.copy_(blocks.abs().amax(-1) / 127.0)
        # A block of zeros, or one so small that its scale is 0, is sent as zeros; what it had is kept back.
        steps = scales.to(rows.dtype).masked_fill(scales == 0, torch.inf).unsqueeze(-1)
        levels.copy_((blocks / steps).round_().clamp_(-127, 127).view(count, size))
        return coded

    def decode(self, coded: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        levels, scales = self._split(coded)
        blocks = out.view(len(out), -1, self.granule)
        blocks.copy_(levels.unflatten(1, (-1, self.granule))).mul_(scales.unsqueeze(-1))
        return out

    def _split(self, coded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = coded.shape[1] // (self.granule + 4) * self.granule
        return coded[:, :size].view(torch.int8), coded[:, size:].view(torch.float32)
