"""Which slices of its arguments a slice of an operator's result is computed from.

An `Axis` is a dimension along which a tensor can be cut into pieces. Merging dimensions turns a cut
into one that takes every so many rows, so an axis is a factor of a dimension: of `outer * rows *
inner` entries those are taken whose middle index is in the piece. An operator is row-wise along an
axis if a piece of its result needs only pieces of some arguments, and others whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from undertow.capture.schema import named_arguments, nodes_in
from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.nodes import tensors_of
from undertow.program.model import CollectiveKind

_aten = torch.ops.aten


class Axis(NamedTuple):
    """A factor of one dimension of a tensor: of outer * rows * inner entries, the middle one."""

    dim: int
    rows: int
    outer: int = 1
    inner: int = 1

    @property
    def length(self) -> int:
        return self.outer * self.rows * self.inner


Given = tuple[fx.Node, Axis | None]
"""An argument, and the axis along which pieces of it are taken; None: it is taken whole."""


@dataclass(frozen=True, slots=True)
class RowWise:
    """How a piece of a node's result is computed."""

    arguments: tuple[Given, ...]  # every tensor argument, in the order of the call
    adds: bool = False  # the result is the sum of what the pieces give


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's (first) tensor; empty if it has none."""
    tensors = tensors_of(node)
    return tuple(tensors[0].shape) if tensors else ()


def is_plain(node: fx.Node) -> bool:
    """Whether a node gives strided tensors whose sizes are all known."""
    tensors = tensors_of(node)
    return bool(tensors) and all(
        tensor.layout is torch.strided and all(isinstance(size, int) for size in tensor.shape)
        for tensor in tensors
    )


def has_axis(tensor: Tensor, axis: Axis) -> bool:
    return axis.dim < tensor.dim() and tensor.shape[axis.dim] == axis.length


def row_wise(node: fx.Node, axis: Axis) -> RowWise | None:
    """How a piece along `axis` of the node's results is computed; None if it needs all rows."""
    if not is_plain(node) or not all(has_axis(tensor, axis) for tensor in tensors_of(node)):
        return None
    if node.target is operator.getitem:
        return RowWise(((node.args[0], axis),))  # type: ignore[arg-type]
    rule = _rule(node)
    found = rule(node, axis) if rule is not None else None
    if found is None:
        return None
    wanted = dict(found)
    nodes = list(nodes_in((node.args, node.kwargs)))
    if len(set(nodes)) < len(nodes) and rule is not _pointwise:
        return None  # the same tensor in two roles
    arguments = []
    for arg in nodes:
        given = wanted.get(arg)
        if not is_plain(arg) or (given is not None and not has_axis(arg.meta["val"], given)):
            return None
        arguments.append((arg, given))
    if not any(given for _, given in arguments):
        return None
    return RowWise(tuple(arguments))


def result_axis(node: fx.Node, arg: fx.Node, axis: Axis) -> Axis | None:
    """The axis of the node's result whose pieces need pieces along `axis` of `arg`."""
    for candidate in _candidates(node, axis):
        found = row_wise(node, candidate)
        if found is not None and (arg, axis) in found.arguments:
            return candidate
    return None


def contraction(node: fx.Node, arg: fx.Node, axis: Axis) -> RowWise | None:
    """A node that sums over `axis` of `arg`: each piece gives a part of the sum."""
    packet, val = packet_of(node), node.meta.get("val")
    if not isinstance(val, Tensor) or not is_plain(node) or not val.is_floating_point():
        return None
    if packet in (_aten.mm, _aten.bmm):
        left, right = node.args[:2]
        last = 1 if packet is _aten.mm else 2
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        of_left, of_right = axis._replace(dim=last), axis._replace(dim=last - 1)
        if (arg is left and axis == of_left) or (arg is right and axis == of_right):
            return RowWise(((left, of_left), (right, of_right)), adds=True)
    if packet is _aten.sum and arg is node.args[0] and "dtype" not in node.kwargs:
        dims = node.args[1] if len(node.args) > 1 else list(range(arg.meta["val"].dim()))
        if isinstance(dims, list | tuple) and dims:
            rank = arg.meta["val"].dim()
            if axis.dim in {int(dim) % rank for dim in dims}:
                return RowWise(((arg, axis),), adds=True)
    return None


# -- rules: (node, axis of the result) -> the axes of its arguments -------------------------------

_Axes = list[tuple[fx.Node, Axis]]
_RuleOf = Callable[[fx.Node, Axis], _Axes | None]


def _rule(node: fx.Node) -> _RuleOf | None:
    if collective_call(node) is not None:
        return _collective
    if is_wait(node):
        return _same_shape
    packet, tags = packet_of(node), getattr(node.target, "tags", ())
    if packet is None or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return None
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    found = _RULES.get(packet)
    if found is None and torch.Tag.pointwise in tags:
        return _pointwise
    return found


def _pointwise(node: fx.Node, axis: Axis) -> _Axes | None:
    """Arguments are broadcast against the result from the right."""
    rank = len(shape_of(node))
    found = []
    for arg in nodes_in((node.args, node.kwargs)):
        shape = shape_of(arg)
        dim = axis.dim - (rank - len(shape))
        if dim >= 0 and shape[dim] != 1:
            found.append((arg, axis._replace(dim=dim)))
    return found


def _same_shape(node: fx.Node, axis: Axis) -> _Axes | None:
    return [(arg, axis) for arg in list(nodes_in(node.args))[:1]]


def _linear(node: fx.Node, axis: Axis) -> _Axes | None:
    """A new shape for the same numbers in the same order."""
    (source,) = list(nodes_in(node.args))[:1]
    if source.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if node.target is _aten.squeeze.default:
        return None  # it would drop the dimension of a piece of one row
    found = reshaped(shape_of(node), axis, shape_of(source))
    return None if found is None else [(source, found)]


def reshaped(shape: tuple[int, ...], axis: Axis, into: tuple[int, ...]) -> Axis | None:
    """The same axis after a view: rows lie as far apart in both shapes."""
    if math.prod(shape) != math.prod(into):
        return None
    apart = axis.inner * math.prod(shape[axis.dim + 1 :])
    behind = 1
    for dim in range(len(into) - 1, -1, -1):
        size = into[dim]
        if apart % behind == 0 and (behind * size) % (apart * axis.rows) == 0 and size > 1:
            return Axis(dim, axis.rows, behind * size // (apart * axis.rows), apart // behind)
        behind *= size
    return None


def _permuted(order: Callable[[fx.Node, int], list[int]]) -> _RuleOf:
    def rule(node: fx.Node, axis: Axis) -> _Axes | None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dims = order(node, len(shape_of(source)))
        return [(source, axis._replace(dim=dims[axis.dim]))]

    return rule


def _transposed(node: fx.Node, rank: int) -> list[int]:
    dims = list(range(rank))
    first, second = (int(node.args[i]) % rank for i in (1, 2))  # type: ignore[arg-type]
    dims[first], dims[second] = second, first
    return dims


def _flipped(node: fx.Node, rank: int) -> list[int]:
    return list(range(rank))[::-1]


def _permutation(node: fx.Node, rank: int) -> list[int]:
    return [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]


def _expand(node: fx.Node, axis: Axis) -> _Axes | None:
    return _pointwise(node, axis)


def _mm(node: fx.Node, axis: Axis) -> _Axes | None:
    left = node.args[0]
    assert isinstance(left, fx.Node)
    return [(left, axis)] if axis.dim == 0 else None


def _addmm(node: fx.Node, axis: Axis) -> _Axes | None:
    bias, left = node.args[:2]
    assert isinstance(bias, fx.Node)
    assert isinstance(left, fx.Node)
    if axis.dim != 0:
        return None
    shape = shape_of(bias)
    is_cut = len(shape) == 2 and shape[0] != 1
    return [(left, axis), *([(bias, axis)] if is_cut else [])]


def _bmm(node: fx.Node, axis: Axis) -> _Axes | None:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if axis.dim == 0:
        return [(left, axis), (right, axis)]
    return [(left, axis)] if axis.dim == 1 else None


def _reduction(node: fx.Node, axis: Axis) -> _Axes | None:
    """Over other dimensions than that of the axis."""
    arguments = named_arguments(node)
    source, dims = node.args[0], arguments.get("dim")
    assert isinstance(source, fx.Node)
    if dims is None:
        return None
    rank = len(shape_of(source))
    over = {int(dim) % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    if not over:
        return None
    if arguments.get("keepdim"):
        return None if axis.dim in over else [(source, axis)]
    left = [dim for dim in range(rank) if dim not in over]
    return [(source, axis._replace(dim=left[axis.dim]))] if axis.dim < len(left) else None


def _along_dim(node: fx.Node, axis: Axis) -> _Axes | None:
    """Works along one dimension (softmax, cumsum, topk, split, slice); all tensors have it."""
    arguments = named_arguments(node)
    rank = len(shape_of(node))
    default = 0 if packet_of(node) in _FIRST_BY_DEFAULT else -1
    dim = int(arguments.get("dim", default)) % rank
    if dim == axis.dim:
        return None
    tensors = [arg for arg in nodes_in((node.args, node.kwargs)) if len(shape_of(arg)) == rank]
    return [(arg, axis) for arg in tensors]


def _select(node: fx.Node, axis: Axis) -> _Axes | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = int(node.args[1]) % len(shape_of(source))  # type: ignore[arg-type]
    return [(source, axis._replace(dim=axis.dim + (axis.dim >= dim)))]


def _layer_norm(node: fx.Node, axis: Axis) -> _Axes | None:
    source, normalised = node.args[:2]
    assert isinstance(source, fx.Node)
    kept = len(shape_of(source)) - len(normalised)  # type: ignore[arg-type]
    return [(source, axis)] if axis.dim < kept else None


def _embedding(node: fx.Node, axis: Axis) -> _Axes | None:
    indices = node.args[1]
    assert isinstance(indices, fx.Node)
    return [(indices, axis)] if axis.dim < len(shape_of(indices)) else None


def _nll_loss_backward(node: fx.Node, axis: Axis) -> _Axes | None:
    """What the mean is divided by is given, so rows are independent."""
    arguments = named_arguments(node)
    if axis.dim != 0 or len(shape_of(arguments["self"])) != 2 or arguments["reduction"] == 0:
        return None
    return [(arguments["self"], axis), (arguments["target"], axis)]


def _collective(node: fx.Node, axis: Axis) -> _Axes | None:
    """Pieces of a collective are collectives; along dimension 0 each rank's part is cut."""
    call = collective_call(node)
    assert call is not None
    if call.written or len(call.read) != 1 or not isinstance(node.meta["val"], Tensor):
        return None
    (source,) = call.read
    arguments = named_arguments(node)
    if call.work.kind is CollectiveKind.ALL_REDUCE:
        return [(source, axis)]
    if call.work.kind is CollectiveKind.ALL_TO_ALL:
        return [(source, axis)] if _cuts_all_to_all(arguments, axis) else None
    if call.work.kind not in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        return None
    if axis.dim != 0:
        return [(source, axis)]
    ranks = int(arguments["group_size"])
    if call.work.kind is CollectiveKind.REDUCE_SCATTER:
        return [(source, axis._replace(outer=axis.outer * ranks))]
    if axis.outer % ranks:
        return None
    return [(source, axis._replace(outer=axis.outer // ranks))]


def _cuts_all_to_all(arguments: dict[str, Any], axis: Axis) -> bool:
    """Along dimension 0 the parts of all ranks must be equal, and each be cut in the same way."""
    if axis.dim != 0:
        return True
    sizes = {*arguments["output_split_sizes"], *arguments["input_split_sizes"]}
    parts = len(arguments["output_split_sizes"])
    return len(sizes) == 1 and axis.outer % max(parts, 1) == 0


def _candidates(node: fx.Node, axis: Axis) -> list[Axis]:
    """Axes that the result may have if an argument has `axis`."""
    if not is_plain(node):
        return []
    shape = shape_of(node)
    if packet_of(node) in _LINEAR:
        (source,) = list(nodes_in(node.args))[:1]
        found = reshaped(shape_of(source), axis, shape)
        return [] if found is None else [found]
    if node.target is operator.getitem:
        return [axis]
    outers = {axis.outer}
    call = collective_call(node)
    if call is not None and axis.dim == 0 and call.work.kind in _CHANGES_OUTER:
        ranks = int(named_arguments(node)["group_size"])
        outers = {axis.outer * ranks, axis.outer // ranks}
    return [
        candidate
        for dim in range(len(shape))
        for outer in sorted(outers)
        if (candidate := Axis(dim, axis.rows, outer, axis.inner)).length == shape[dim]
    ]


_CHANGES_OUTER = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
_LINEAR = frozenset(
    getattr(_aten, name)
    for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten")
)
_FIRST_BY_DEFAULT = frozenset(
    getattr(_aten, name) for name in ("slice", "split", "split_with_sizes", "cat", "narrow")
)
_RULES: dict[Any, _RuleOf] = {
    **dict.fromkeys(_LINEAR, _linear),
    **{
        getattr(_aten, name): rule
        for rule, names in {
            _pointwise: ("_to_copy", "masked_fill", "where", "alias", "detach", "lift_fresh_copy"),
            _reduction: (
                "sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp",
                "linalg_vector_norm", "any", "all", "argmax", "argmin",
            ),
            _along_dim: (
                "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
                "cumsum", "topk", "sort", "split", "split_with_sizes", "slice", "cat", "narrow",
                "gather", "_safe_softmax",
            ),
            _layer_norm: ("native_layer_norm", "_fused_rms_norm"),
        }.items()
        for name in names
    },
    _aten.expand: _expand,
    _aten.t: _permuted(_flipped),
    _aten.transpose: _permuted(_transposed),
    _aten.permute: _permuted(_permutation),
    _aten.select: _select,
    _aten.mm: _mm,
    _aten.addmm: _addmm,
    _aten.bmm: _bmm,
    _aten.embedding: _embedding,
    _aten.nll_loss_backward: _nll_loss_backward,
}  # fmt: skip
RESIZED = frozenset({_aten.view, _aten._unsafe_view, _aten.reshape, _aten.expand})
"""Operators whose second argument is the shape of their result."""
