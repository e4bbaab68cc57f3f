"""Quantities over the time of a step: live memory and bytes in flight, as steps of (ns, bytes).

The Timeline keeps memory by position in the order; here it is laid on the clock, for the trace's
counters and for pictures.
"""

from __future__ import annotations

from itertools import groupby

from undertow.program import Kind, Timeline

Step = tuple[int, int]
"""From this time on (ns), this many bytes."""


def memory_curve(timeline: Timeline) -> list[Step]:
    """Live bytes over the step. The last step is at its end.

    A task holds its memory from when the compute stream reaches its place until the compute stream
    leaves it: a start leaves at once, a wait when the collective is done.
    """
    steps: list[Step] = []
    now = 0
    during, after = timeline.memory.during.tolist(), timeline.memory.after.tolist()
    ready, end = timeline.ready.tolist(), timeline.end.tolist()
    for position, i in enumerate(timeline.order.tasks):
        leaves = ready[i] if timeline.program.tasks[i].kind is Kind.START else end[i]
        now = max(now, ready[i])  # a host task may run ahead of the compute stream
        steps.append((now, during[position]))
        now = max(now, leaves)
        steps.append((now, after[position]))
    if steps:
        steps.append((timeline.total_ns, steps[-1][1]))
    return _tidied(steps)


def in_flight_curve(timeline: Timeline, stream: int) -> list[Step]:
    """Bytes that the collectives of one group fill, from each start to the first wait for it."""
    program = timeline.program
    changes: list[Step] = [(0, 0)]
    for start in program.starts:
        if program.tasks[start].stream != stream:
            continue
        nbytes = sum(program.buffers[buffer].nbytes for buffer in program.tasks[start].writes)
        landed = min(
            (int(timeline.end[wait]) for wait in program.waits_of[start]),
            default=timeline.total_ns,
        )
        changes += [(int(timeline.ready[start]), nbytes), (landed, -nbytes)]
    level = 0
    steps = []
    for at, change in sorted(changes):
        level += change
        steps.append((at, level))
    return _tidied(steps)


def _tidied(steps: list[Step]) -> list[Step]:
    """One step per time, and none that changes nothing, except the first and the last.

    What is freed and allocated at one time leaves no dip, but a peak of no duration stays: it is
    what the step needs.
    """
    kept: list[Step] = []
    level = 0
    for at, group in groupby(steps, key=lambda step: step[0]):
        levels = [nbytes for _, nbytes in group]
        if max(levels) > max(level, levels[-1]):
            kept.append((at, max(levels)))
        if levels[-1] != (kept[-1][1] if kept else -1):
            kept.append((at, levels[-1]))
        level = levels[-1]
    if kept and kept[-1][0] != steps[-1][0]:
        kept.append(steps[-1])
    return kept
