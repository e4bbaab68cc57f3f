"""Data parallel graphs: the all-reduces of single gradients become few, and divide once.

Gradients of one group, reduce op, dtype, device and divisor are reduced together in graph order: a
small bucket first, so that the first gradients go out at once, then buckets up to a cap. Or the
solver decides, with costs. A bucket is one flat tensor (one copy in, views out) or one coalesced
call (no copy). Waits go to just before the first real use of what they wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import getitem
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments, nodes_in, parameter_names
from undertow.cost.cluster import Cluster
from undertow.errors import UndertowError, unknown_name
from undertow.graph.collectives import collective_call
from undertow.graph.convert import Converted, GroupRanks, convert
from undertow.graph.gradients import Gradient, find_gradients
from undertow.graph.nodes import tensor_nbytes
from undertow.graph.rewrite import rewrite
from undertow.graph.schedule_graph import Estimate, decide
from undertow.program import Order, Task
from undertow.schedule.buckets import Bucket, Merged, alone, merge
from undertow.schedule.late_waits import sink_all
from undertow.schedule.limits import Limits, limits_of

_aten = torch.ops.aten
_ops = torch_api.collectives
MIB = 1 << 20


class Form(StrEnum):
    """How gradients are reduced as one."""

    CONCAT = "concat"  # copied into one flat tensor; results are views of it
    COALESCED = "coalesced"  # one call with several tensors


@dataclass(frozen=True, slots=True)
class Fused:
    """What became of the gradients of a graph."""

    gradients: int  # found, each with an all-reduce of its own
    collectives: int  # that reduce them now
    divisions: int  # that do so now; there was one for each gradient that is divided
    reasons: tuple[str, ...] = ()  # why some were left alone


def fuse_gradients(
    gm: fx.GraphModule,
    *,
    cap_nbytes: int | None = 25 * MIB,
    first_nbytes: int = MIB,
    form: Form | str | None = None,
    average: bool | None = None,
    cluster: Cluster | str | None = None,
    estimate: Estimate | None = None,
    groups: GroupRanks | None = None,
    limits: Limits | str | None = None,
) -> Fused:
    """Reduce the gradients of `gm` in buckets, in place.

    The first bucket of a kind closes at `first_nbytes`, later ones at `cap_nbytes`; a larger tensor
    is a bucket of its own. With `cap_nbytes=None` the solver decides on buckets and order, with the
    costs of `cluster` and `estimate` (`schedule_graph`), and buckets are coalesced.

    A division by the number of ranks is done once for a bucket, or left to the reduction
    (`average`: None does so where the group's backend can, which gloo cannot). `limits` bound how
    far waits are delayed; by default peak memory stays what it is with the buckets.

        fuse_gradients(gm, cap_nbytes=25 << 20)
    """
    form = _form(form or (Form.COALESCED if cap_nbytes is None else Form.CONCAT))
    limits = limits_of(limits)
    for name, size in (("cap_nbytes", cap_nbytes), ("first_nbytes", first_nbytes)):
        if not (isinstance(size, int) or (size is None and name == "cap_nbytes")):
            raise UndertowError(f"{name} is {size!r}; give a number of bytes, such as 25 << 20")
    if first_nbytes <= 0 or (cap_nbytes is not None and cap_nbytes <= 0):
        raise UndertowError("buckets of gradients must be allowed at least one byte")
    if cap_nbytes is None and form is Form.CONCAT:
        raise UndertowError("the solver coalesces gradients: leave out form, or give cap_nbytes")
    converted = convert(gm.graph, groups)
    gradients = find_gradients(converted)
    reasons: list[str] = []
    if cap_nbytes is None:
        solution = decide(converted, cluster, estimate, limits or Limits(), merge=True)
        merged, order = solution.merged, solution.order
    else:
        merged = _bucketed(converted, gradients, cap_nbytes, first_nbytes, reasons)
        order = Order.captured(merged.program)
    members = _members(merged, gradients)
    rewrite(converted, merged, order)
    divisions = 0
    for bucket in members:
        divisions += _fuse(bucket, form, _can_average(bucket[0], average, groups))
        _drop_replaced(bucket)
    if cap_nbytes is not None:  # the solver has placed them where they are best
        delay_waits(gm.graph, groups=groups, limits=limits)
    gm.graph.lint()
    gm.recompile()
    return Fused(len(gradients), len(members), divisions, tuple(dict.fromkeys(reasons)))


def _form(given: Form | str) -> Form:
    if given not in list(Form):
        raise UndertowError(unknown_name("form", str(given), list(Form)))
    return Form(given)


def delay_waits(
    graph: fx.Graph, *, groups: GroupRanks | None = None, limits: Limits | None = None
) -> None:
    """Every wait to just before the first real use of its result, as far as memory allows."""
    converted = convert(graph, groups)
    program = converted.program
    order = sink_all(program, Order.captured(program), (limits or Limits()).fixed_for(program))
    rewrite(converted, alone(program), order)


def _bucketed(
    converted: Converted,
    gradients: dict[int, Gradient],
    cap: int,
    first: int,
    reasons: list[str],
) -> Merged:
    program = converted.program
    buckets = [
        Bucket(tuple(program.tasks[start].name for start in starts))
        for starts in _by_size(gradients, cap, first, reasons)
        if len(starts) > 1
    ]
    merged = merge(program, buckets, _unpriced)
    if len(merged.buckets) < len(buckets):
        reasons.append("gradients that depend on each other stay apart")
    return merged


def _unpriced(task: Task, ranks: tuple[int, ...]) -> Task:
    return task


def _by_size(
    gradients: dict[int, Gradient], cap: int, first: int, reasons: list[str]
) -> list[list[int]]:
    """Starts in graph order, filled up per key to the small first cap and then to the other."""
    closed: list[list[int]] = []
    open_buckets: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    limit: dict[Any, int] = {}
    for start, gradient in gradients.items():
        key = gradient.key()
        if any(not isinstance(size, int) for size in gradient.value.meta["val"].shape):
            reasons.append("gradients of symbolic size are left alone")
            closed.append([start])
            continue
        nbytes = tensor_nbytes(gradient.value.meta["val"])
        if key in open_buckets and filled[key] + nbytes > limit[key]:
            limit[key] = cap
            del open_buckets[key]
        if key not in open_buckets:
            limit.setdefault(key, min(first, cap))
            open_buckets[key], filled[key] = [], 0
            closed.append(open_buckets[key])
        open_buckets[key].append(start)
        filled[key] += nbytes
    return closed


def _members(merged: Merged, gradients: dict[int, Gradient]) -> list[list[Gradient]]:
    """The gradients of every collective that reduces nothing else and divides them alike."""
    found = []
    for origins in merged.origins:
        members = [gradients[origin] for origin in origins if origin in gradients]
        if len(members) == len(origins) and len({member.key() for member in members}) == 1:
            found.append(members)
    return found


def _can_average(gradient: Gradient, average: bool | None, groups: GroupRanks | None) -> bool:
    """Whether a sum that is divided by the number of ranks may become a mean."""
    call = collective_call(gradient.start)
    assert call is not None
    if average is False or gradient.divisor == 1 or call.work.reduce_op != "sum":
        return False
    ranks = (groups or {}).get(call.group, ("", torch_api.ranks_of_group(call.group)))[1]
    if not ranks or gradient.divisor != len(ranks):
        return False
    return average is True or torch_api.backend_of_group(call.group) == "nccl"


def _fuse(bucket: Sequence[Gradient], form: Form, average: bool) -> int:
    """Bring one collective into its form; how many divisions it has now."""
    divides = bucket[0].divisor != 1 and not average
    if len(bucket) > 1 and form is Form.CONCAT:
        _concat(bucket, average)
        return int(divides)
    if average:
        _leave_division_to_reduction(bucket)
        return 0
    if len(bucket) > 1 and bucket[0].before is not None:
        _divide_together(bucket)
        return int(divides)
    return len(bucket) if divides else 0


# -- one flat tensor ------------------------------------------------------------------------------


def _concat(bucket: Sequence[Gradient], average: bool) -> None:
    """One copy in, one reduction and one division of the flat tensor, views of it out."""
    whole = bucket[0].start
    arguments = named_arguments(whole)
    graph, first = whole.graph, bucket[0]
    with graph.inserting_before(whole):
        flat = _call(_aten.cat.default, [_flattened(gradient) for gradient in bucket])
        if first.before is not None and not average:
            flat = _call(_aten.div.Tensor, flat, first.divisor)
        op = "avg" if average else arguments["reduce_op"]
        target = _ops.all_reduce.default
        start = graph.call_function(target, (flat, op, arguments["group_name"]))
        start.meta = {**_notes(whole), "val": torch.empty_like(flat.meta["val"])}
    waits = {gradient.wait for gradient in bucket}
    with graph.inserting_before(next(node for node in _after(whole) if node in waits)):
        reduced = graph.call_function(_ops.wait_tensor.default, (start,))
        reduced.meta = {**_notes(whole), "val": _awaited(start.meta["val"])}
        if first.after is not None and not average:
            reduced = _call(_aten.div.Tensor, reduced, first.divisor)
        sizes = [gradient.value.meta["val"].numel() for gradient in bucket]
        parts = _call(_aten.split_with_sizes.default, reduced, sizes)
        for k, gradient in enumerate(bucket):
            part = _unflattened(_call(getitem, parts, k), gradient)
            gradient.result.replace_all_uses_with(part)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        node = node.next
        yield node


def _awaited(value: torch.Tensor) -> torch.Tensor:
    """What a wait gives: the same memory under another name."""
    return value.view(value.shape)


def _layout(gradient: Gradient) -> tuple[list[int], list[int]]:
    """The dimensions of a gradient from the outermost in memory to the innermost, and back."""
    strides = gradient.wait.meta["val"].stride()
    outwards = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(len(outwards)), key=outwards.__getitem__)
    return outwards, back


def _flattened(gradient: Gradient) -> fx.Node:
    node, (outwards, _) = gradient.value, _layout(gradient)
    if outwards != sorted(outwards):
        node = _call(_aten.permute.default, node, outwards)
    if not node.meta["val"].is_contiguous():
        contiguous = {"memory_format": torch.contiguous_format}
        node = _call(_aten.clone.default, node, **contiguous)
    return _call(_aten.view.default, node, [node.meta["val"].numel()])


def _unflattened(part: fx.Node, gradient: Gradient) -> fx.Node:
    outwards, back = _layout(gradient)
    shape = gradient.wait.meta["val"].shape
    node = _call(_aten.view.default, part, [shape[dim] for dim in outwards])
    return node if back == sorted(back) else _call(_aten.permute.default, node, back)


# -- one coalesced call ---------------------------------------------------------------------------


def _divide_together(bucket: Sequence[Gradient]) -> None:
    """One division of the whole list, right before the coalesced call."""
    whole = bucket[0].start
    with whole.graph.inserting_before(whole):
        values = [gradient.value for gradient in bucket]
        divided = _call(_aten._foreach_div.Scalar, values, bucket[0].divisor)
        inputs = [_call(getitem, divided, k) for k in range(len(bucket))]
    _set_arguments(whole, inputs=inputs)


def _leave_division_to_reduction(bucket: Sequence[Gradient]) -> None:
    whole = bucket[0].start
    if bucket[0].before is not None:
        values = [gradient.value for gradient in bucket]
        if "inputs" in parameter_names(whole.target):
            _set_arguments(whole, inputs=values, reduce_op="avg")
        else:
            _set_arguments(whole, input=values[0], reduce_op="avg")
        return
    _set_arguments(whole, reduce_op="avg")
    for gradient in bucket:
        gradient.result.replace_all_uses_with(gradient.wait)


def _set_arguments(node: fx.Node, **changed: Any) -> None:
    arguments = named_arguments(node) | changed
    node.args, node.kwargs = tuple(arguments[name] for name in parameter_names(node.target)), {}


# -- small things ---------------------------------------------------------------------------------


def _call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the graph's insertion point, with its value and its first argument's notes."""
    first = nodes_in(args)[0]
    values: Any = fx.map_arg(args, lambda node: node.meta["val"])
    node = first.graph.call_function(target, args, kwargs)
    node.meta = {**_notes(first), "val": target(*values, **kwargs)}
    return node


def _notes(node: fx.Node) -> dict[str, Any]:
    """Where a node comes from, which is also where those made of it do."""
    kept = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom", "module")
    return {name: node.meta[name] for name in kept if name in node.meta}


def _drop_replaced(bucket: Sequence[Gradient]) -> None:
    """Erase divisions, starts and waits whose work is now done elsewhere."""
    whole = bucket[0].start
    last: list[fx.Node | None] = [gradient.after for gradient in bucket]
    last += [gradient.wait for gradient in bucket]
    last += [user for user in whole.users if user.target is getitem]
    last += [whole, *(gradient.before for gradient in bucket)]
    for node in last:
        if node is not None and not node.users:
            whole.graph.erase_node(node)
