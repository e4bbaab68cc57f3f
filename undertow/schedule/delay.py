"""A base order in which work that can wait comes after the collectives that are waited for.

In a captured backward pass the gradient of a weight is computed before that of the activation, and
the collective that the next layer needs (a tensor-parallel reduction, an exchange of experts, the
last reduction of the step) starts only after both. Behind such a blocking start nothing is left to
hide it. Here the tasks shortly before it that it does not depend on are put behind it, as much of
them as it takes to cover it. At the end of the step their own collectives then come last: a frugal
order puts only as much there as takes longer than those.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.program import Order, Program
from undertow.program.model import COMPUTE, START, VIEW, WAIT
from undertow.schedule.facts import Facts
from undertow.schedule.flat_facts import AnyFacts, FlatFacts


def delayed_order(facts: AnyFacts, *, is_frugal: bool = False) -> Order:
    """The captured order with independent work moved behind blocking starts; legal, since what
    moves takes all that depends on it along."""
    if isinstance(facts, FlatFacts):
        return facts.delayed(is_frugal)
    program = facts.program
    order: list[int] = []
    begin = 0
    for blocking in _blocking_starts(facts, is_frugal):
        start = blocking.start
        moved = _independent_before(program, blocking, begin)
        behind = set(moved)
        order += [task for task in range(begin, start) if task not in behind]
        order.append(start)
        order += moved
        begin = start + 1
    order += range(begin, len(program))
    return Order(tuple(order))


@dataclass(frozen=True, slots=True)
class _Blocking:
    """A start to put work behind."""

    start: int
    ns: int  # how much
    last_stream: int = -1  # at the end of a frugal step: where the work's own collectives come last


def _blocking_starts(facts: Facts, is_frugal: bool) -> list[_Blocking]:
    """Those that compute waits for and, of those at the end of the step that nothing waits for, the
    last one, behind which all others have been sent. If that one waits for others (an all-reduce of
    what was scattered), the first of them."""
    program, end = facts.program, len(facts.program)
    if not program.starts:
        return []
    chain = _chain_up_to(program, program.starts[-1])
    chained = set(chain)
    found = []
    for start in program.starts:
        if start not in chained and facts.first_use[start] < end and _is_blocking(facts, start):
            found.append(_Blocking(start, program.tasks[start].ns))
        elif start == chain[0] and _is_blocking(facts, chain[-1]):
            ns = sum(program.tasks[each].ns for each in chain)
            found.append(_Blocking(start, ns, program.tasks[chain[-1]].stream if is_frugal else -1))
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


def _independent_before(program: Program, blocking: _Blocking, begin: int) -> list[int]:
    """Tasks before a blocking start, not before position `begin`, that it does not depend on: those
    nearest to it, until their compute covers it, or as many as gain most."""
    needed = set(program.predecessors[blocking.start])
    found: list[int] = []
    cover = most = count = 0
    debt = 0  # what their own collectives add to the end of the step
    for index in range(blocking.start - 1, begin - 1, -1):
        if cover >= blocking.ns:
            break
        if index in needed:
            needed.update(program.predecessors[index])
            continue
        found.append(index)
        task = program.tasks[index]
        if task.kind is COMPUTE:
            cover += task.ns
        elif task.kind is START and task.stream == blocking.last_stream:
            debt += task.ns
        if cover - debt > most:
            most, count = cover - debt, len(found)
    if blocking.last_stream >= 0:
        del found[count:]
    return found[::-1]
