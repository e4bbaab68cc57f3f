"""The simple passes: starts up, waits down. They move everything as far as it goes within the
limits; the iterative passes move only what is exposed, and only as far as needed."""

from __future__ import annotations

from undertow.program import Order, Program, simulate
from undertow.schedule.early_starts import Edges, raise_all
from undertow.schedule.late_waits import sink_all
from undertow.schedule.limits import Limits


def raise_starts(program: Program, order: Order, limits: Limits) -> Order:
    """Each start, with the cheap producers that only serve it, as early as hazards allow."""
    raised = raise_all(program, order, limits.fixed_for(program), Edges(program))
    return shortest(program, order, raised)


def sink_waits(program: Program, order: Order, limits: Limits) -> Order:
    """Each wait as late as its first real user."""
    return shortest(program, order, sink_all(program, order, limits.fixed_for(program)))


def shortest(program: Program, *orders: Order) -> Order:
    """The order with the shortest step; among equals the first, unless a later one exposes less.

    On a machine that is bound by launches, or on which communication slows compute, more overlap
    can make the step longer; then the incoming order stays.
    """
    timelines = [simulate(program, order) for order in dict.fromkeys(orders)]
    return min(timelines, key=lambda timeline: (timeline.total_ns, timeline.exposed_ns)).order
