"""Expert parallel: the experts of each mixture spread over ranks, tokens exchanged by all-to-all.

A module takes part if it says so by `expert_parameters`, the names of its parameters that are
stacked by expert along dimension 0; its forward maps tokens of shape (experts, capacity, width),
already sorted by expert, to results of that shape. Two exchanges in forward, two in backward.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from undertow.capture.collectives import Exchange
from undertow.capture.cut import Cut
from undertow.capture.layers import set_forward
from undertow.capture.mesh import BoundMesh, Group, MeshError


def spread_experts(model: nn.Module, bound: BoundMesh) -> tuple[set[str], dict[nn.Parameter, Cut]]:
    """Keep this rank's experts only, and exchange tokens around them; the paths of their
    parameters, and how each was cut."""
    group = bound.group("ep")
    spread: set[str] = set()
    cuts: dict[nn.Parameter, Cut] = {}
    for path, module in model.named_modules():
        names: tuple[str, ...] = getattr(module, "expert_parameters", ())
        for name in names:
            whole = module.get_parameter(name)
            spread.add(f"{path}.{name}")
            if group is not None:
                cut = Cut(group, bound.index(group))
                local = _own_experts(whole, cut, f"{path}.{name}")
                module.register_parameter(name, local)
                cuts[local] = cut
        if names and group is not None:
            set_forward(module, functools.partial(_exchanged, module.forward, group))
    if not spread:
        raise MeshError(
            "expert parallel found no experts: a module with stacked expert weights must name them "
            'in an attribute, such as expert_parameters = ("up", "down")'
        )
    return spread, cuts


def _own_experts(whole: nn.Parameter, cut: Cut, path: str) -> nn.Parameter:
    if not cut.divides(whole):
        count, ranks = whole.shape[0], cut.group.size
        raise MeshError(f"{count} experts of {path} do not spread over {ranks} ranks")
    return nn.Parameter(cut.part(whole), whole.requires_grad)


def _exchanged(inner: Any, group: Group, tokens: Tensor) -> Tensor:
    """Send each expert's tokens to its rank, run the experts here, and send the results back."""
    experts, capacity, width = tokens.shape
    local = experts // group.size
    arrived: Tensor = Exchange.apply(tokens, group)  # type: ignore[no-untyped-call]
    by_expert = arrived.view(group.size, local, capacity, width).transpose(0, 1)
    results: Tensor = inner(by_expert.reshape(local, group.size * capacity, width))
    by_rank = results.view(local, group.size, capacity, width).transpose(0, 1)
    back: Tensor = Exchange.apply(  # type: ignore[no-untyped-call]
        by_rank.reshape(experts, capacity, width), group
    )
    return back
