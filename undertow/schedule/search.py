"""Local search on a complete legal order: one task moves at a time, shorter steps are kept.

A move takes a task out and puts it back anywhere that its hazards allow; it is priced by playing
the order again from the first place that changed. Where no single move helps, a few tasks are moved
at random (from a fixed seed) and the search goes on from there, keeping the best. The budget is
counted in tasks played, so that every rank and every run does the same.
"""

from __future__ import annotations

import random

from undertow.program import Kind, Order, Program, profile_memory, simulate

_KICK = 3  # tasks moved at random where single moves help no more


def improve(program: Program, order: Order, limit_nbytes: int | None, steps: int) -> Order:
    """An order that is no worse than `order`: shorter, or as short with less communication exposed.

    `steps` bounds the work in tasks played; orders above the memory limit are not accepted.
    """
    search = _Search(program, limit_nbytes, steps)
    return Order(tuple(search.run(list(order.tasks))))


class _Search:
    def __init__(self, program: Program, limit: int | None, steps: int) -> None:
        self.program, self.limit, self.left = program, limit, steps
        self.random = random.Random(0)
        # Views cost nothing and follow what they look at; moving them alone cannot help.
        self.movable = [i for i, task in enumerate(program.tasks) if task.kind is not Kind.VIEW]

    def run(self, order: list[int]) -> list[int]:
        best, best_ns = list(order), self._total(order)
        current, current_ns = list(order), best_ns
        while self.movable and self.left > 0:
            current, current_ns = self._descend(current, current_ns)
            if current_ns < best_ns:
                best, best_ns = list(current), current_ns
            current = self._kick(list(best))
            current_ns = self._total(current)
            if not self._fits(current):
                current, current_ns = list(best), best_ns
        return best

    def _descend(self, order: list[int], total: int) -> tuple[list[int], int]:
        """Take improving moves until there are none, each task's best place at a time."""
        improved = True
        while improved and self.left > 0:
            improved = False
            for task in self.movable:
                better = self._best_place(order, task, total)
                if better is not None:
                    order, total = better
                    improved = True
                if self.left <= 0:
                    break
        return order, total

    def _best_place(self, order: list[int], task: int, total: int) -> tuple[list[int], int] | None:
        """The order with `task` where the step is shortest, if that is shorter than `total`."""
        low, high = self._room(order, task)
        at = order.index(task)
        found: tuple[list[int], int] | None = None
        for place in range(low, high + 1):
            if place == at:
                continue
            tried = list(order)
            tried.insert(place, tried.pop(at))
            ns = self._total(tried)
            if ns < total and self._fits(tried):
                found, total = (tried, ns), ns
            if self.left <= 0:
                break
        return found

    def _room(self, order: list[int], task: int) -> tuple[int, int]:
        """The first and last place that the task's hazards allow."""
        place = {other: k for k, other in enumerate(order)}
        before = (place[source] for source in self.program.predecessors[task])
        after = (place[target] for target in self.program.successors[task])
        return max(before, default=-1) + 1, min(after, default=len(order)) - 1

    def _kick(self, order: list[int]) -> list[int]:
        for _ in range(_KICK):
            task = self.random.choice(self.movable)
            low, high = self._room(order, task)
            order.remove(task)
            order.insert(self.random.randint(low, high), task)
        return order

    def _fits(self, order: list[int]) -> bool:
        if self.limit is None:
            return True
        return profile_memory(self.program, Order(tuple(order))).peak_nbytes <= self.limit

    def _total(self, order: list[int]) -> int:
        self.left -= len(order)
        return simulate(self.program, Order(tuple(order))).total_ns
