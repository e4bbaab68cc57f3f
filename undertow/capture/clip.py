"""Gradients clipped by the norm of all of them, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from undertow.capture.collectives import all_reduce
from undertow.capture.full_state import plain
from undertow.capture.mesh import Group
from undertow.capture.placement import Placement, placements


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a parallelised model: every element of the gradient
    counts once, on whichever ranks it lies. All ranks call it; all get the norm before clipping.

        loss.backward()
        undertow.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    model = plain(model)
    total = _norm(model, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them all the same"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in _grads(model.parameters()):
        grad.mul_(factor.to(grad.device))
    return total


def _norm(model: nn.Module, norm_type: float) -> Tensor:
    """The norm of what one process would have as its gradient."""
    placed = placements(model)
    # Parts of parameters that lie on the same groups of ranks are added up together.
    parts: dict[tuple[Group, ...], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(_groups(placed.get(name)), []).append(parameter)
    is_max = norm_type == float("inf")
    sums = []
    for groups, parameters in parts.items():
        device = parameters[0].device
        norm = torch.nn.utils.get_total_norm(_grads(parameters), norm_type).to(device)
        value = norm if is_max else norm.pow(norm_type)
        for group in groups:
            value = all_reduce(value, group, "max" if is_max else "sum")
        sums.append(value)
    if not sums:
        return torch.zeros(())
    values = torch.stack([value.to(sums[0].device) for value in sums])
    return values.max() if is_max else values.sum().pow(1.0 / norm_type)


def _groups(placement: Placement | None) -> tuple[Group, ...]:
    """The groups whose ranks hold different elements of a parameter."""
    if placement is None:
        return ()
    cut = placement.cut.group if placement.cut is not None else None
    return tuple(group for group in (placement.shard, cut) if group is not None)


def _grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
