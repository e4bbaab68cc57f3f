"""Before a graph runs: the ranks of each of its groups compare what they are about to issue."""

from __future__ import annotations

import hashlib
from collections import Counter

from undertow.capture import torch_api
from undertow.cost.agreed import Agree
from undertow.program import Program
from undertow.program.model import Collective, CollectiveKind
from undertow.runtime import agreement, job

_PAIRED = (CollectiveKind.SEND, CollectiveKind.RECV)  # their two sides differ by nature
_agreed: Counter[str] = Counter()  # group -> graphs that its ranks have agreed on


def agree_on(program: Program, timeout: float) -> None:
    """Return if every group's sequence of collectives is the same on all its ranks.

    AgreementError on each of them otherwise, or if one does not come within `timeout` seconds.
    """
    store = torch_api.job_store()
    if store is None:
        return
    rank, _ = job.rank_and_world()
    for group, lines in sequences(program).items():
        ranks = next(stream.ranks for stream in program.streams if stream.name == group)
        if rank not in ranks or len(ranks) < 2:
            continue
        _agreed[group] += 1
        key = f"graph {_agreed[group]} of group {group}"
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
        agreement.check_same(store, rank, ranks, key, digest, lines, timeout)


def agree_on_estimates(program: Program, timeout: float) -> Agree | None:
    """How the ranks of a program make their estimates the same; None where there are no others."""
    store = torch_api.job_store()
    if store is None:
        return None
    rank, _ = job.rank_and_world()
    _agreed["estimates"] += 1
    name = f"estimates {_agreed['estimates']}"
    return agreement.Agreement(store, rank, deciding_ranks(program), name, "median", timeout)


def deciding_ranks(program: Program) -> tuple[int, ...]:
    """Who must decide the same: a group's ranks, or where there are several groups, all."""
    groups = {stream.ranks for stream in program.streams[2:] if len(stream.ranks) > 1}
    return groups.pop() if len(groups) == 1 else tuple(range(job.rank_and_world()[1]))


def sequences(program: Program) -> dict[str, list[str]]:
    """Per group, its collectives in the order in which they are issued, a line each."""
    found: dict[str, list[str]] = {}
    for start in program.starts:
        task = program.tasks[start]
        work = task.work
        if not isinstance(work, Collective) or work.kind in _PAIRED:
            continue
        how = f" {work.reduce_op}" if work.reduce_op else ""
        line = f"{task.name}: {work.kind}{how} of {work.nbytes} bytes {work.dtype}"
        found.setdefault(program.streams[task.stream].name, []).append(line)
    return found
