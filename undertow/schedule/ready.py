"""Topological orders: which tasks may come next, with the sequence of each group kept.

Every list scheduler here runs on `Ready`: a task is ready once all that must come before it is
placed, where beside the hazards the starts of one group keep the sequence of the incoming order, so
that no scheduler reorders a group's collectives behind the ranks' backs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from undertow.program import Order, Program
from undertow.schedule.sweep import next_in_group


class Ready:
    """Counts what each task still waits for. `extra` adds edges beside hazards and sequences."""

    def __init__(
        self,
        program: Program,
        order: Order,
        *,
        keep_sequences: bool = True,
        extra: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        self._successors = program.successors
        self._extra: dict[int, list[int]] = {}
        if keep_sequences:
            for start, following in next_in_group(program, order).items():
                self._extra.setdefault(start, []).append(following)
        for before, afters in (extra or {}).items():
            self._extra.setdefault(before, []).extend(afters)
        self._missing = list(map(len, program.predecessors))
        for afters in self._extra.values():
            for after in afters:
                self._missing[after] += 1
        self._order = order

    def first(self) -> list[int]:
        """What may come first, in the incoming order."""
        return [task for task in self._order.tasks if self._missing[task] == 0]

    def after(self, task: int) -> list[int]:
        """All that must come after `task`."""
        return [*self._successors[task], *self._extra.get(task, ())]

    def place(self, task: int) -> list[int]:
        """`task` has its place; what became ready by that."""
        missing, ready = self._missing, []
        for after in self.after(task):
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
        return ready


def order_by(program: Program, ready: Ready, rank: Sequence[int]) -> Order | None:
    """Always the ready task of the lowest rank (ranks distinct); None if the edges have a cycle."""
    heap = [(rank[task], task) for task in ready.first()]
    heapq.heapify(heap)
    placed = []
    while heap:
        task = heapq.heappop(heap)[1]
        placed.append(task)
        for after in ready.place(task):
            heapq.heappush(heap, (rank[after], after))
    return Order(tuple(placed)) if len(placed) == len(program) else None
