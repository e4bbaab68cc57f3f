"""Step time against peak memory: which Plans nobody beats on both, and where more memory stops
paying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from undertow.schedule.plan import Plan


def undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Plans that no other beats in time without needing more memory, by rising peak; equal ones
    once."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.planned.peak_nbytes, p.planned.total_ns)):
        if not kept or plan.planned.total_ns < kept[-1].planned.total_ns:
            kept.append(plan)
    return kept


def knee(plans: Sequence[Plan]) -> int | None:
    """The index of the plan farthest below the line from the leanest to the fastest, both axes
    scaled to their range; None where none is below it."""
    if len(plans) < 3:
        return None
    lean, fast = plans[0].planned, plans[-1].planned
    nbytes = fast.peak_nbytes - lean.peak_nbytes
    ns = lean.total_ns - fast.total_ns
    below = [
        # Integers throughout: no rounding decides which point is marked.
        nbytes * ns
        - (plan.planned.peak_nbytes - lean.peak_nbytes) * ns
        - (plan.planned.total_ns - fast.total_ns) * nbytes
        for plan in plans
    ]
    best = max(range(len(plans)), key=lambda i: (below[i], -i))
    return best if below[best] > 0 else None


def limits_between(low: int, high: int, count: int) -> list[int]:
    """`count` limits strictly between two, evenly spread.

    >>> limits_between(0, 40, 3)
    [10, 20, 30]
    """
    inside = [low + (high - low) * k // (count + 1) for k in range(1, count + 1)]
    return [limit for limit in dict.fromkeys(inside) if low < limit < high]


def limits_to_refine(plans: Sequence[Plan], count: int) -> list[int]:
    """Limits halfway between neighbours, where the step time changes most."""
    pairs = list(pairwise(plans))
    gains = [
        (left.planned.total_ns - right.planned.total_ns, k) for k, (left, right) in enumerate(pairs)
    ]
    chosen = sorted(gains, key=lambda gain: (-gain[0], gain[1]))[:count]
    found = []
    for _, k in chosen:
        low, high = (plan.planned.peak_nbytes for plan in pairs[k])
        found += limits_between(low, high, 1)
    return sorted(found)
