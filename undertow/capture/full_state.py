"""What a parallel model and its optimizer hold, as one process would hold it, and back.

Every rank calls these functions, with the same model and in the same order: they gather. One
parameter is gathered at a time. States that were saved whole fit any other way to be parallel, and
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undertow.capture.collectives import all_gather
from undertow.capture.mesh import MeshError
from undertow.capture.placement import Placement, placements

_SHOWN = 5  # keys that an error names


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """The `state_dict` of the model as it was before `parallelize`.

    With `rank0_only` the tensors are on the CPU of rank 0, and other ranks get nothing.

        state = undertow.full_state_dict(model, rank0_only=True)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    model = plain(model)
    placed = placements(model)
    keep = _keeper(rank0_only)
    found = {}
    for key, value in model.state_dict().items():
        whole = whole_of(value, placed[key]) if key in placed else value
        found[key] = keep(whole)
    return found if _is_kept(rank0_only) else {}


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Give a parallelised model the weights of a whole one: every rank keeps its part of them.
    Without `strict`, keys that only one of the two has are passed over."""
    model = plain(model)
    placed, own = placements(model), model.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if strict and (missing or unknown):
        raise MeshError(
            f"the state does not fit the model: {_some('missing', missing)}"
            f"{' and ' if missing and unknown else ''}{_some('unknown', unknown)}; "
            "strict=False passes over them"
        )
    parts: dict[str, Any] = {}
    for key in (key for key in own if key in state):
        given, placement = state[key], placed.get(key)
        if isinstance(given, Tensor) and isinstance(own[key], Tensor):
            wanted = own[key].shape if placement is None else _full_shape(placement)
            if given.shape != wanted:
                shapes = f"{tuple(wanted)}, not {tuple(given.shape)}"
                raise MeshError(f"{key} should have the shape {shapes}")
        parts[key] = given if placement is None else part_of(given, placement)
    model.load_state_dict(parts, strict=False)


def full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False
) -> dict[str, Any]:
    """The `state_dict` of an optimizer of this model, as one process would have it."""
    keep = _keeper(rank0_only)

    def whole(value: Tensor, placement: Placement) -> Tensor:
        return keep(whole_of(value, placement))  # type: ignore[no-any-return]

    state = _with_tensors(model, optimizer, optimizer.state_dict(), whole, of_parts=True)
    return state if _is_kept(rank0_only) else {}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Give an optimizer of a parallelised model what one of the whole model had."""
    optimizer.load_state_dict(_with_tensors(model, optimizer, state, part_of, of_parts=False))


def whole_of(part: Tensor, placement: Placement) -> Tensor:
    """What the ranks hold of one parameter, put together."""
    part = part.detach()
    if placement.shard is not None:
        flat = all_gather(part, placement.shard)
        part = flat[: placement.shape.numel()].view(placement.shape)
    if placement.cut is not None:
        group = placement.cut.group
        parts = all_gather(part.unsqueeze(0), group).unbind(0)
        part = placement.cut.join(parts)
    return part


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    """What this rank holds of a whole parameter."""
    if placement.cut is not None:
        whole = placement.cut.part(whole)
    return placement.split(whole)


def plain(model: nn.Module) -> nn.Module:
    """The model itself, where this is what `torch.compile` made of it."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _with_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    change: Callable[[Tensor, Placement], Tensor],
    *,
    of_parts: bool,
) -> dict[str, Any]:
    """An optimizer's state with all changed that is kept per element of a parameter."""
    model = plain(model)
    placed = placements(model)
    by_parameter = {
        parameter: placed[name]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in placed
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    if len(indices) != len(parameters):
        raise MeshError(
            f"the state is of an optimizer with {len(indices)} parameters, and this one has "
            f"{len(parameters)}"
        )
    found: dict[int, dict[str, Any]] = {}
    for index, parameter in zip(indices, parameters, strict=True):
        values: Mapping[str, Any] = state["state"].get(index, {})
        placement = by_parameter.get(parameter)
        if placement is None or not (placement.shard or placement.cut):
            found[index] = dict(values)
            continue
        shape = parameter.shape if of_parts else _full_shape(placement)
        found[index] = {
            key: change(value, placement)
            if _is_per_element(key, value, shape, placement)
            else value
            for key, value in values.items()
        }
    return {**state, "state": {index: values for index, values in found.items() if values}}


def _is_per_element(key: str, value: Any, shape: torch.Size, placement: Placement) -> bool:
    """Whether an optimizer keeps this for each element of a parameter, and not once."""
    if not isinstance(value, Tensor) or key == "step":
        return False
    if value.shape == shape:
        return True
    if value.dim() == 0:
        return False
    raise MeshError(
        f"the optimizer's {key!r} of {placement.path} has the shape {tuple(value.shape)}, and its "
        f"parameter {tuple(shape)}: what is not kept per element cannot be put together"
    )


def _full_shape(placement: Placement) -> torch.Size:
    sizes = list(placement.shape)
    if placement.cut is not None:
        sizes[placement.cut.dim] *= placement.cut.group.size
    return torch.Size(sizes)


def _keeper(rank0_only: bool) -> Callable[[Any], Any]:
    """What to do with each whole tensor: keep it, or a copy of it on the CPU of rank 0."""
    if not rank0_only:
        return lambda value: value
    is_first = dist.get_rank() == 0

    def keep(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("cpu", copy=True) if is_first else None

    return keep


def _is_kept(rank0_only: bool) -> bool:
    return not rank0_only or dist.get_rank() == 0


def _some(what: str, keys: list[str]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{what} {', '.join(keys[:_SHOWN])}{more}"
