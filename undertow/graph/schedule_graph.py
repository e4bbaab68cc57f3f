"""`schedule_graph`: from an FX graph to the same graph with its communication hidden.

Converts the graph to a Program, prices and solves that (or takes a Plan that was made before), and
writes the result back. Works on joint, forward, backward and whole-step graphs alike, and inside
other compilers (`undertow.graph.as_inductor_pass`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol, get_args

from torch import fx

from undertow.cost.agreed import Agree, agreed, captured_name, piece_share
from undertow.cost.cluster import Cluster
from undertow.cost.price import price, repricer
from undertow.cost.sources import FunctionSource, ModelSource, Source
from undertow.errors import CostError, OrderError, ProgramError, unknown_name
from undertow.garbage import without_collections
from undertow.graph.convert import Converted, GroupRanks, ModuleOf, convert
from undertow.graph.copies import block_copies
from undertow.graph.rewrite import rewrite
from undertow.graph.split import divide
from undertow.graph.splittable import RowWork, find_row_work
from undertow.program import Collective, Join, Program, Task
from undertow.schedule.buckets import How
from undertow.schedule.follow import Decisions, follow
from undertow.schedule.limits import Limits, limits_of
from undertow.schedule.manual import Entry, plan_manually
from undertow.schedule.plan import Plan, contradictions, refuse_beside
from undertow.schedule.shortfall import shortfalls
from undertow.schedule.solve import Solution, apply_solution, solution_of, solve
from undertow.schedule.splits import PriceProgram, Splitting

_log = logging.getLogger(__name__)
_DEVICE = "h100"  # of the cluster that is taken where none is given


Merge = bool | How
"""Whether collectives may become one: not at all, in one way only, or in any."""


class Estimate(Protocol):
    """What a node takes, in seconds; None leaves it to the model of the cluster.

    `nbytes` is given for a collective that does not exist yet: the bytes of its input on one rank.
    `node` is then one of those that it is made of.
    """

    def __call__(self, node: fx.Node, /, nbytes: int | None = None) -> float | None: ...


def schedule_graph(
    gm: fx.GraphModule,
    *,
    cluster: Cluster | str | None = None,
    estimate: Estimate | None = None,
    limits: Limits | str | None = None,
    plan: Plan | None = None,
    merge: Merge = True,
    split: bool = True,
    groups: GroupRanks | None = None,
    donated: Collection[str] = (),
    agree: Agree | None = None,
    manual: Sequence[Entry] = (),
    module_of: ModuleOf | None = None,
) -> tuple[fx.GraphModule, Plan]:
    """Hide the communication of a graph of operators with functional collectives behind its
    compute, in place; the Plan says what was decided and what it comes to.

    Nodes carry fake (or real) values in `meta["val"]`, as those of `make_fx`, AOTAutograd and
    `torch.export` do. `cluster` is what costs are for (default: one node of H100), `estimate`
    overrides its model for single nodes, `limits` bounds memory (default: not above the peak of the
    graph as it is), `plan` is applied as it is, without solving, and refused if it does not fit;
    its figures are then those for `cluster` and `estimate`, if either is given, and other options
    must not contradict it.
    `merge` says whether collectives may become one: `True` in any way, `"coalesced"` or `"copied"`
    in that way alone. Those that activations go through are split into pieces, with the work around
    them, where that makes the step shorter, unless `split` is False.
    `groups` gives names and ranks of groups that the running job does not know,
    `donated` the placeholders whose memory may be freed. If `estimate` measures, each rank gets
    numbers of its own: `agree`, a function of a list of numbers such as
    `undertow.runtime.agreement.Agreement`, then makes them the same before anything is decided.
    `manual` names modules whose collectives follow a fixed rule instead of being solved
    (`undertow.schedule.manual`), and `module_of` says of a node where it belongs, where the graph's
    own notes do not.

        gm, plan = undertow.schedule_graph(gm, cluster="8xh100x8", limits=Limits.parse("+5%"))
        print(plan.captured.exposed_ns, plan.planned.exposed_ns)
    """
    limits = limits_of(limits)
    if plan is not None:
        _check_beside(plan, limits, merge, manual)
    _check_donated(gm.graph, donated)
    made = schedule_nodes(
        gm.graph,
        cluster=cluster,
        estimate=estimate,
        limits=limits,
        plan=plan,
        merge=merge,
        split=split,
        groups=groups,
        donated=donated,
        agree=agree,
        manual=manual,
        module_of=module_of,
    )
    gm.recompile()
    return gm, made


def _check_beside(plan: Plan, limits: Limits | None, merge: Merge, manual: Sequence[Entry]) -> None:
    """Refuse what a Plan cannot do when it is applied as it is."""
    if not isinstance(plan, Plan):
        raise OrderError(
            f"plan is a {type(plan).__name__}; Plan.from_json makes a Plan of what to_json gave"
        )
    for option, own in contradictions(plan, limits, merge):
        raise refuse_beside(f"{option}=", own)
    if manual:
        raise refuse_beside("manual=", "is there already")


def _check_donated(graph: fx.Graph, donated: Collection[str]) -> None:
    if isinstance(donated, str):
        raise ProgramError(f"donated is the text {donated!r}; give a list of names")
    known = [node.name for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    for name in donated:
        if name not in known:
            raise ProgramError(f"donated: {unknown_name('placeholder', str(name), known)}")


@cache
def _say_once(sentence: str) -> None:
    """What a reader of predictions should know: each is said once in a process."""
    _log.warning("%s", sentence)


@without_collections
def schedule_nodes(
    graph: fx.Graph,
    *,
    cluster: Cluster | str | None = None,
    estimate: Estimate | None = None,
    limits: Limits | None = None,
    plan: Plan | None = None,
    merge: Merge = True,
    split: bool = True,
    groups: GroupRanks | None = None,
    donated: Collection[str] = (),
    agree: Agree | None = None,
    manual: Sequence[Entry] = (),
    module_of: ModuleOf | None = None,
    measured: Sequence[Source] = (),
    fuses: bool = True,
    decisions: Decisions | None = None,
) -> Plan:
    """`schedule_graph` for a graph without its module. `measured` sources are asked after
    `estimate` and before the model; `fuses` says that pointwise work will run fused; `decisions`
    are those of other ranks on what to issue, which are followed."""
    converted = convert(graph, groups, donated=donated, module_of=module_of)
    for note in converted.notes:
        _say_once(note)
    may_split = split and not manual and (plan is None or bool(plan.splits))
    work = find_row_work(converted) if may_split else None
    if plan is None:
        solution = decide(
            converted,
            cluster,
            estimate,
            limits or Limits(),
            merge,
            agree,
            manual,
            work,
            measured,
            fuses,
            decisions,
        )
    elif cluster is None and estimate is None:
        solution = _applied(converted.program, plan, work)
    else:
        solution = _applied_priced(converted, plan, work, cluster, estimate, measured, fuses)
    for sentence in shortfalls(solution.plan, solution.merged.program, solution.order):
        _log.warning("%s", sentence)
    if converted.program.starts or plan is not None:
        block_copies(graph)  # not before: what is refused leaves the graph as it was
        if solution.divided is not None:
            assert work is not None
            converted = divide(work, solution.divided)
        rewrite(converted, solution.merged, solution.order)
    return solution.plan


def _applied(program: Program, plan: Plan, work: RowWork | None) -> Solution:
    """What a Plan stands for where nobody says what it costs: its times are those that it was made
    with, its memory is counted."""
    splitting = Splitting(work.splittable) if work is not None else None
    counted = apply_solution(program, plan, _as_it_is, splitting)
    return replace(
        counted,
        plan=replace(
            plan,
            captured=replace(plan.captured, peak_nbytes=counted.plan.captured.peak_nbytes),
            planned=replace(plan.planned, peak_nbytes=counted.plan.planned.peak_nbytes),
        ),
    )


def _applied_priced(
    converted: Converted,
    plan: Plan,
    work: RowWork | None,
    cluster: Cluster | str | None,
    estimate: Estimate | None,
    measured: Sequence[Source],
    fuses: bool,
) -> Solution:
    """What a Plan stands for, with the figures for the costs at hand. Nothing is decided on these:
    ranks need not agree on them."""
    target = _cluster_of(cluster, converted.program)
    sources = (*sources_of(converted, estimate, target), *measured)
    program = _priced(converted.program, target, sources, fuses)
    splitting = None
    if work is not None and work.splittable:
        splitting = Splitting(work.splittable, _piece_pricer(target, sources))
    return apply_solution(program, plan, repricer(target, sources), splitting)


def decide(
    converted: Converted,
    cluster: Cluster | str | None,
    estimate: Estimate | None,
    limits: Limits,
    merge: Merge,
    agree: Agree | None = None,
    manual: Sequence[Entry] = (),
    work: RowWork | None = None,
    measured: Sequence[Source] = (),
    fuses: bool = True,
    decisions: Decisions | None = None,
) -> Solution:
    """Price and solve the Program of a graph; the graph stays as it is. `work` is what may be
    split, None for nothing."""
    program = converted.program
    cluster = _cluster_of(cluster, program)
    sources = (*sources_of(converted, estimate, cluster, agree), *measured)
    priced = _priced(program, cluster, sources, fuses)
    if not program.starts:  # nothing to hide: the captured order, with its figures
        solution = solve(priced, replace(limits, steps=0), should_merge=False)
        return replace(solution, plan=replace(solution.plan, limits=limits))
    reprice = repricer(cluster, sources) if merge else None
    priced = _only_merging(priced, merge)
    if manual:
        made = plan_manually(priced, manual, limits, reprice=reprice)
        for note in made.notes:
            _log.warning("manual plan: %s", note)
        return solution_of(priced, limits, made.merged, made.order, reprice)
    if decisions is not None:
        merged, order = follow(priced, decisions, limits, reprice)
        found = solution_of(priced, limits, merged, order, reprice)
        return replace(found, plan=_with_limit_of(found.plan, priced))
    splitting = None
    if work is not None and work.splittable:
        splitting = Splitting(work.splittable, _piece_pricer(cluster, sources))
    return solve(priced, limits, reprice=reprice, splitting=splitting)


def _with_limit_of(plan: Plan, program: Program) -> Plan:
    """What ranks must issue alike goes before the limit on memory: the Plan says what that took."""
    allowed, peak = plan.limits.allowed_peak(program), plan.planned.peak_nbytes
    if allowed is None or peak <= max(allowed, plan.captured.peak_nbytes):
        return plan
    return replace(plan, limits=replace(plan.limits, peak_bytes=peak, peak_ratio=None))


def _priced(program: Program, cluster: Cluster, sources: Sequence[Source], fuses: bool) -> Program:
    found = price(program, cluster, sources, fuses)
    for assumption in found.assumptions:
        _say_once(f"costs rest on an assumption: {assumption}")
    return found.program


def _piece_pricer(cluster: Cluster, sources: Sequence[Source]) -> PriceProgram:
    """Prices Programs with pieces, as `price` does."""

    def priced(program: Program) -> Program:
        return price(program, cluster, sources).program

    return priced


def sources_of(
    converted: Converted, estimate: Estimate | None, cluster: Cluster, agree: Agree | None = None
) -> tuple[Source, ...]:
    """A user's estimates as a source of costs for the tasks of this graph."""
    if estimate is None:
        return ()
    _check_estimate(estimate)
    source = _source(converted, estimate, cluster)
    return (source if agree is None else agreed(converted.program, source, agree, cluster),)


def _check_estimate(estimate: Estimate) -> None:
    wanted = "give a function of a node and nbytes=None that returns seconds or None"
    if not callable(estimate):
        raise CostError(f"estimate is {estimate!r}; {wanted}")
    try:
        signature = inspect.signature(estimate)
    except (TypeError, ValueError):  # of what is not Python
        return
    try:
        signature.bind(None)
        signature.bind(None, nbytes=0)
    except TypeError as error:
        raise CostError(
            f"estimate cannot be asked about a node and a size, estimate(node, nbytes=4096): "
            f"{error}; {wanted}"
        ) from error


def _as_it_is(task: Task, ranks: tuple[int, ...]) -> Task:
    """Where nobody asks what a Plan costs."""
    return task


def _only_merging(program: Program, merge: Merge) -> Program:
    """With collectives that may be merged in the way that was asked for only."""
    if isinstance(merge, bool):
        return program
    if merge not in get_args(How):
        raise OrderError(
            f"merge={merge!r} is no way to merge; give {' or '.join(get_args(How))}, True or False"
        )
    tasks = list(program.tasks)
    for start in program.starts:
        work = tasks[start].work
        if isinstance(work, Collective):
            join = Join(merge) if work.join in (Join.ANY, merge) else Join.ALONE
            tasks[start] = replace(tasks[start], work=replace(work, join=join))
    return replace(program, tasks=tuple(tasks))


def _source(converted: Converted, estimate: Estimate, cluster: Cluster) -> FunctionSource:
    """The user's function of nodes as one of tasks; a merged start has its first member's name.

    A piece of a compute node takes the share of it that it has in the cluster's model.
    """
    model = ModelSource(cluster)
    known = {
        task.name: (node, task)
        for node, task in zip(converted.nodes, converted.program.tasks, strict=True)
    }

    def seconds(task: Task, ranks: tuple[int, ...]) -> float | None:
        if captured_name(task.name) not in known:
            return None  # a copy of a bucket, or a question what joining pieces takes
        node, captured = known[captured_name(task.name)]
        if task.kind is not captured.kind:
            return None
        if isinstance(task.work, Collective) and task.work != captured.work:
            return estimate(node, nbytes=task.work.nbytes)
        if task.name == captured.name:
            return estimate(node)
        share = piece_share(model, task, captured)
        whole = None if share is None else estimate(node)
        return None if whole is None or share is None else whole * share

    return FunctionSource(seconds, name="estimate")


def _cluster_of(cluster: Cluster | str | None, program: Program) -> Cluster:
    if cluster is None:
        return _cluster_for(program)
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def _cluster_for(program: Program) -> Cluster:
    """One node that holds all ranks of the program's groups."""
    ranks = [rank for stream in program.streams for rank in stream.ranks]
    return _default_cluster(max(ranks, default=0) + 1)


@cache  # each is announced once
def _default_cluster(devices: int) -> Cluster:
    name = f"{_DEVICE}x{devices}"
    _log.warning("no cluster was given: costs are those of %s, one node; pass cluster=", name)
    return Cluster.parse(name)
