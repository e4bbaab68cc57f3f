"""What real ranks run of graphs; imports little, because every rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the collectives
from torch import Tensor


def run_codes(argument: tuple[list[str], list[Any]]) -> list[list[Tensor]]:
    """On one rank: what each graph, given as its code, returns for random inputs of these shapes,
    and the inputs afterwards."""
    codes, shapes = argument
    found = []
    for code in codes:
        torch.manual_seed(dist.get_rank())
        inputs = [torch.randn(shape) for shape in shapes]
        names: dict[str, Any] = {"torch": torch, "device": torch.device}
        exec(code, names)
        results = torch.utils._pytree.tree_leaves(names["forward"](None, *inputs))
        found.append([x for x in results if isinstance(x, Tensor)] + inputs)
    return found
