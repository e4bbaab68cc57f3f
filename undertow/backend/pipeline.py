"""From one graph (forward, backward or inference) to the function that runs it.

Schedule: decide on the graph's Program, write it back, price what will run. Agree: ranks compare
what they are about to issue. Write: the Python module. Measuring, where asked for, comes after.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from undertow.backend.adapt import adapt
from undertow.backend.agree import agree_on, agree_on_estimates, same_collectives
from undertow.backend.artefacts import (
    leave_module,
    leave_plan,
    leave_report,
    leave_timeline,
    notes,
    title,
)
from undertow.backend.carried import (
    has_flat_buckets,
    leave_reductions,
    start_last_first,
)
from undertow.backend.costs import Measured, kept_costs
from undertow.backend.kept import limits_beside
from undertow.backend.native import compile_native
from undertow.backend.options import BackendOptions
from undertow.backend.retime import Retimer, told
from undertow.backend.runner import Runner
from undertow.backend.scheduled import Part, Scheduled
from undertow.capture import torch_api
from undertow.codegen.kernels import CompiledGraph
from undertow.codegen.kernels_settings import Settings
from undertow.codegen.load import Run, load_module
from undertow.codegen.module import write_module
from undertow.cost.agreed import Agree
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.cost.sources import Source
from undertow.errors import OrderError, ProgramError
from undertow.graph.collectives import collective_call
from undertow.graph.convert import convert
from undertow.graph.nodes import copy_module, name_modules
from undertow.graph.schedule_graph import schedule_nodes, sources_of
from undertow.notices import counts, say_once
from undertow.program import Program, simulate
from undertow.program.serialize import load_json
from undertow.progress import Clock
from undertow.runtime import job
from undertow.runtime.yielding import let_compute_go_first
from undertow.schedule.follow import Decisions, decisions_of
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan, program_digest

_log = logging.getLogger(__name__)


def compile_part(gm: fx.GraphModule, part: Part, options: BackendOptions) -> Callable[..., Any]:
    """The function that runs this graph on a list of its inputs, which it empties."""
    compiled = _compiled(gm, part, options)
    if part.crossing is not None:
        # An error that was met on the way may lie in a cycle, and hold the frames that called this:
        # those hold gradients soon, which autograd then copies instead of handing them over.
        gc.collect()
    return compiled


def _compiled(gm: fx.GraphModule, part: Part, options: BackendOptions) -> Callable[..., Any]:
    counts["graphs"] += 1
    clock = Clock()
    name_modules(gm.graph)
    if adapt(gm.graph, options, is_carried=part.crossing is not None):
        gm.recompile()
    captured = _captured(gm, part)
    is_shared = isinstance(captured, Program) and bool(captured.starts)
    if is_shared:
        counts["yielding threads"] += let_compute_go_first()
    may_differ = is_shared and torch_api.job_store() is not None  # other ranks may decide otherwise
    pristine = copy_module(gm) if options.is_measuring or may_differ else gm
    known = _known(captured, options)
    measured = _kept(captured, options) if known is None else None
    clock.lap("prepare")
    scheduled = schedule(gm, captured, part, options, measured, known)
    clock.lap("schedule")
    if scheduled.program is not None and known is None:
        scheduled = _agreed(scheduled, pristine, options, measured)
    clock.lap("agree")
    run = _write(scheduled, options)
    clock.lap("write")
    told = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in clock.seconds.items())
    _log.info("%s: %s", part.label, told)
    is_new = options.is_measuring and measured is None and scheduled.plan is not None
    is_new = is_new and known is None  # other ranks may not run this graph: nobody to measure with
    if not is_new and not (options.timeline and scheduled.program is not None):
        return _boxed(run, part, scheduled.program)

    def again(costs: Measured) -> tuple[Scheduled, Run]:
        anew = schedule(copy_module(pristine), captured, part, options, costs)
        anew = _agreed(anew, pristine, options, costs)
        return anew, _write(anew, options)

    def rewritten(anew: Scheduled) -> Run:
        return _write(anew, options)

    runner = Runner(scheduled, run, options, again if is_new else None, rewritten)
    return _boxed(runner.call, part, scheduled.program)


_decided: dict[tuple[str, str], Decisions] = {}
"""What ranks have agreed to issue, by the collectives of a graph and how it is merged. A graph of
the same collectives that is compiled for other sizes issues them so too: other ranks may run on
with the graph that they have."""


def _captured(gm: fx.GraphModule, part: Part) -> Program | ProgramError:
    """The Program of the graph as it is, or why there is none."""
    try:
        return convert(gm.graph, name=part.label, donated=part.donated).program
    except ProgramError as error:
        return error


def _known(captured: Program | ProgramError, options: BackendOptions) -> Decisions | None:
    """What was agreed for a graph with the same collectives, if that can be followed."""
    if not _decided or options.plan is not None or isinstance(captured, ProgramError):
        return None
    found = _decided.get((same_collectives(captured), str(options.merge)))
    if found is not None:
        counts["followed"] += 1
    return found


def _agreed(
    scheduled: Scheduled, pristine: fx.GraphModule, options: BackendOptions, costs: Measured | None
) -> Scheduled:
    """A schedule that all ranks have agreed on: this one, or one that follows another rank's."""
    assert scheduled.program is not None
    captured, plan = scheduled.captured, scheduled.plan
    if captured is None or plan is None or plan.splits or options.plan is not None:
        agree_on(scheduled.program, options.timeout)
        return scheduled
    own = decisions_of(captured, plan)
    if scheduled.part.crossing is not None:  # starts were put in another sequence since
        own = own.as_issued(scheduled.program)
    others = agree_on(scheduled.program, options.timeout, captured, own)
    _decided[same_collectives(captured), str(options.merge)] = others or own
    if others is None:
        return scheduled
    say_once(
        "followed another rank",
        f"{scheduled.part.label} has other sizes here than on rank 0 of its group, and issues its "
        "collectives as that rank decided",
    )
    return schedule(copy_module(pristine), captured, scheduled.part, options, costs, others)


def _kept(captured: Program | ProgramError, options: BackendOptions) -> Measured | None:
    """Costs that an earlier run measured for this graph."""
    if not options.is_measuring or isinstance(captured, ProgramError) or not captured.starts:
        return None
    return kept_costs(captured, options.timeout)


def _write(scheduled: Scheduled, options: BackendOptions) -> Run:
    label, predicted = scheduled.part.label, scheduled.predicted
    run, source = _module(scheduled, options)
    leave_module(options.show, label, source)
    leave_module(options.report, label, source)
    leave_plan(options.save, label, scheduled.plan)
    leave_plan(options.report, label, scheduled.plan)
    leave_timeline(options.report, label, "predicted", predicted)
    return run


def _module(scheduled: Scheduled, options: BackendOptions) -> tuple[Run, str]:
    """The function that runs the graph, and the text of its module."""
    label, predicted = scheduled.part.label, scheduled.predicted
    native = None
    if options.codegen == "native":
        native = compile_native(
            scheduled.module,
            label,
            options.fusion,
            options.random,
            scheduled.retimer,
            keep_plan=options.is_measuring,
            settings=Settings(
                scheduled.part.spare,
                options.partition,
                options.before_fusion,
                options.after_fusion,
                options.check_memory,
            ),
        )
    heading = label if scheduled.program is None else title(label, scheduled.program, predicted)
    if native is not None:
        is_reordered = bool(getattr(native.compiled, "is_reordered", False))
        if isinstance(native.compiled, CompiledGraph):  # held no longer than it takes to time them
            scheduled.kernels, native.compiled.plan = native.compiled.plan, None
        heading += told(scheduled.retimer, is_reordered, label)
        leave_module(options.show, f"{label}.kernels", native.cpp, "cpp")
        leave_report(options.show, label, getattr(native.compiled, "report", None))
        return native.run, f'"""{heading}"""\n\n{native.python}'
    if options.codegen == "inductor":
        from undertow.backend.inductor import compile_inductor  # Inductor takes seconds to load

        made = compile_inductor(scheduled.module, label, heading, notes(predicted))
        leave_module(options.show, f"{label}.regions", made.regions)
        return made.run, made.python
    written = write_module(scheduled.module, heading, notes(predicted))
    return load_module(written, label), written.source


def _boxed(run: Run, part: Part, program: Program | None) -> Run:
    """Marked as taking its inputs in a list that it empties, so that nobody else holds them. Where
    it communicates, an error says that it may be another rank's."""
    starts = 0 if program is None else len(program.starts)

    def boxed(args: list[Any]) -> Any:
        try:
            return run(args)
        except RuntimeError as error:
            if starts:
                error.add_note(
                    f"undertow: this came up in {part.label}, which runs {starts} collectives; if "
                    "it is about a connection or a time limit, another rank has failed or left, "
                    "and its own error says why"
                )
            raise

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def schedule(
    gm: fx.GraphModule,
    captured: Program | ProgramError,
    part: Part,
    options: BackendOptions,
    measured: Measured | None = None,
    decisions: Decisions | None = None,
) -> Scheduled:
    """Decide on the graph's Program and write the decision back, in place."""
    if isinstance(captured, ProgramError):
        return _unscheduled(gm, part, captured)
    if not captured.starts:
        return Scheduled(part, gm, captured, captured)
    cluster = _cluster(gm.graph, options)
    fuses = options.fuses
    limits = _limits(options.memory, part)
    own: tuple[Source, ...] = ()
    if measured is not None:
        cluster = measured.on(cluster, captured)
        own = (measured.source(captured, cluster),)
    # Those that the next forward needs first are small: together they would come late.
    is_bucketed = part.crossing is not None and has_flat_buckets(gm.graph)
    plan = schedule_nodes(
        gm.graph,
        cluster=cluster,
        estimate=options.estimate,
        limits=limits,
        plan=None if options.plan is None else plan_for(captured, options.plan, part.label),
        merge=options.merge and not is_bucketed,
        # as a given Plan has it; what other ranks have decided is without splits
        split=(options.split or options.plan is not None) and decisions is None,
        donated=part.donated,
        agree=_agreeing(captured, options, decisions),
        measured=own,
        fuses=fuses,
        decisions=decisions,
    )

    def priced() -> tuple[Program, Sequence[Source]]:
        """The Program as it runs now, and what its costs are from."""
        running = convert(gm.graph, name=part.label, donated=part.donated)
        sources = (*sources_of(running, options.estimate, cluster), *own)
        program = price(running.program, cluster, sources, regions=fuses).program
        return (program if measured is None else measured.applied(program)), sources

    left = [] if part.crossing is None else leave_reductions(gm.graph, part.crossing)
    program, sources = priced()
    # What others have decided is in the sequence in which they issue it.
    if left and decisions is None and start_last_first(left, simulate(program)):
        program, sources = priced()
    gm.recompile()
    retimer = None
    if (
        options.codegen == "native" and options.plan is None
    ):  # a Plan that is given is followed as it is
        retimer = Retimer(
            cluster, tuple(sources), limits, None if measured is None else measured.kernels
        )
    return Scheduled(part, gm, program, captured, simulate(program), plan, retimer)


def _agreeing(
    captured: Program, options: BackendOptions, decisions: Decisions | None
) -> Agree | None:
    """How ranks make their estimates the same. Who follows what was decided waits for nobody: the
    others may run on with the graph that they have."""
    if options.estimate is None or decisions is not None:
        return None
    return agree_on_estimates(captured, options.timeout)


def _unscheduled(gm: fx.GraphModule, part: Part, error: ProgramError) -> Scheduled:
    """A graph that we cannot model runs as it was captured."""
    if any(collective_call(node) is not None for node in gm.graph.nodes):
        say_once("unscheduled", f"{part.label} runs in the order in which it was captured: {error}")
    else:
        counts["unscheduled without collectives"] += 1
    return Scheduled(part, gm)


def _cluster(graph: fx.Graph, options: BackendOptions) -> Cluster:
    if isinstance(options.cluster, Cluster):
        return options.cluster
    inputs = graph.find_nodes(op="placeholder")
    return job.guess_cluster(job.device_of(node.meta.get("val") for node in inputs))


def _limits(memory: Limits, part: Part) -> Limits:
    if part.peak_nbytes is not None:
        return replace(memory, peak_bytes=part.peak_nbytes)
    return limits_beside(memory, part.resident_nbytes)


def plan_for(program: Program, place: Path, label: str) -> Plan:
    """The saved Plan that was made for this graph."""
    wanted = program_digest(program)
    paths = sorted(place.glob("*.plan.json")) if place.is_dir() else [place]
    plans = [(path, Plan.from_json(load_json(path))) for path in paths]
    for _, plan in plans:
        if plan.program == wanted:
            return plan
    raise OrderError(
        f"{place} has no plan for {label}, whose program is {wanted}: it was made for another "
        f"model, other options or another version; plan anew, with options={{'save': ...}}"
    )
