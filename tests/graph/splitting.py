"""Helpers for tests of splits."""

from __future__ import annotations

from torch import fx

from undertow.graph.convert import GroupRanks, convert
from undertow.graph.rewrite import rewrite
from undertow.graph.split import divide
from undertow.graph.splittable import find_row_work
from undertow.program import Kind, Order, Program, verify
from undertow.schedule.buckets import Merged
from undertow.schedule.splits import Divided, Split, Splittable, split


def everything(program: Program, splittable: Splittable, pieces: int) -> Split:
    """All that can be divided into so many pieces."""
    return Split(
        pieces,
        tuple(
            program.tasks[task].name
            for task, division in splittable.divisions.items()
            if program.tasks[task].kind in (Kind.COMPUTE, Kind.START)
            and division.rows % pieces == 0
        ),
    )


def split_all(graph: fx.Graph, pieces: int, groups: GroupRanks | None = None) -> Divided:
    """Divide everything that can be, in the order in which it is laid out."""
    converted = convert(graph, groups)
    work = find_row_work(converted)
    one = everything(converted.program, work.splittable, pieces)
    divided = split(converted.program, [one], work.splittable)
    order = Order.captured(divided.program)
    verify(divided.program, order)
    alone = tuple((i,) for i in range(len(divided.program)))
    rewrite(divide(work, divided), Merged(divided.program, (), alone), order)
    return divided
