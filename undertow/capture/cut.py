"""How tensor and expert parallel ranks divide one parameter among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.capture import torch_api
from undertow.capture.mesh import Group


@dataclass(frozen=True, slots=True)
class Cut:
    """Equal parts along a dimension, one for each rank of a group.

    `fused` is how many projections lie one after another along it (3 for query, key and value in
    one weight): each of them is divided on its own.
    """

    group: Group
    index: int  # of this rank in the group
    dim: int = 0
    fused: int = 1

    def divides(self, whole: Tensor) -> bool:
        return whole.shape[self.dim] % (self.fused * self.group.size) == 0

    def part(self, whole: Tensor) -> Tensor:
        """What this rank keeps."""
        if isinstance(whole, torch_api.FakeTensor):
            shape = list(whole.shape)
            shape[self.dim] //= self.group.size
            return whole.new_empty(shape)
        projections = whole.detach().chunk(self.fused, self.dim)
        own = [each.chunk(self.group.size, self.dim)[self.index] for each in projections]
        return torch.cat(own, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks in their order."""
        by_rank = [part.chunk(self.fused, self.dim) for part in parts]
        return torch.cat([part for each in zip(*by_rank, strict=True) for part in each], self.dim)
