"""Finds what can run in pieces: the row-wise work around the collectives that activations go
through.

From each such collective an axis is carried up to what computes its input and down to what uses its
result, as far as operators are row-wise along it. Every value has one axis at most, so that pieces
fit wherever two divided tasks meet. Products and sums over the axis (gradients of weights) are
divided too, into parts of a sum.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.graph.collectives import CollectiveCall, collective_call, is_wait
from undertow.graph.convert import Converted
from undertow.graph.describe import READ_WHAT_THEY_GIVE, op_class
from undertow.graph.nodes import tensor_nbytes, tensors_of
from undertow.graph.row_axis import (
    Axis,
    RowWise,
    contraction,
    is_plain,
    packet_of,
    result_axis,
    row_wise,
)
from undertow.program import CollectiveKind, Kind, OpClass
from undertow.schedule.splits import Combine, Division, Sliced, Splittable

_HEAVY = (OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION, OpClass.GATHER)


@dataclass(frozen=True)
class RowWork:
    """The nodes that can run in pieces, and along which axis of their result."""

    converted: Converted
    axes: dict[fx.Node, Axis]  # of results that are there in pieces
    ways: dict[fx.Node, RowWise]  # how a piece is computed; also of sums over an axis

    @cached_property
    def splittable(self) -> Splittable:
        """The same for the Program of the graph."""
        return _table(self)


def find_row_work(converted: Converted) -> RowWork:
    """What can be divided in the graph of `converted`; nothing where values are not fake tensors
    of known sizes."""
    if not converted.nodes or not _is_fake(converted):
        return RowWork(converted, {}, {})
    graph = converted.nodes[0].graph
    labels = _Labels()
    for node, call in _seeds(graph):
        labels.spread_from(node, call)
    labels.find_sums()
    return RowWork(converted, labels.axes, labels.ways)


def _is_fake(converted: Converted) -> bool:
    return all(
        isinstance(tensor, torch_api.FakeTensor)
        for start in converted.program.starts
        for tensor in tensors_of(converted.nodes[start])
    )


def _seeds(graph: fx.Graph) -> list[tuple[fx.Node, CollectiveCall]]:
    """Collectives that both come from and lead to more than pointwise work: those of activations,
    and neither gathers of weights nor reductions of gradients."""
    calls = {node: call for node in graph.nodes if (call := collective_call(node)) is not None}
    heavy = {node for node in graph.nodes if node.op == "call_function" and _is_heavy(node)}
    above: set[fx.Node] = set()
    for node in graph.nodes:
        if any(source in heavy or source in above for source in node.all_input_nodes):
            above.add(node)
    below: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in heavy or user in below for user in node.users):
            below.add(node)
    return [(node, call) for node, call in calls.items() if node in above and node in below]


def _is_heavy(node: fx.Node) -> bool:
    return op_class(node.target) in _HEAVY


class _Labels:
    """Axes as they spread over a graph; the first to reach a value stays."""

    def __init__(self) -> None:
        self.axes: dict[fx.Node, Axis] = {}
        self.ways: dict[fx.Node, RowWise] = {}
        self._new: deque[fx.Node] = deque()

    def spread_from(self, node: fx.Node, call: CollectiveCall) -> None:
        if node in self.axes or not _has_one_wait(node):
            return
        axis = _seed_axis(node, call)
        if axis is None or not self._claim(node, axis):
            return
        while self._new:
            self._spread(self._new.popleft())

    def _claim(self, node: fx.Node, axis: Axis) -> bool:
        if node in self.axes or node.op != "call_function":
            return False
        if collective_call(node) is not None and not _has_one_wait(node):
            return False
        way = row_wise(node, axis)
        if way is None:
            return False
        self.axes[node], self.ways[node] = axis, way
        self._new.append(node)
        return True

    def _spread(self, node: fx.Node) -> None:
        for arg, axis in self.ways[node].arguments:
            if axis is not None:
                self._claim(arg, axis)
        mine = self.axes[node]
        for user in node.users:
            if user not in self.axes and user.op == "call_function":
                axis = result_axis(user, node, mine)
                if axis is not None:
                    self._claim(user, axis)

    def find_sums(self) -> None:
        for node, axis in list(self.axes.items()):
            for user in node.users:
                if user.op != "call_function" or user in self.ways:
                    continue
                way = contraction(user, node, axis)
                if way is not None and all(is_plain(arg) for arg, _ in way.arguments):
                    self.ways[user] = way


def _has_one_wait(node: fx.Node) -> bool:
    return len(node.users) == 1 and is_wait(next(iter(node.users)))


def _seed_axis(node: fx.Node, call: CollectiveCall) -> Axis | None:
    """The outermost dimension of its result with an even number of rows; where ranks' parts lie one
    behind the other in it, the rows of each part."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not is_plain(node) or not call.read:
        return None
    shape, kind = tuple(value.shape), call.work.kind
    source = tuple(call.read[0].meta["val"].shape)
    if kind is CollectiveKind.ALL_GATHER and source and source[0] % 2 == 0:
        return Axis(0, source[0], shape[0] // source[0])
    first = 0 if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER) else 1
    for dim in range(first, len(shape)):
        if shape[dim] % 2 == 0:
            return Axis(dim, shape[dim])
    if kind is CollectiveKind.ALL_TO_ALL:
        parts = len(named_arguments(node)["output_split_sizes"])
        return Axis(0, shape[0] // parts, parts) if parts and shape[0] > parts else None
    return None


# -- the table for the Program --------------------------------------------------------------------


def _table(work: RowWork) -> Splittable:
    program, nodes = work.converted.program, work.converted.nodes
    task_of = {node: i for i, node in enumerate(nodes)}
    buffer_of = work.converted.storages
    written_once = _written_once(work.converted)
    found: dict[int, Division] = {}
    for i, node in enumerate(nodes):
        way, kind = work.ways.get(node), program.tasks[i].kind
        if way is None or kind not in (Kind.COMPUTE, Kind.START, Kind.VIEW):
            continue
        if kind is not Kind.VIEW and not written_once.issuperset(program.tasks[i].writes):
            continue
        division = _division(work, node, way, task_of, buffer_of)
        if division is not None and (kind is not Kind.VIEW or len(division.inputs) == 1):
            found[i] = division
    return Splittable(found)


def _written_once(converted: Converted) -> set[int]:
    """Buffers that one task makes and nobody changes, but for the wait for it."""
    program = converted.program
    writers: dict[int, int] = {}
    for task in program.tasks:
        if task.kind is not Kind.WAIT:
            for buffer in task.writes:
                writers[buffer] = writers.get(buffer, 0) + 1
    return {
        buffer
        for buffer, count in writers.items()
        if count == 1 and not program.there_before[buffer]
    }


def _division(
    work: RowWork,
    node: fx.Node,
    way: RowWise,
    task_of: dict[fx.Node, int],
    buffer_of: Mapping[int, int],
) -> Division | None:
    inputs: list[Sliced] = []
    whole_nbytes = 0
    inputs_at = []
    for arg, axis in way.arguments:
        tensors = tensors_of(arg)
        inputs_at += [-1 if axis is None else axis.dim] * len(tensors)
        nbytes = sum(map(tensor_nbytes, tensors))
        if axis is None:
            whole_nbytes += nbytes
            continue
        buffer = buffer_of.get(torch_api.storage_key(tensors[0]))
        if buffer is None:
            return None
        source = arg
        while source.target is operator.getitem:
            source = source.args[0]  # type: ignore[assignment]
        inputs.append(
            Sliced(
                task_of.get(source, -1),
                buffer,
                nbytes,
                is_aligned=work.axes.get(arg) == axis,
                is_copied=_is_copied(node, arg, axis),
            )
        )
    rows = next(axis.rows for _, axis in way.arguments if axis is not None)
    if packet_of(node) in READ_WHAT_THEY_GIVE:
        whole_nbytes = 0
    return Division(
        rows,
        tuple(inputs),
        Combine.ADD if way.adds else Combine.CONCATENATE,
        _shape_at(work, node, way),
        tuple(inputs_at),
        whole_nbytes,
    )


def _shape_at(work: RowWork, node: fx.Node, way: RowWise) -> int:
    """Which entry of the description's shape is divided; matmuls are (batch, m, n, k)."""
    if op_class(node.target) is not OpClass.MATMUL:
        return -1 if way.adds else work.axes[node].dim
    if way.adds:
        return 3
    rank = len(node.meta["val"].shape)
    return work.axes[node].dim + (1 if rank == 2 else 0)


def _is_copied(node: fx.Node, arg: fx.Node, axis: Axis) -> bool:
    """Whether a piece of the whole cannot be used where it lies: every so many rows are no slice,
    and most collectives want their input in one run of memory."""
    if axis.outer > 1:
        return True
    call = collective_call(node)
    if call is None or call.work.kind is CollectiveKind.ALL_REDUCE:
        return False
    shape = arg.meta["val"].shape
    return any(size > 1 for size in shape[: axis.dim]) or not arg.meta["val"].is_contiguous()
