"""Vision transformer: images cut into patches, classified by an extra token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gpt2 import Block


@dataclass(frozen=True)
class Config:
    """Sizes of one model; image and patch in pixels."""

    width: int
    layers: int
    heads: int
    patch: int = 16
    image: int = 224
    classes: int = 1000


SIZES = {
    "debug": Config(64, 2, 4, patch=8, image=32, classes=10),
    "b16": Config(768, 12, 12),
    "l16": Config(1024, 24, 16),
    "h14": Config(1280, 32, 16, patch=14),
}


class ViT(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        patches = (config.image // config.patch) ** 2
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, config.width) * 0.02)
        self.layers = nn.ModuleList(
            Block(config.width, config.heads, 4 * config.width, causal=False)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def build(size: str | Config = "debug") -> ViT:
    """A model with random weights, by the name of its size or by its own sizes."""
    return ViT(SIZES[size] if isinstance(size, str) else size)


def example_inputs(model: ViT, batch: int, seq: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Images and their classes, at random; `seq` has no meaning here."""
    config = model.config
    images = torch.randn(batch, 3, config.image, config.image)
    return (images,), (torch.randint(config.classes, (batch,)),)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the class, in float32."""
    return functional.cross_entropy(logits.float(), targets)


def default_seq(model: ViT) -> int:
    """Tokens per image."""
    return (model.config.image // model.config.patch) ** 2 + 1
