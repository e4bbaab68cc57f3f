"""Which tasks to divide with a collective: enough work to hide it, and as little else as possible.

Dividing a task costs something (smaller kernels, weights read again), and so does putting the
pieces of a result together for somebody who needs it whole. What must be divided is the work next
to the chosen collectives that their pieces run under; where that ends is the cheapest border, a
minimum cut between it and what stays whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from undertow.program import Kind, Lifetime, OpClass, Program, ProgramBuilder, Work
from undertow.schedule.min_cut import ENDLESS, CutGraph
from undertow.schedule.splits import (
    Combine,
    PartKind,
    PriceProgram,
    Split,
    Splittable,
    split,
)

_COVER_PERMILLE = 1200  # of a collective's time: so much work is divided before and after it


def choose_split(
    program: Program,
    starts: Iterable[int],
    pieces: int,
    splittable: Splittable,
    price: PriceProgram | None,
) -> Split | None:
    """These collectives in so many pieces, with the work around them that it takes."""
    chosen = [start for start in starts if divides(splittable, start, pieces)]
    reachable = _reachable(program, chosen, pieces, splittable)
    if not chosen:
        return None
    widest = _named(program, reachable, pieces)
    extra = _extra_ns(program, widest, splittable, price)
    needed = _needed(program, chosen, reachable, splittable)
    kept = _cheapest(program, reachable, needed, extra, _Joins(program, price), splittable)
    return _named(program, kept, pieces)


def divides(splittable: Splittable, task: int, pieces: int) -> bool:
    """Whether a task can run in so many pieces."""
    division = splittable.divisions.get(task)
    return division is not None and division.rows % pieces == 0


def _named(program: Program, tasks: Sequence[int], pieces: int) -> Split:
    return Split(pieces, tuple(program.tasks[task].name for task in tasks))


def _reachable(
    program: Program, chosen: Sequence[int], pieces: int, splittable: Splittable
) -> list[int]:
    """All tasks that pieces of the chosen collectives can lead to or come from, without another
    collective in between."""
    found: set[int] = set(chosen)
    up, down = _closures(program, chosen, splittable)
    found |= up | down
    for task in sorted(found):
        for user in splittable.users.get(task, ()):
            if splittable.divisions[user].combine is Combine.ADD:
                found.add(user)
    return sorted(
        task
        for task in found
        if program.tasks[task].kind in (Kind.COMPUTE, Kind.START)
        and divides(splittable, task, pieces)
    )


def _closures(
    program: Program, chosen: Sequence[int], splittable: Splittable
) -> tuple[set[int], set[int]]:
    """What computes the inputs of these collectives, and what uses their results."""
    is_chosen = set(chosen)
    up: set[int] = set()
    todo = list(chosen)
    while todo:
        task = todo.pop()
        for given in splittable.divisions[task].inputs:
            source = given.source
            is_new = given.is_aligned and source in splittable.divisions and source not in up
            if is_new and program.tasks[source].kind is not Kind.START:
                up.add(source)
                todo.append(source)
    down: set[int] = set()
    todo = [wait for start in chosen for wait in program.waits_of[start]]
    while todo:
        for user in splittable.users.get(todo.pop(), ()):
            is_other = program.tasks[user].kind is Kind.START and user not in is_chosen
            if user not in down and not is_other:
                down.add(user)
                if splittable.divisions[user].combine is not Combine.ADD:
                    todo.append(user)
    return up, down


def _needed(
    program: Program, chosen: Sequence[int], reachable: Sequence[int], splittable: Splittable
) -> set[int]:
    """The chosen collectives, and next to each as much work as it takes to cover it."""
    allowed = set(reachable)
    found = set(chosen)
    for start in chosen:
        cover = program.tasks[start].ns * _COVER_PERMILLE // 1000
        sources = [given.source for given in splittable.divisions[start].inputs]
        _cover(program, allowed, found, cover, sources, lambda task: _sources(splittable, task), -1)
        waits = list(program.waits_of[start])
        _cover(program, allowed, found, cover, waits, lambda task: _users(splittable, task), 1)
    return found


def _sources(splittable: Splittable, task: int) -> list[int]:
    division = splittable.divisions.get(task)
    if division is None:
        return []
    return [given.source for given in division.inputs if given.is_aligned and given.source >= 0]


def _users(splittable: Splittable, task: int) -> list[int]:
    division = splittable.divisions.get(task)
    if division is not None and division.combine is Combine.ADD:
        return []
    return splittable.users.get(task, [])


def _cover(
    program: Program,
    allowed: set[int],
    found: set[int],
    cover: int,
    first: Iterable[int],
    neighbours: Callable[[int], list[int]],
    sign: int,
) -> None:
    """Add tasks to `found`, the nearest in captured order first, until they take `cover`."""
    seen = set(first)
    heap = [(sign * task, task) for task in seen if task >= 0]
    heapq.heapify(heap)
    while heap and cover > 0:
        _, task = heapq.heappop(heap)
        if task in allowed:
            found.add(task)
            if program.tasks[task].kind is Kind.COMPUTE:
                cover -= program.tasks[task].ns
        elif program.tasks[task].kind not in (Kind.VIEW, Kind.WAIT):
            continue
        if program.tasks[task].kind is Kind.START:
            continue
        for other in neighbours(task):
            if other not in seen:
                seen.add(other)
                heapq.heappush(heap, (sign * other, other))


def _extra_ns(
    program: Program, widest: Split, splittable: Splittable, price: PriceProgram | None
) -> dict[int, int]:
    """Per task, how much longer it takes in pieces, if everything that can be is divided."""
    divided = split(program, [widest], splittable, price)
    took: dict[int, int] = {}
    for part, task in zip(divided.parts, divided.program.tasks, strict=True):
        if part.kind in (PartKind.PIECE, PartKind.SUM):
            took[part.task] = took.get(part.task, 0) + task.ns
    launch = program.machine.launch_ns * (widest.pieces - 1)
    return {
        task: max(ns - program.tasks[task].ns, 0) + launch * program.tasks[task].host_launches
        for task, ns in took.items()
    }


class _Joins:
    """What it takes to put results of some size together, asked once for each size."""

    def __init__(self, program: Program, price: PriceProgram | None) -> None:
        sizes = sorted({buffer.nbytes for buffer in program.buffers})
        builder = ProgramBuilder("joins")
        for size in sizes:
            pieces, whole = builder.input(f"pieces{size}", size), builder.output(f"{size}", size)
            work = Work("aten.cat", OpClass.COPY, 0, size, size, "bfloat16")
            builder.compute(f"cat{size}", reads=[pieces], writes=[whole], work=work)
        made = replace(builder.build(), machine=program.machine)
        priced = price(made) if price else made
        self.ns = {size: task.ns for size, task in zip(sizes, priced.tasks, strict=True)}


def _cheapest(
    program: Program,
    reachable: Sequence[int],
    needed: set[int],
    extra: dict[int, int],
    joins: _Joins,
    splittable: Splittable,
) -> list[int]:
    """The needed tasks and those others that it is cheaper to divide than to leave whole."""
    graph = CutGraph()
    node_of = {task: graph.node() for task in reachable}
    readers = _readers(program, set(reachable))
    for task in reachable:
        graph.arc(node_of[task], graph.SINK, extra.get(task, 0))
        if task in needed:
            graph.arc(graph.SOURCE, node_of[task], ENDLESS)
        if splittable.divisions[task].combine is Combine.ADD:
            continue
        for buffer in program.tasks[task].writes:
            join = graph.node()
            graph.arc(node_of[task], join, joins.ns[program.buffers[buffer].nbytes])
            whole = program.buffers[buffer].lifetime is Lifetime.OUTPUT
            users = [] if whole else readers.get(buffer, [])
            for user in users:
                fits = user in node_of and _takes_pieces(splittable, user, buffer)
                graph.arc(join, node_of[user] if fits else graph.SINK, ENDLESS)
            if whole:
                graph.arc(join, graph.SINK, ENDLESS)
    inside = graph.source_side()
    return [task for task in reachable if node_of[task] in inside]


def _takes_pieces(splittable: Splittable, task: int, buffer: int) -> bool:
    given = [given for given in splittable.divisions[task].inputs if given.buffer == buffer]
    return bool(given) and all(one.is_aligned for one in given)


def _readers(program: Program, tasks: set[int]) -> dict[int, list[int]]:
    """Buffers of these tasks -> who reads their bytes."""
    made = {buffer for task in tasks for buffer in program.tasks[task].writes}
    found: dict[int, list[int]] = {}
    for i, task in enumerate(program.tasks):
        if task.kind not in (Kind.VIEW, Kind.WAIT):
            for buffer in task.reads:
                if buffer in made:
                    found.setdefault(buffer, []).append(i)
    return found
