"""GPT-2: learned positions, LayerNorm, GELU, and a head that shares the embedding's weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of one model."""

    width: int
    layers: int
    heads: int
    vocab: int = 50_257
    context: int = 1024


SIZES = {
    "debug": Config(64, 2, 4, vocab=512, context=64),
    "small": Config(768, 12, 12),
    "medium": Config(1024, 24, 16),
    "large": Config(1280, 36, 20),
    "xl": Config(1600, 48, 25),
}


class Attention(nn.Module):
    """Attention with query, key and value from one linear."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            part.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT2(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(
            Block(config.width, config.heads, 4 * config.width) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: str | Config = "debug") -> GPT2:
    """A model with random weights, by the name of its size or by its own sizes."""
    return GPT2(SIZES[size] if isinstance(size, str) else size)


def example_inputs(model: GPT2, batch: int, seq: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Inputs of the model and targets of the loss, at random."""
    if seq > model.config.context:
        raise ValueError(f"gpt2 has {model.config.context} positions, and seq is {seq}")
    tokens = torch.randint(model.config.vocab, (batch, seq))
    targets = torch.randint(model.config.vocab, (batch, seq))
    return (tokens,), (targets,)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def default_seq(model: GPT2) -> int:
    """Length of the sequences to plan with, if nobody says otherwise."""
    return model.config.context
