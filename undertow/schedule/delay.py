"""A base order in which work that can wait comes after the collectives that are waited for.

In a captured backward pass the gradient of a weight is computed before that of the activation, and
the collective that the next layer needs (a tensor-parallel reduction, an exchange of experts, the
last reduction of the step) starts only after both. Behind such a blocking start nothing is left to
hide it. Here the tasks shortly before it that it does not depend on are put behind it, as much of
them as it takes to cover it.
"""

from __future__ import annotations

from undertow.program import Kind, Order, Program
from undertow.schedule.facts import Facts


def delayed_order(facts: Facts) -> Order:
    """The captured order with independent work moved behind blocking starts; legal, since what
    moves takes all that depends on it along."""
    program = facts.program
    order: list[int] = []
    begin = 0
    for start in _blocking_starts(facts):
        moved = _independent_before(program, start, begin)
        behind = set(moved)
        order += [task for task in range(begin, start) if task not in behind]
        order.append(start)
        order += moved
        begin = start + 1
    order += range(begin, len(program))
    return Order(tuple(order))


def _blocking_starts(facts: Facts) -> list[int]:
    """The starts to put work behind: those that compute waits for and, of those at the end of the
    step that nothing waits for, the last one, behind which all others have been sent."""
    starts = [start for start in facts.program.starts if _is_blocking(facts, start)]
    end = len(facts.program)
    last = facts.program.starts[-1:]
    return [start for start in starts if facts.first_use[start] < end or start in last]


def _is_blocking(facts: Facts, start: int) -> bool:
    """Whether compute must produce its input first and needs its result before it can be done."""
    used = facts.compute_before[facts.first_use[start]]
    cover = used - facts.compute_before[start]
    before = facts.program.predecessors[start]
    is_produced = any(facts.unit_of[source] != start for source in before)
    return is_produced and cover < facts.program.tasks[start].ns


def _independent_before(program: Program, start: int, begin: int) -> list[int]:
    """Tasks before `start`, not before position `begin`, that it does not depend on: those nearest
    to it, until their compute covers it."""
    needed = set(program.predecessors[start])
    found: list[int] = []
    cover = 0
    for task in range(start - 1, begin - 1, -1):
        if cover >= program.tasks[start].ns:
            break
        if task in needed:
            needed.update(program.predecessors[task])
        else:
            found.append(task)
            if program.tasks[task].kind is Kind.COMPUTE:
                cover += program.tasks[task].ns
    return found[::-1]
