"""Language models on bytes of English: llama-style, a mixture of experts, and a recurrent one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..problems.problem import Problem, drawn, mean_loss
from ..problems.transformer import losses as window_losses
from .groups import decaying_matrices
from .text import CONTEXT, WINDOWS, held_out, windows

BYTES = 256


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*shape, bias=False) for shape in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each position goes through the best of ``count`` experts, weighted by its gate: an expert that nobody chooses has no gradient."""

    def __init__(self, width: int, hidden: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(flat[rows]))
        return out.view_as(x)


class Layer(nn.Module):
    """Pre-norm attention without biases, and what follows it."""

    def __init__(self, width: int, heads: int, after: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.after = RMSNorm(width), RMSNorm(width), after
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width))
        return x + self.after(self.norm2(x))


class Llama(nn.Module):
    """tokens (batch, time) -> logits (batch, time, 256); tied embeddings, learned positions, everything drawn with std 0.02."""

    def __init__(self, layers: int, width: int, heads: int, *, experts: bool = False) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, Experts(width, hidden // 2) if experts else SwiGLU(width, hidden)) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Recurrent(nn.Module):
    """A GRU over bytes, with torch's own initialisation."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.tokens, self.cells, self.out = nn.Embedding(BYTES, width), nn.GRU(width, width, batch_first=True), nn.Linear(width, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cells(self.tokens(tokens))[0])


def language(name: str, build: object, context: int = CONTEXT, decay: float = 0.01) -> Problem:
    return Problem(
        name=name,
        steps=1500,
        batch_size=WINDOWS,
        build=build,  # type: ignore[arg-type]
        groups=lambda model: decaying_matrices(model, decay),
        batch=lambda seed, step: windows(seed, step, context),
        spare=lambda seed, step, number: windows(seed, 10_000_000 + number, context),
        losses=window_losses,
        validate=lambda model: mean_loss(model, window_losses, held_out(context)),
    )


LLAMA = language("llama", drawn(lambda: Llama(3, 96, 4)))
EXPERTS = language("experts", drawn(lambda: Llama(2, 48, 4, experts=True)), decay=0.1)
RECURRENT = language("recurrent", drawn(Recurrent), context=32, decay=0.0)
