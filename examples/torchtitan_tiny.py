"""A tiny Llama of torchtitan's, with data and a tokenizer of its own, so that nothing is
downloaded."""

from dataclasses import dataclass

import torch
from torchtitan_cpu import parallelize, without_flex  # before torchtitan

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.protocols.model_spec import ModelSpec

VOCABULARY, WIDTH = 32, 16


def llama(layers=1):
    norm = RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT)
    embedding = Embedding.Config(
        num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
    )
    head = Linear.Config(
        in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
    )
    rope = ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=64, theta=10_000)
    blocks = llama3._build_llama3_layers(
        n_layers=layers, dim=WIDTH, n_heads=2, hidden_dim=32, rope=rope, attn_backend="flex"
    )
    sizes = {"dim": WIDTH, "vocab_size": VOCABULARY, "layers": without_flex(blocks)}
    model = llama3.Llama3Model.Config(tok_embeddings=embedding, norm=norm, lm_head=head, **sizes)
    return ModelSpec("llama3", "tiny", model, parallelize, llama3.pipeline_llm, None, None)


class Twice(BaseDataLoader):
    """Every token stands twice."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **others):
        self.rank, self.ranks, self.shape, self.count = (
            dp_rank,
            dp_world_size,
            (local_batch_size, seq_len // 2 + 1),
            0,
        )

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.count * self.ranks + self.rank)
            tokens = torch.randint(
                1, VOCABULARY, self.shape, generator=generator
            ).repeat_interleave(2, 1)
            self.count += 1
            yield {"input": tokens[:, :-2].clone()}, tokens[:, 1:-1].clone()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    __init__ = encode = decode = get_vocab_size = lambda self, *args, **others: None
