"""The one file that imports Inductor: its kernels for our schedules, and our schedules inside it.

The backend gives it what is computed between two collectives (`compile_region`). Who compiles with
Inductor can have a post-grad pass of ours (`as_inductor_pass`). Its scheduler may reorder what it
is given, so the pass pins what the schedule relies on by control dependencies: the work behind
which a collective is hidden comes after its start and before its wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from undertow.cache import source_digest
from undertow.capture.schema import nodes_in
from undertow.cost.agreed import Agree
from undertow.cost.cluster import Cluster
from undertow.errors import ProgramError
from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.convert import GroupRanks, ModuleOf
from undertow.graph.describe import op_class
from undertow.graph.schedule_graph import Estimate, Merge, schedule_nodes
from undertow.program.model import OpClass
from undertow.schedule.limits import Limits, limits_of
from undertow.schedule.manual import Entry
from undertow.schedule.plan import Plan

# Inductor calls libraries for these and fuses nothing across them, so that pinning costs nothing.
_ANCHORS = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)

_NATIVE = (".c", ".h", ".so", ".pyd")


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
        module_of: ModuleOf | None = None,
    ) -> None:
        self._agree, self._manual, self._module_of = agree, manual, module_of
        self._cluster, self._estimate, self._limits = cluster, estimate, limits
        self._merge, self._groups, self._pin = merge, groups, pin
        self._split = split
        self.plans: list[Plan] = []

    def __call__(self, graph: fx.Graph) -> None:
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
            module_of=self._module_of,
        )
        self.plans.append(plan)
        if self._pin:
            pin(graph)

    def uuid(self) -> str | None:
        """What the result depends on, beside the graph; None, which keeps Inductor from caching,
        where a function that we cannot see into has a say."""
        if self._estimate is not None or self._module_of is not None:
            return None
        ours = source_digest(_sources(Path(__file__).parents[1]))
        world = dist.get_world_size() if dist.is_initialized() else 0
        groups = sorted((self._groups or {}).items())
        asked = self._merge, self._split, self._manual, self._pin
        choices = (self._cluster, self._limits, asked, groups, world)
        return f"{ours} {choices!r}"


def _sources(here: Path) -> list[Path]:
    """All that a schedule is made by: Python, and the native core as it was built."""
    rooms = ("program", "cost", "schedule", "capture", "graph", "native")
    native = [path for path in (here / "native").iterdir() if path.suffix in _NATIVE]
    return [*(here / room for room in rooms), *sorted(native)]


def as_inductor_pass(
    cluster: Cluster | str | None = None,
    *,
    estimate: Estimate | None = None,
    limits: Limits | str | None = None,
    merge: Merge = True,
    groups: GroupRanks | None = None,
    pin: bool = True,
    agree: Agree | None = None,
    manual: Sequence[Entry] = (),
    split: bool = True,
    module_of: ModuleOf | None = None,
) -> UndertowPass:
    """Our schedule as a post-grad pass of Inductor; the options are those of `schedule_graph` that
    do not belong to one graph alone: `plan` and `donated` do.

    With `pin`, control dependencies keep Inductor's scheduler from undoing the order.

        torch._inductor.config.post_grad_custom_post_pass = as_inductor_pass("8xh100x8")
        step = torch.compile(step)
    """
    target = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    options = merge, groups, pin, agree, manual, split, module_of
    return UndertowPass(target, estimate, limits_of(limits) or Limits(), *options)


def decompositions() -> dict[Any, Any]:
    """What Inductor wants to see taken apart. Random numbers are not: they are drawn as in eager
    execution."""
    from torch._inductor import config, lowering  # noqa: F401  which decompositions ask
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        table: dict[Any, Any] = select_decomp_table()
    return table


def simplify(gm: fx.GraphModule) -> fx.GraphModule:
    """A joint graph or one without backward, after the rewrites that Inductor makes of it before it
    is cut."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with config.patch(fallback_random=True):
        found: fx.GraphModule = joint_graph_passes(gm)
    return found


def compile_region(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A graph that only computes, on kernels of Inductor: it takes its inputs in a list, which it
    empties, and has `source_code`."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # Of its own: what is known of the inputs of the graph around it does not hold for its inputs.
    context = TracingContext(detect_fake_mode(list(inputs)))
    (output,) = gm.graph.find_nodes(op="output")
    wanted = [node.meta["val"].stride() for node in output.args[0]]
    laid_out = TracingContext.report_output_strides
    with tracing(context), laid_out() as strides, config.patch(fallback_random=True):
        compiled = compile_fx_inner(gm, inputs)
    for place, (found, expected) in enumerate(zip(strides or (), wanted, strict=False)):
        if found is not None and tuple(found) != tuple(expected):
            raise ProgramError(
                f"Inductor gives result {place} of a region the strides {tuple(found)} and not "
                f"{tuple(expected)}"
            )
    return compiled


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
