"""`codegen="inductor"`: our schedule, Inductor's kernels.

Inductor traces, cuts and lowers; our pass schedules each of its graphs and pins the order. What is
written to the folder of `show` is the scheduled graph that Inductor was given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from undertow.backend.adapt import adapt
from undertow.backend.agree import agree_on
from undertow.backend.artefacts import leave_module, leave_plan, title
from undertow.backend.options import BackendOptions
from undertow.backend.pipeline import plan_for
from undertow.codegen.module import write_module
from undertow.cost.cluster import Cluster
from undertow.graph.convert import convert
from undertow.graph.inductor_bridge import UndertowPass, compile_with_inductor
from undertow.graph.nodes import name_modules
from undertow.runtime import job
from undertow.runtime.notices import counts, say_once
from undertow.schedule.plan import Plan


def compile_through_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], label: str, options: BackendOptions
) -> Callable[..., Any]:
    """A graph of Dynamo, compiled by Inductor in the order that we decide."""
    if options.is_measuring:
        say_once(
            "measuring with inductor",
            'cluster="measure" cannot time the kernels of Inductor: with codegen="inductor" costs '
            "are those of the cluster that the job looks like",
        )
    device = job.device_of([*inputs, *gm.parameters()])
    given = options.cluster
    cluster = given if isinstance(given, Cluster) else job.guess_cluster(device)
    numbers = itertools.count()
    place = options.plan
    saved = None if place is None else lambda program: plan_for(program, place, label)

    def scheduled(graph: fx.Graph, plan: Plan) -> None:
        counts["graphs"] += 1
        name_modules(graph)
        program = convert(graph).program
        agree_on(program, options.timeout)
        part = f"{label}.inductor{next(numbers)}"
        leave_plan(options.save, part, plan)
        if options.show is not None:
            # A module of a copy: a graph knows its module, and Inductor's must stay the one.
            copied = fx.Graph()
            copied.output(copied.graph_copy(graph, {}))
            gm = fx.GraphModule(graph.owning_module or {}, copied)
            leave_module(options.show, part, write_module(gm, title(part, program, None)).source)

    scheduling = UndertowPass(
        cluster,
        options.estimate,
        options.memory,
        options.merge,
        None,
        pin=True,
        split=options.split or place is not None,  # as a given Plan has it
        after=scheduled,
        plan_for=saved,
        before=lambda graph: adapt(graph, options, in_place=False),
    )
    return compile_with_inductor(gm, inputs, scheduling)
