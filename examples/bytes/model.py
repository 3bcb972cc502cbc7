"""A byte-level GPT for two CPU cores: pre-norm, learned positions, tied output matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over all positions in nats per byte, a 0-d float32.

    Args:
        logits: (batch, time, vocabulary).
        targets: (batch, time), int64.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class GPTConfig:
    """Shapes of the model, in elements; ``context`` in bytes of text."""

    vocabulary: int = 256
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """tokens (batch, time) int64 -> logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As GPT-2: 0.02, and less for what each layer adds to the residual stream.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Matrices decay, vectors do not: the usual two groups, named for logs."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return [
            {"params": matrices, "weight_decay": weight_decay, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "name": "vectors"},
        ]

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
    ) -> bytes:
        """Samples ``length`` bytes after ``prompt``; fewer where the logits are not finite."""
        generator, text = torch.Generator().manual_seed(seed), list(prompt)
        device = self.tokens.weight.device
        for _ in range(length):
            window = torch.tensor([text[-self.config.context :]], device=device)
            probabilities = (self(window)[0, -1].float().cpu() / temperature).softmax(-1)
            if not probabilities.isfinite().all():
                break
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(text[len(prompt) :])
