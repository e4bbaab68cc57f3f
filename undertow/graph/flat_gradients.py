"""Gradients computed where they are reduced: in flat buckets, each all-reduced in place.

What gloo runs as one call of several tensors it copies together first, and a functional all-reduce
copies what it is given. Here a matrix product writes its gradient right into its bucket, scaled by
one over the number of ranks on the way; other gradients are copied once. What the graph gives out
are views of the buckets, as DDP's are with `gradient_as_bucket_view`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.graph.collectives import GLOO, runs_on
from undertow.graph.convert import convert
from undertow.graph.gradients import Gradient, find_gradients
from undertow.graph.nodes import insert_call, notes_of, tensor_nbytes

_aten, _ops = torch.ops.aten, torch_api.collectives
_VIEWS = frozenset(
    (_aten.t, _aten.permute, _aten.transpose, _aten.view, _aten._unsafe_view, _aten.alias)
)
_PASSING = _VIEWS | {_aten._to_copy, _aten.div, _aten.mul}
_GONE = _VIEWS | {_aten.mm, _aten.div, _ops.all_reduce, _ops.wait_tensor}
MIB = 1 << 20
BUCKETS = 8
"""Of a graph, if they are not too small or too large then."""
_LEAST_NBYTES, _MOST_NBYTES = MIB * 3 // 4, 25 * MIB
_OF_THE_REST = 4  # a bucket is at most this part of what is still to come
_TINY_SHARE = 8  # of the most that a bucket should hold: less does not make one of its own
# Where half of a number is a number: too small ones aside, scaling before a sum is exact.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


def flatten_gradients(
    graph: fx.Graph, backends: Sequence[str] = GLOO, *, buckets: int = BUCKETS
) -> int:
    """Reduce the gradients that `graph` gives out in flat buckets, about so many, in place; how
    many there are.

    Of groups that gloo runs, since others reduce a list of tensors without copies. Numbers are as
    before bit for bit on two ranks; on more, gloo's sums depend on the place in a tensor.
    """
    if not any(runs_on(node, backends) for node in graph.nodes):
        return 0
    gradients = [
        gradient
        for gradient in find_gradients(convert(graph)).values()
        if runs_on(gradient.start, backends) and _is_plain(gradient)
    ]
    made = _by_size(gradients, buckets)
    for bucket in made:
        _write(bucket)
    return len(made)


def _is_plain(gradient: Gradient) -> bool:
    """Of known size, dense in memory, and given out: nothing else in the graph waits for it."""
    given, reduced = gradient.value.meta["val"], gradient.wait.meta["val"]
    if any(not isinstance(size, int) for size in given.shape) or not given.numel():
        return False
    dense = torch.empty_permuted(reduced.shape, _layout(reduced), device="meta")
    if dense.stride() != reduced.stride():
        return False
    is_sum = named_arguments(gradient.start)["reduce_op"] == "sum"
    return gradient.start.target is _ops.all_reduce.default and is_sum and bool(_uses(gradient))


def _uses(gradient: Gradient) -> list[fx.Node]:
    """What is made of the reduced gradient on its way out, in graph order; empty if it has other
    uses."""
    found: dict[fx.Node, None] = {}
    todo = [gradient.wait]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        for user in node.users:
            if user.op == "output":
                continue
            if getattr(user.target, "overloadpacket", None) not in _PASSING:
                return []
            if len(user.all_input_nodes) > 1:
                return []
            todo.append(user)
    return sorted(found)


def _by_size(gradients: Sequence[Gradient], count: int) -> list[list[Gradient]]:
    """Those of each group, dtype and divisor in graph order, in about so many buckets of like size;
    the last ones are smaller and smaller, since there is little left to hide them behind."""
    alike: dict[Any, list[Gradient]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.key(), []).append(gradient)
    # Each kind by itself: the ranks of one group may differ in what they reduce in another.
    return [bucket for kind in alike.values() for bucket in _cut(kind, count)]


def _cut(gradients: Sequence[Gradient], count: int) -> list[list[Gradient]]:
    left = sum(map(_nbytes, gradients))
    most = min(left // count, _MOST_NBYTES)
    buckets: list[list[Gradient]] = [[]]
    held = 0  # by the last one
    for gradient in gradients:
        cap, more = max(min(most, left // _OF_THE_REST), _LEAST_NBYTES), _nbytes(gradient)
        # A full one is not kept back by what comes later, however little that is.
        is_full = held >= cap or (held + more > cap and min(held, more) * _TINY_SHARE >= cap)
        if is_full:
            buckets.append([])
            held = 0
        buckets[-1].append(gradient)
        held += more
        left -= more
    if len(buckets) > 1 and held * _TINY_SHARE < _LEAST_NBYTES:
        buckets[-2:] = [buckets[-2] + buckets[-1]]  # nothing follows that it could go with
    return buckets


def _nbytes(gradient: Gradient) -> int:
    return tensor_nbytes(gradient.value.meta["val"])


# -- writing a bucket -----------------------------------------------------------------------------


def _write(bucket: Sequence[Gradient]) -> None:
    first, divisor = bucket[0], bucket[0].divisor
    is_exact = first.value.meta["val"].dtype in _WIDE and _is_power_of_two(divisor)
    scales = is_exact or first.before is not None  # on the way in; else divided after the sum
    ways = divisor if scales else 1
    products = [_product(gradient) if is_exact or ways == 1 else None for gradient in bucket]
    makers = [product or gradient.value for product, gradient in zip(products, bucket, strict=True)]
    # What the graph was given is copied where it was reduced.
    places = [m if _is_made(m) else g.start for m, g in zip(makers, bucket, strict=True)]
    flat, pieces = _allocate(bucket, min(places))
    for gradient, product, piece in zip(bucket, products, pieces, strict=True):
        if product is not None:
            _multiply_into(product, piece, ways)
        else:
            _copy_into(gradient, piece, ways)
    reduced = _reduce(flat, max(gradient.start for gradient in bucket))
    if not scales:
        with flat.graph.inserting_after(reduced):
            reduced = insert_call(_aten.div_.Tensor, reduced, divisor)
    _hand_out(bucket, reduced)
    for gradient in bucket:
        _drop(gradient)


def _is_power_of_two(number: int | float) -> bool:
    return number >= 1 and math.frexp(number)[0] == 0.5


def _is_made(node: fx.Node) -> bool:
    return node.op == "call_function"


def _product(gradient: Gradient) -> fx.Node | None:
    """The matrix product that a gradient is a view of, if all of it can be written elsewhere."""
    value = gradient.value
    given = value.meta["val"]
    if given.stride() != gradient.wait.meta["val"].stride():
        return None  # it is copied on its way
    node = value
    while getattr(node.target, "overloadpacket", None) in _VIEWS and len(node.users) == 1:
        (node,) = node.all_input_nodes
    if node.target is not _aten.mm.default or len(node.users) != 1:
        return None
    made = node.meta["val"]
    same = made.numel() == given.numel() and made.dtype == given.dtype
    return node if same and made.is_contiguous() else None


def _allocate(bucket: Sequence[Gradient], before: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """An empty bucket, and the place of every gradient in it."""
    sample = bucket[0].value.meta["val"]
    sizes = [gradient.value.meta["val"].numel() for gradient in bucket]
    with before.graph.inserting_before(before):
        flat = before.graph.call_function(
            _aten.empty.memory_format,
            ([sum(sizes)],),
            {"dtype": sample.dtype, "device": sample.device, "pin_memory": False},
        )
        flat.meta = {**notes_of(before), "val": sample.new_empty([sum(sizes)])}
        parts = insert_call(_aten.split_with_sizes.default, flat, sizes)
        return flat, [insert_call(operator.getitem, parts, k) for k in range(len(sizes))]


def _multiply_into(product: fx.Node, piece: fx.Node, ways: int | float) -> None:
    graph = product.graph
    with graph.inserting_before(product):
        there = insert_call(_aten.view.default, piece, list(product.meta["val"].shape))
        written = graph.call_function(
            _aten.addmm_.default, (there, *product.args), {"beta": 0, "alpha": 1 / ways}
        )
    written.meta = {**product.meta, "val": there.meta["val"]}
    for note in ("tensor_meta", "eager_input_vals"):
        written.meta.pop(note, None)


def _copy_into(gradient: Gradient, piece: fx.Node, ways: int | float) -> None:
    value = gradient.value
    graph = value.graph
    at = _after_picks(value) if _is_made(value) else gradient.start
    with graph.inserting_before(at):
        there = _as_given(piece, gradient)
        if ways == 1:
            insert_call(_aten.copy_.default, there, value)
        else:
            insert_call(_aten.div.out, value, ways, out=there)


def _after_picks(node: fx.Node) -> fx.Node:
    after = node.next
    while after.target is operator.getitem:
        after = after.next
    return after


def _reduce(flat: fx.Node, last: fx.Node) -> fx.Node:
    arguments = named_arguments(last)
    with flat.graph.inserting_after(last):
        args = (flat, arguments["reduce_op"], arguments["group_name"])
        start = flat.graph.call_function(_ops.all_reduce_.default, args)
    start.meta = {**notes_of(last), "val": flat.meta["val"]}
    with flat.graph.inserting_after(start):
        wait = flat.graph.call_function(_ops.wait_tensor.default, (start,))
    wait.meta = {**notes_of(last), "val": flat.meta["val"]}
    return wait


def _hand_out(bucket: Sequence[Gradient], reduced: fx.Node) -> None:
    graph = reduced.graph
    sizes = [gradient.value.meta["val"].numel() for gradient in bucket]
    with graph.inserting_before(reduced.next):
        parts = insert_call(_aten.split_with_sizes.default, reduced, sizes)
        views = [
            _as_given(insert_call(operator.getitem, parts, k), gradient)
            for k, gradient in enumerate(bucket)
        ]
    last = views[-1]
    for gradient, view in zip(bucket, views, strict=True):
        for node in _uses(gradient):
            if node not in (gradient.wait, gradient.after):
                last.append(node)
                last = node
        gradient.result.replace_all_uses_with(view)


def _as_given(piece: fx.Node, gradient: Gradient) -> fx.Node:
    """A part of a bucket in the shape and strides of its gradient."""
    reduced = gradient.wait.meta["val"]
    outwards = _layout(reduced)
    node = insert_call(_aten.view.default, piece, [reduced.shape[dim] for dim in outwards])
    back = sorted(range(len(outwards)), key=outwards.__getitem__)
    return node if back == sorted(back) else insert_call(_aten.permute.default, node, back)


def _layout(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def _drop(gradient: Gradient) -> None:
    """Erase what nobody uses any more, from the division after the sum back to the product."""
    todo = [gradient.result, gradient.wait, gradient.start]
    while todo:
        node = todo.pop(0)
        if node.users or node.op != "call_function" or node._erased:
            continue
        if getattr(node.target, "overloadpacket", None) in _GONE:
            todo += node.all_input_nodes
            node.graph.erase_node(node)
