"""Where a schedule is over its limits: nothing that was found is within them, and who set them
should hear what could be reached."""

from __future__ import annotations

from undertow.program import Order, Program
from undertow.schedule.limits import peak_in_flight
from undertow.schedule.plan import Plan
from undertow.units import format_nbytes


def shortfalls(plan: Plan, scheduled: Program, order: Order) -> tuple[str, ...]:
    """A sentence for each limit of `plan` that its schedule does not keep, with the bytes; none if
    it keeps them. `scheduled` is the Program with the plan's splits and buckets."""
    found = []
    limits, peak = plan.limits, plan.planned.peak_nbytes
    allowed = limits.allowed_above(plan.captured.peak_nbytes)
    if allowed is not None and peak > allowed:
        found.append(
            f"the memory limit of {format_nbytes(allowed)} is not met: the captured order takes "
            f"{format_nbytes(plan.captured.peak_nbytes)} at its peak, and the least that was found "
            f"is {format_nbytes(peak)}, {format_nbytes(peak - allowed)} too much"
        )
    most = limits.in_flight_bytes
    if most is not None and (held := peak_in_flight(scheduled, order)) > most:
        found.append(
            f"the limit of {format_nbytes(most)} in flight is not met: the least that was found is "
            f"{format_nbytes(held)}"
        )
    return tuple(found)
