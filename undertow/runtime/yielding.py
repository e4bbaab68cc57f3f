"""Lets compute go first where the threads of a process group share its cores.

Gloo sends and receives in threads of its own. Linux lets a thread that has been waiting interrupt
one that computes, which happens here with every packet. Threads for batch work do not: they get a
core that is free at once, and otherwise wait for their turn, with more to do then.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_OURS = "gloo"  # in the names of its threads, and of those that PyTorch runs its collectives in


def let_compute_go_first() -> int:
    """Make batch work of gloo's threads, unless somebody has chosen something else for them; how
    many that were. None where the system knows no such threads."""
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    changed = 0
    for place in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended, or may not be changed
            thread = int(place.name)
            is_usual = os.sched_getscheduler(thread) == os.SCHED_OTHER
            if is_usual and _OURS in (place / "comm").read_text():
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                changed += 1
    return changed
