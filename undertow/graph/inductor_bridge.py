"""Our schedule inside PyTorch's own compiler: a post-grad pass for Inductor.

This is the one file that imports Inductor. Its scheduler may reorder what it is given, so the pass
pins what the schedule relies on by control dependencies: the work behind which a collective is
hidden comes after its start and before its wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from undertow.cache import source_digest
from undertow.capture import partition
from undertow.capture.partition import tag_gathers
from undertow.capture.schema import nodes_in
from undertow.cost.agreed import Agree
from undertow.cost.cluster import Cluster
from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.convert import GroupRanks, convert
from undertow.graph.describe import op_class
from undertow.graph.schedule_graph import Estimate, Merge, schedule_nodes
from undertow.program.model import OpClass, Program
from undertow.schedule.limits import Limits
from undertow.schedule.manual import Entry
from undertow.schedule.plan import Plan

# Inductor calls libraries for these and fuses nothing across them, so that pinning costs nothing.
_ANCHORS = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)


class UndertowPass(CustomGraphPass):
    """A pass for `torch._inductor.config.post_grad_custom_post_pass`.

    `plans` are those of the graphs that were compiled with it, in order; graphs that Inductor takes
    from its cache do not come here.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        estimate: Estimate | None,
        limits: Limits,
        merge: Merge,
        groups: GroupRanks | None,
        pin: bool,
        agree: Agree | None = None,
        manual: Sequence[Entry] = (),
        split: bool = True,
        after: Callable[[fx.Graph, Plan], None] | None = None,
        plan_for: Callable[[Program], Plan] | None = None,
        before: Callable[[fx.Graph], object] | None = None,
    ) -> None:
        self._agree, self._manual = agree, manual
        self._cluster, self._estimate, self._limits = cluster, estimate, limits
        self._merge, self._groups, self._pin = merge, groups, pin
        self._split = split
        self._after = after  # called with each graph that was scheduled
        self._plan_for = plan_for  # finds the Plan to apply to a graph instead of solving
        self._before = before  # called with each graph that is about to be
        self.plans: list[Plan] = []

    def __call__(self, graph: fx.Graph) -> None:
        if self._before is not None:
            self._before(graph)
        plan = schedule_nodes(
            graph,
            cluster=self._cluster,
            estimate=self._estimate,
            limits=self._limits,
            merge=self._merge,
            split=self._split,
            groups=self._groups,
            agree=self._agree,
            manual=self._manual,
            plan=self._given(graph),
        )
        self.plans.append(plan)
        if self._after is not None:
            self._after(graph, plan)
        if self._pin:
            pin(graph)

    def _given(self, graph: fx.Graph) -> Plan | None:
        """The Plan to apply to a graph."""
        if self._plan_for is None:
            return None
        program = convert(graph, self._groups).program
        return self._plan_for(program) if program.starts else None

    def uuid(self) -> str | None:
        """What the result depends on, beside the graph; None, which keeps Inductor from caching,
        where a function that we cannot see into has a say, or wants to see every graph."""
        if any(f is not None for f in (self._estimate, self._after, self._plan_for)):
            return None
        here = Path(__file__).parents[1]
        ours = source_digest([here / room for room in ("program", "cost", "schedule", "graph")])
        world = dist.get_world_size() if dist.is_initialized() else 0
        groups = sorted((self._groups or {}).items())
        asked = self._merge, self._split, self._manual, self._pin
        choices = (self._cluster, self._limits, asked, groups, world)
        return f"{ours} {choices!r}"


def as_inductor_pass(
    cluster: Cluster | str | None = None,
    *,
    estimate: Estimate | None = None,
    limits: Limits | None = None,
    merge: Merge = True,
    groups: GroupRanks | None = None,
    pin: bool = True,
    agree: Agree | None = None,
    manual: Sequence[Entry] = (),
    split: bool = True,
) -> UndertowPass:
    """Our schedule as a post-grad pass of Inductor; the options are those of `schedule_graph`.

    With `pin`, control dependencies keep Inductor's scheduler from undoing the order.

        torch._inductor.config.post_grad_custom_post_pass = as_inductor_pass("8xh100x8")
        step = torch.compile(step)
    """
    target = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    options = merge, groups, pin, agree, manual, split
    return UndertowPass(target, estimate, limits or Limits(), *options)


class _GathersAgain(CustomGraphPass):
    """Marks, before Inductor cuts a joint graph, the gathers that are done again in backward."""

    def __call__(self, graph: fx.Graph) -> None:
        tag_gathers(graph)

    def uuid(self) -> str:
        return source_digest([Path(partition.__file__)])


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], scheduling: UndertowPass
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor, forward and backward, scheduled by our pass."""
    from torch._inductor.compile_fx import compile_fx

    patches = {"post_grad_custom_post_pass": scheduling, "joint_custom_pre_pass": _GathersAgain()}
    compiled: Any = compile_fx(gm, list(inputs), config_patches=patches)
    made: Callable[..., Any] = compiled
    return made


def pin(graph: fx.Graph) -> int:
    """Add the control dependencies that keep each collective around the work that hides it.

    Returns how many nodes got one. The graph must have its final order.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    needs = {node: OrderedSet(before) for node, before in hiding_order(graph).items()}
    preserve_node_ordering(graph, needs)
    return len(needs)


def hiding_order(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> nodes that must have begun before it, for every collective with work to hide it.

    The first anchor after a start follows it, and the first wait for it follows the last anchor
    before that wait; what lies between is held by these two.
    """
    nodes = list(graph.nodes)
    anchors = [i for i, node in enumerate(nodes) if op_class(node.target) in _ANCHORS]
    found: dict[int, list[fx.Node]] = {}
    for start, wait in _spans(nodes):
        between = _between(anchors, start, wait)
        if between:
            found.setdefault(between[0], []).append(nodes[start])
            found.setdefault(wait, []).append(nodes[between[-1]])
    return {nodes[i]: found[i] for i in sorted(found)}


def _spans(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Positions of every start and of the first wait for it."""
    start_of: dict[fx.Node, int] = {}  # a start, and what picks from it
    found: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if collective_call(node) is not None:
            start_of[node] = i
            continue
        source = next(iter(nodes_in(node.args)), None)
        if source is None or source not in start_of:
            continue
        if is_wait(node):
            found.setdefault(start_of[source], i)
        else:
            start_of[node] = start_of[source]
    return list(found.items())


def _between(sorted_places: list[int], low: int, high: int) -> list[int]:
    return sorted_places[bisect_right(sorted_places, low) : bisect_left(sorted_places, high)]
