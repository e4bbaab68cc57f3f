"""The hazards of many tasks at once, by the native core. `ProgramBuilder` says what they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from undertow.native import extension
from undertow.program.flat import codes_of
from undertow.program.hazards import Edges, IntArray, listed
from undertow.program.model import THERE_BEFORE, Buffer, Task


def derived(
    tasks: Sequence[Task], after: Sequence[tuple[int, ...]], buffers: Sequence[Buffer]
) -> tuple[Edges, IntArray] | None:
    """The hazards between `tasks`, each of which also needs those in `after`, and per buffer the
    task that writes it last (-1: none). None where there is no native core, and for tasks that make
    no Program: to add them one by one says why."""
    if extension is None:
        return None
    read_counts, reads = listed([task.reads for task in tasks])
    write_counts, writes = listed([task.writes for task in tasks])
    after_counts, needed = listed(after)
    room = len(needed) + 3 * len(reads) + len(writes) + len(tasks)  # no more are ever found
    src, dst, strength, conflicts = np.empty((4, room), dtype=np.int64)
    writer = np.empty(len(buffers), dtype=np.int64)
    count = extension.hazards(
        codes_of([task.kind for task in tasks]),
        array("q", [task.start for task in tasks]),
        read_counts,
        write_counts,
        after_counts,
        reads,
        writes,
        needed,
        bytes([buffer.lifetime in THERE_BEFORE for buffer in buffers]),
        src,
        dst,
        strength,
        conflicts,
        writer,
    )
    if count < 0:
        return None
    columns = (column[:count].copy() for column in (src, dst, strength, conflicts))
    return Edges(*columns), writer
