"""A base order in which work that can wait comes after the collectives that are waited for.

In a captured backward pass the gradient of a weight is computed before that of the activation, and
the collective that the next layer needs (a tensor-parallel reduction, an exchange of experts, the
last reduction of the step) starts only after both. Behind such a blocking start nothing is left to
hide it. Here the tasks shortly before it that it does not depend on are put behind it, as much of
them as it takes to cover it.
"""

from __future__ import annotations

from undertow.program import Order, Program
from undertow.program.model import COMPUTE, VIEW, WAIT
from undertow.schedule.facts import Facts


def delayed_order(facts: Facts) -> Order:
    """The captured order with independent work moved behind blocking starts; legal, since what
    moves takes all that depends on it along."""
    program = facts.program
    order: list[int] = []
    begin = 0
    for start, ns in _blocking_starts(facts):
        moved = _independent_before(program, start, begin, ns)
        behind = set(moved)
        order += [task for task in range(begin, start) if task not in behind]
        order.append(start)
        order += moved
        begin = start + 1
    order += range(begin, len(program))
    return Order(tuple(order))


def _blocking_starts(facts: Facts) -> list[tuple[int, int]]:
    """The starts to put work behind, and how much: those that compute waits for and, of those at
    the end of the step that nothing waits for, the last one, behind which all others have been
    sent. If that one waits for others (an all-reduce of what was scattered), the first of them."""
    program, end = facts.program, len(facts.program)
    if not program.starts:
        return []
    chain = _chain_up_to(program, program.starts[-1])
    chained = set(chain)
    found = []
    for start in program.starts:
        if start not in chained and facts.first_use[start] < end and _is_blocking(facts, start):
            found.append((start, program.tasks[start].ns))
        elif start == chain[0] and _is_blocking(facts, chain[-1]):
            found.append((start, sum(program.tasks[each].ns for each in chain)))
    return found


def _chain_up_to(program: Program, last: int) -> list[int]:
    """The collectives that come one after another with nothing but views between, up to `last`."""
    chain, task = [last], last
    while sources := program.predecessors[task]:
        task = sources[-1]
        kind = program.tasks[task].kind
        if kind is WAIT:
            task = program.tasks[task].start
            chain.append(task)
        elif kind is not VIEW:
            break
    return chain[::-1]


def _is_blocking(facts: Facts, start: int) -> bool:
    """Whether compute must produce its input first and needs its result before it can be done."""
    used = facts.compute_before[facts.first_use[start]]
    cover = used - facts.compute_before[start]
    before = facts.program.predecessors[start]
    is_produced = any(facts.unit_of[source] != start for source in before)
    return is_produced and cover < facts.program.tasks[start].ns


def _independent_before(program: Program, start: int, begin: int, ns: int) -> list[int]:
    """Tasks before `start`, not before position `begin`, that it does not depend on: those nearest
    to it, until their compute covers so much."""
    needed = set(program.predecessors[start])
    found: list[int] = []
    cover = 0
    for task in range(start - 1, begin - 1, -1):
        if cover >= ns:
            break
        if task in needed:
            needed.update(program.predecessors[task])
        else:
            found.append(task)
            if program.tasks[task].kind is COMPUTE:
                cover += program.tasks[task].ns
    return found[::-1]
