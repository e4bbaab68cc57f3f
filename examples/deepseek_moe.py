"""A mixture of experts in DeepSeek's manner: some experts see every token, the others are chosen.

Each token goes to the `chosen` experts with the highest scores. Experts take a fixed number of
tokens (their capacity), so that every shape is known beforehand; tokens that find their expert full
skip it. The first layers are dense. Attention and norms are those of `llama.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import llama
from .llama import MLP, Attention, RMSNorm, loss_fn, rotary_table

__all__ = ["SIZES", "Config", "DeepSeekMoE", "build", "default_seq", "example_inputs", "loss_fn"]


@dataclass(frozen=True)
class Config:
    """Sizes of one model; `hidden` is the inner width of one expert."""

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    experts: int
    chosen: int
    shared: int
    dense_layers: int = 1
    dense_hidden: int = 0
    capacity_factor: float = 1.0  # room per expert, 1 being that of perfect balance

    @property
    def base(self) -> llama.Config:
        """The sizes that attention needs."""
        return llama.Config(
            self.vocab, self.width, self.layers, self.heads, self.heads, self.dense_hidden,
            rope_theta=10_000.0, norm_eps=1e-6,
        )  # fmt: skip


SIZES = {
    "debug": Config(512, 64, 3, 4, 32, experts=8, chosen=2, shared=1, dense_hidden=128),
    "16b": Config(102_400, 2048, 28, 16, 1408, experts=64, chosen=6, shared=2, dense_hidden=10_944),
}


class Experts(nn.Module):
    """All routed experts of a layer, stacked: (experts, capacity, width) to the same shape."""

    expert_parameters = ("gate", "up", "down")
    """Stacked by expert along dimension 0: this is what expert parallel spreads over ranks."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(
            functional.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down
        )


class Mixture(nn.Module):
    """Shared experts as one MLP, and routed ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.shared = MLP(config.width, config.shared * config.hidden)
        self.experts = Experts(config.experts, config.width, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        weights, chosen = scores.topk(self.config.chosen, -1)  # each (tokens, chosen)
        slots, fits = self.assign(chosen.flatten())
        spread = tokens.repeat_interleave(self.config.chosen, 0)
        # One row more than there are slots takes the tokens that do not fit; it is cut off again.
        rows = self.config.experts * self.capacity(tokens.shape[0])
        sent = tokens.new_zeros(rows + 1, tokens.shape[1]).index_copy(0, slots, spread)
        done = self.experts(sent[:-1].view(self.config.experts, -1, tokens.shape[1]))
        back = done.reshape(rows, -1).index_select(0, slots.clamp(max=rows - 1))
        gates = (weights.flatten() * fits).to(x.dtype).unsqueeze(-1)
        routed = (back * gates).view(*weights.shape, -1).sum(1)
        out: Tensor = self.shared(x) + routed.view_as(x)
        return out

    def capacity(self, tokens: int) -> int:
        """Tokens that one expert takes."""
        balanced = tokens * self.config.chosen / self.config.experts
        return max(1, min(tokens, math.ceil(balanced * self.config.capacity_factor)))

    def assign(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """For each (token, choice) its row among the experts' rows, and whether it fits."""
        capacity = self.capacity(chosen.shape[0] // self.config.chosen)
        one_hot = functional.one_hot(chosen, self.config.experts)
        place = (one_hot.cumsum(0) * one_hot).sum(-1) - 1  # among those of the same expert
        fits = place < capacity
        rows = self.config.experts * capacity
        return torch.where(fits, chosen * capacity + place, rows), fits


class Block(nn.Module):
    """Attention, then a mixture (or a dense MLP in the first layers)."""

    def __init__(self, config: Config, dense: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.base.norm_eps)
        self.attention = Attention(config.base)
        self.mlp_norm = RMSNorm(config.width, config.base.norm_eps)
        self.mlp = MLP(config.width, config.dense_hidden) if dense else Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DeepSeekMoE(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(
            Block(config, dense=i < config.dense_layers) for i in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config.base.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        base = self.config.base
        cos, sin = rotary_table(tokens.shape[1], base.head_dim, base.rope_theta)
        cos, sin = cos.to(x), sin.to(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(size: str | Config = "debug") -> DeepSeekMoE:
    """A model with random weights, by the name of its size or by its own sizes."""
    return DeepSeekMoE(SIZES[size] if isinstance(size, str) else size)


def example_inputs(model: DeepSeekMoE, batch: int, seq: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Inputs of the model and targets of the loss, at random."""
    tokens = torch.randint(model.config.vocab, (batch, seq))
    targets = torch.randint(model.config.vocab, (batch, seq))
    return (tokens,), (targets,)


def default_seq(model: DeepSeekMoE) -> int:
    """Length of the sequences to plan with, if nobody says otherwise."""
    return 64 if model.config.vocab < 1000 else 4096
