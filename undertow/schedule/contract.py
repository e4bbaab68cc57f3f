"""The same Program with several of its tasks as one: in which order, and with which hazards.

Solvers do this for every bucketing that they try, so what does not change is carried over.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from undertow.program import Buffer, Program, Task
from undertow.program.flat import step_of
from undertow.program.model import Edges, IntArray, made_of_edges

if TYPE_CHECKING:
    from undertow.native.core import Step


def contracted_order(
    program: Program, leader: Sequence[int], members: dict[int, list[int]]
) -> tuple[list[int], set[int]]:
    """The captured order with every task at the place of the one that leads it (itself, if nobody
    does), or later if what its members need comes later; and the members of groups that close a
    cycle. Of the tasks that are ready the first in captured order comes first."""
    step = step_of(program)
    order = _ordered(program, leader, members) if step is None else _natively(step, leader)
    placed = set(order)
    return order, {task for group, m in members.items() if group not in placed for task in m[1:]}


def _natively(step: Step, leader: Sequence[int]) -> list[int]:
    order = np.empty(len(leader), dtype=np.int64)
    placed = step.contracted(array("q", leader), order)
    found: list[int] = order[:placed].tolist()
    return found


def _ordered(program: Program, leader: Sequence[int], members: dict[int, list[int]]) -> list[int]:
    successors, predecessors = program.successors, program.predecessors
    successors_of, after_all = successors.__getitem__, chain.from_iterable
    missing = list(map(len, predecessors))
    for first, group in members.items():
        edges = [source for member in group for source in predecessors[member]]
        missing[first] = sum([leader[source] != first for source in edges])
    order: list[int] = []
    late: list[int] = []  # tasks that became ready after their place was passed; a heap
    for place, first in enumerate(leader):
        if first != place or missing[place]:
            continue
        task = place
        while True:
            order.append(task)
            led = members.get(task)
            follow = successors[task] if led is None else after_all(map(successors_of, led))
            for after in follow:
                target = leader[after]
                if target != task:
                    left = missing[target] = missing[target] - 1
                    if not left and target < place:
                        heappush(late, target)
            if not late:
                break
            task = heappop(late)
    return order


def contracted(
    program: Program,
    now_at: Sequence[int] | IntArray,
    tasks: tuple[Task, ...],
    buffers: tuple[Buffer, ...] | None = None,
) -> Program:
    """The Program of `tasks`, which stand for those of old: task i is now at `now_at[i]`. Of the
    hazards between two of them the strongest is kept."""
    edges, place = program.edges, np.asarray(now_at, dtype=np.int64)
    src, dst = place[edges.src], place[edges.dst]
    between = np.flatnonzero(src != dst)
    edges = Edges(src[between], dst[between], edges.strength[between], edges.buffers[between])
    kept = program.buffers if buffers is None else buffers
    found = strongest(edges, len(tasks))
    return made_of_edges(program.name, tasks, kept, program.streams, found, program.machine)


def strongest(edges: Edges, tasks: int) -> Edges:
    """Of the edges between any two of so many tasks the strongest, of those the first; sorted."""
    pairs = edges.dst * tasks + edges.src
    order = np.argsort(pairs * 4 - edges.strength, kind="stable")
    order = order[np.diff(pairs[order], prepend=-1) != 0]
    return Edges(edges.src[order], edges.dst[order], edges.strength[order], edges.buffers[order])
