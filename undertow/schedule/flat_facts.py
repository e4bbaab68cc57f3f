"""What constructions need to know, found and used by the native core: the same as `Facts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from undertow.native import as_limit, within_range
from undertow.program import Order, Program
from undertow.program.flat import order_of, step_of
from undertow.schedule.facts import Facts
from undertow.schedule.swept import CHEAP_NS, CHEAP_SHARE

if TYPE_CHECKING:
    from undertow.native.core import Facts as Found
    from undertow.native.core import Step


class FlatFacts:
    """Facts of a Program in a base order, as the native core has them."""

    def __init__(self, program: Program, step: Step, order: Order | None = None) -> None:
        self.program = program
        self.base_order = order or Order.captured(program)
        self._step = step
        self._found: Found = step.facts(self.base_order.array, CHEAP_SHARE, CHEAP_NS)

    @property
    def compute_ns(self) -> int:
        return self._found.compute_ns

    def in_order(self, order: Order) -> FlatFacts:
        """The same for another base order, which must be legal."""
        if order == self.base_order:
            return self
        return FlatFacts(self.program, self._step, order)

    def delayed(self, is_frugal: bool) -> Order:
        """What `delayed_order` says."""
        order = np.empty(len(self.program), dtype=np.int64)
        self._found.delayed(order, is_frugal)
        return order_of(order)

    def constructed(
        self,
        horizon_ns: int,
        window: int,
        limits: tuple[int | None, int | None],
        kept: int,
        most_idle_ns: int,
    ) -> tuple[Order, int, bool] | None:
        """An order, its reach and whether the window held a task; None if it takes too long."""
        order = np.empty(len(self.program), dtype=np.int64)
        limit, in_flight = map(as_limit, limits)
        found = self._found.construct(
            order,
            within_range(horizon_ns),
            within_range(window),
            limit,
            in_flight,
            kept,
            within_range(most_idle_ns),
        )
        return None if found is None else (order_of(self.base_order.array[order]), *found)


AnyFacts = Facts | FlatFacts


def facts_of(program: Program) -> AnyFacts:
    """By the native core, or by Python where that cannot be."""
    step = step_of(program)
    return Facts(program) if step is None else FlatFacts(program, step)
