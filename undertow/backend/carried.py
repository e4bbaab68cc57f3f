"""Graphs whose reductions go on while the next step's forward begins (`undertow.carry_over`).

In a forward graph the parameters are made ready where they are first needed, in some points along
the way. In the backward graph nobody waits at the end, and buckets that the next forward needs
first go over the link first: those that come last.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.carry import Crossing
from undertow.graph.collectives import is_wait
from undertow.graph.describe import op_class
from undertow.graph.nodes import tensor_nbytes
from undertow.program import Timeline
from undertow.program.model import Kind, OpClass
from undertow.runtime.direct import STAND_IN

_aten = torch.ops.aten
_VIEWS = frozenset(
    (
        _aten.t, _aten.permute, _aten.transpose, _aten.view, _aten._unsafe_view, _aten.alias,
        _aten.detach, _aten.expand, _aten.squeeze, _aten.unsqueeze, _aten.split_with_sizes,
    )
)  # fmt: skip
_PASSING = _VIEWS | {_aten._to_copy, _aten.div, _aten.mul}
_LARGE = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)
_POINTS = 16  # of a forward graph; each ends a run of kernels
# Hundredths of what collectives should take that they may take in truth. Costs are rather too long:
# in a measured run the end of a collective is seen when the task beside it has ended.
_MAY_TAKE = (60, 70, 80, 90, 100)
_TRIED = range(50, 101, 5)  # with which orders are made
_LENGTHS = 12  # from which on a bucket counts as long, at most so many
AT_ONCE = -1  # the number of no crossing: parameters that are only brought up to date


def reduced_inputs(joint: fx.Graph, num_outputs: int) -> list[str]:
    """The inputs of a joint graph whose gradients it all-reduces."""
    (results,) = joint.output_node().args
    assert isinstance(results, list | tuple)
    inputs = joint.find_nodes(op="placeholder")
    return [
        given.name
        for given, grad in zip(inputs, results[num_outputs:], strict=False)
        if isinstance(grad, fx.Node) and _is_reduced(grad)
    ]


def _is_reduced(grad: fx.Node) -> bool:
    node = grad
    while not is_wait(node):
        if _packet(node) not in _PASSING or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    (start,) = node.all_input_nodes
    return start.target is torch_api.collectives.all_reduce.default


# -- forward --------------------------------------------------------------------------------------


def make_ready(
    graph: fx.Graph, reduced: Collection[str], static: Collection[int], crossing: Crossing | None
) -> None:
    """Have the inputs `reduced` updated where they are first needed, and other `static` ones
    (parameters that another graph may have left behind) at the beginning."""
    inputs = graph.find_nodes(op="placeholder")
    first = next((node for node in graph.nodes if node.op == "call_function"), None)
    others = [node for place, node in enumerate(inputs) if place in static]
    early = [node for node in others if node.name not in reduced and _is_float(node)]
    if first is None:
        return
    if early:
        _insert(first, early, [], AT_ONCE)
    if crossing is None:
        return
    # Backward alone may read some, which are due before it.
    uses = {node: _first_use(node) or first for node in inputs if node.name in reduced}
    for point, parameters in _points(uses):
        after = [arg for arg in point.all_input_nodes if _is_made(arg)]
        _insert(point, parameters, after[:1], crossing.number)


def _first_use(given: fx.Node) -> fx.Node | None:
    """The first node that reads an input, itself or a view of it."""
    todo, found = [given], []
    while todo:
        for user in todo.pop().users:
            if _packet(user) in _VIEWS or user.target is operator.getitem:
                todo.append(user)
            elif user.op == "call_function":
                found.append(user)
    return min(found, default=None)


def _points(uses: Mapping[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Where to stop in a forward, and which parameters are needed from there to the next point.
    Points are at products: elsewhere they would cut kernels apart."""
    ordered = sorted(uses, key=lambda given: (uses[given], given))
    each = sum(_nbytes(given) for given in ordered) // _POINTS
    group: list[fx.Node] = []
    for given in ordered:
        is_large = op_class(uses[given].target) in _LARGE
        is_new = bool(group) and uses[given] is not uses[group[-1]]
        if is_new and is_large and sum(map(_nbytes, group)) >= each:
            yield uses[group[0]], group
            group = []
        group.append(given)
    if group:
        yield uses[group[0]], group


def _insert(
    before: fx.Node, parameters: Sequence[fx.Node], after: Sequence[fx.Node], crossing: int
) -> None:
    """`after` is what has to be computed by then, so that no order of kernels asks too early."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(
            torch.ops.undertow.ready.default, (list(parameters), list(after), crossing)
        )
    node.meta = {"val": None, "module": before.meta.get("module", "")}


def _is_made(node: fx.Node) -> bool:
    """Whether forward computes a tensor: not an input, and no view of one."""
    while _packet(node) in _VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _is_float(given: fx.Node) -> bool:
    value = given.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _nbytes(given: fx.Node) -> int:
    return tensor_nbytes(given.meta["val"])


def _packet(node: fx.Node) -> object:
    return getattr(node.target, "overloadpacket", None)


# -- backward -------------------------------------------------------------------------------------


def has_flat_buckets(graph: fx.Graph) -> bool:
    """Whether gradients are computed where they are reduced (`graph.flat_gradients`)."""
    return bool(
        graph.find_nodes(op="call_function", target=torch_api.collectives.all_reduce_.default)
    )


def leave_reductions(graph: fx.Graph, crossing: Crossing) -> list[fx.Node]:
    """Mark the waits of a backward graph that can be left to the next forward, and put them last;
    those are of tensors that the graph gives out, all of them, and does nothing else with."""
    left = [node for node in graph.nodes if is_wait(node) and _only_leaves(node)]
    output = graph.output_node()
    for wait in left:
        wait.meta[STAND_IN] = crossing.leave
        for node in (wait, *_views_of(wait)):
            output.prepend(node)
    return left


def _only_leaves(wait: fx.Node) -> bool:
    views = _views_of(wait)
    inside = {wait, *views}
    given_out = [node for node in inside if any(user.op == "output" for user in node.users)]
    users = (user for node in inside for user in node.users)
    if any(user not in inside and user.op != "output" for user in users):
        return False
    value = wait.meta["val"]
    if not isinstance(value, torch.Tensor):
        return False
    return bool(sum(node.meta["val"].numel() for node in given_out) == value.numel())


def _views_of(wait: fx.Node) -> list[fx.Node]:
    """All views of what is waited for, in graph order."""
    found: dict[fx.Node, None] = {}
    todo = [wait]
    while todo:
        for user in todo.pop().users:
            if _packet(user) in _VIEWS or user.target is operator.getitem:
                found[user] = None
                todo.append(user)
    return sorted(found)


def start_last_first(waits: Sequence[fx.Node], timeline: Timeline) -> bool:
    """Start what these wait for as soon as it is there, as long as the link is free, and else in
    the order in which the next forward needs it: of the buckets that are there, the one that came
    last (`link_order`). Whether anything was moved."""
    if not waits:
        return False
    graph = waits[0].graph
    nodes = {node.name: node for node in graph.nodes}
    coming = sorted(_coming(start, timeline, nodes) for start in set(map(_start_of, waits)))
    order = link_order([one.ready for one in coming], [one.taken for one in coming])
    left = set(waits)
    awaited = [node for node in graph.nodes if is_wait(node) and node not in left]
    last: list[fx.Node] = []  # what the next one comes after
    for one in (coming[k] for k in order):
        after = max((one.after, *last))
        for node in reversed((one.start, *_picks(one.start))):
            after.append(node)
        last = [one.start]
        if one is coming[-1]:  # what was held back leaves the link to what backward waits for
            last += awaited
    return list(nodes) != [node.name for node in graph.nodes]


class _Coming(NamedTuple):
    """A bucket on its way to the link."""

    ready: int  # when it has been computed,
    place: int
    taken: int  # what its collective takes,
    after: fx.Node  # the last node that it needs
    start: fx.Node


def _coming(start: fx.Node, timeline: Timeline, nodes: Mapping[str, fx.Node]) -> _Coming:
    program = timeline.program
    place = program.index[start.name]
    # Policies order collectives among each other, which is what is decided here.
    before = [
        other
        for other in program.predecessors[place]
        if program.tasks[other].kind is not Kind.START
    ]
    needed = [nodes[program.tasks[other].name] for other in before]
    return _Coming(
        max((int(timeline.end[other]) for other in before), default=0),
        place,
        int(timeline.end[place] - timeline.begin[place]),
        max((*needed, *start.all_input_nodes)),
        start,
    )


def _picks(start: fx.Node) -> list[fx.Node]:
    """The results of a coalesced call."""
    return sorted(user for user in start.users if user.target is operator.getitem)


def _start_of(wait: fx.Node) -> fx.Node:
    (node,) = wait.all_input_nodes
    while node.target is operator.getitem:  # of a coalesced call
        (node,) = node.all_input_nodes
    return node


def link_order(ready: Sequence[int], taken: Sequence[int]) -> list[int]:
    """The order in which the link takes buckets that become ready in this order, so that the next
    forward waits least: always the last; or, of those that take long, none while others come.

    The order is fixed, what collectives take is not: a link that is sooner free than predicted
    stands still until the next bucket in order is there, also if others are. So it is the order
    that does best over all that they may take.

    >>> link_order([5, *range(8, 48, 2)], [9, *[2] * 20])[-1]  # a head would hold up all others
    0
    """
    orders: dict[tuple[int, ...], None] = {}
    for scaled in (_scaled(taken, percent) for percent in _TRIED):
        lengths = sorted(set(scaled), reverse=True)
        for longest in lengths[:: -(-len(lengths) // _LENGTHS) or 1]:
            orders[tuple(last_first(ready, scaled, longest))] = None
    truths = [_scaled(taken, percent) for percent in _MAY_TAKE]

    def waited_in_all(order: tuple[int, ...]) -> int:
        return sum(waited(ready, truth, order) for truth in truths)

    best: tuple[int, ...] = min(orders, key=waited_in_all, default=())
    return list(best)


def _scaled(taken: Sequence[int], percent: int) -> list[int]:
    return [ns * percent // 100 for ns in taken]


def waited(ready: Sequence[int], taken: Sequence[int], order: Sequence[int]) -> int:
    """How long the next forward waits for its parameters. It needs them in the reverse of the order
    in which backward made their gradients, and takes half as long as that did."""
    landed = [0] * len(ready)
    now = 0
    for bucket in order:
        now = landed[bucket] = max(now, ready[bucket]) + taken[bucket]
    began = now = ready[-1]
    for bucket in reversed(range(len(ready))):
        now = max(now, landed[bucket])
        if bucket:
            now += (ready[bucket] - ready[bucket - 1]) // 2
    return now - began


def last_first(ready: Sequence[int], taken: Sequence[int], longest: int) -> list[int]:
    """The order in which a link takes what becomes ready in this order: always the last; but what
    takes more than `longest` only while nothing else comes.

    >>> last_first([0, 2, 3, 4], [3, 3, 3, 3], longest=3)
    [0, 2, 3, 1]
    """
    order: list[int] = []
    waiting: list[int] = []
    now = 0
    coming = 0
    while len(order) < len(ready):
        while coming < len(ready) and ready[coming] <= now:
            waiting.append(coming)
            coming += 1
        is_next = coming < len(ready)
        if not waiting:
            now = ready[coming]
            continue
        ends = now + taken[waiting[-1]]
        if is_next and taken[waiting[-1]] > longest and ready[coming] < ends:
            now = ready[coming]
            continue
        order.append(waiting.pop())
        now = ends
    return order
