"""Llama 3: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Sizes of one model; `hidden` is the inner width of the MLP."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False  # whether embedding and head share their weight

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


SIZES = {
    "debug": Config(512, 64, 2, 8, 4, 192),
    "1b": Config(128_256, 2048, 16, 32, 8, 8192, tied=True),
    "3b": Config(128_256, 3072, 28, 24, 8, 8192, tied=True),
    "8b": Config(128_256, 4096, 32, 32, 8, 14_336),
    "70b": Config(128_256, 8192, 80, 64, 8, 28_672),
    "405b": Config(128_256, 16_384, 126, 128, 8, 53_248),
}


class RMSNorm(nn.Module):
    """Scale to unit root mean square, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


def rotary_table(seq: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angle of each position and each pair of features."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), theta**-pairs)
    return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((angles.sin(), angles.sin()), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (feature i, feature i + half) of x by its position's angle."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal attention; `wk` and `wv` have fewer heads, each serving several of `wq`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            w(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config.width, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.to(x), sin.to(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: str | Config = "debug") -> Llama:
    """A model with random weights, by the name of its size or by its own sizes."""
    return Llama(SIZES[size] if isinstance(size, str) else size)


def example_inputs(model: Llama, batch: int, seq: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Inputs of the model and targets of the loss, at random."""
    tokens = torch.randint(model.config.vocab, (batch, seq))
    targets = torch.randint(model.config.vocab, (batch, seq))
    return (tokens,), (targets,)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def default_seq(model: Llama) -> int:
    """Length of the sequences to plan with, if nobody says otherwise."""
    return 64 if model.config.vocab < 1000 else 8192
