"""Before a graph runs: the ranks of each of its groups compare what they are about to issue."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from undertow.capture import torch_api
from undertow.cost.agreed import Agree
from undertow.program import Program
from undertow.program.model import Collective, CollectiveKind
from undertow.runtime import agreement, job
from undertow.schedule.follow import Decisions

_PAIRED = (CollectiveKind.SEND, CollectiveKind.RECV)  # their two sides differ by nature
_agreed: Counter[str] = Counter()  # group -> graphs that its ranks have agreed on
_estimated: Counter[tuple[int, ...]] = Counter()  # ranks -> graphs whose estimates they agreed on


def agree_on(
    program: Program,
    timeout: float,
    captured: Program | None = None,
    decisions: Decisions | None = None,
) -> Decisions | None:
    """Return if every group's sequence of collectives is the same on all its ranks.

    AgreementError on each of them otherwise, or if one does not come within `timeout` seconds. With
    the Program as it was captured and what this rank decided on it, ranks may have decided
    otherwise as long as they captured the same collectives: then what to follow is returned.
    """
    store = torch_api.job_store()
    if store is None:
        return None
    rank, _ = job.rank_and_world()
    before = {} if captured is None else sequences(captured)
    followed = decisions
    for group, lines in sequences(program).items():
        ranks = next(stream.ranks for stream in program.streams if stream.name == group)
        if rank not in ranks or len(ranks) < 2:
            continue
        _agreed[group] += 1
        key = f"graph {_agreed[group]} of group {group}"
        basis, offer = "", None
        if decisions is not None and group in before:
            basis, offer = _digest(before[group]), decisions.group_json(group)
        found = agreement.check_same(
            store, rank, ranks, key, _digest(lines), lines, timeout, basis=basis, offer=offer
        )
        if found is not None:
            assert followed is not None
            followed = followed.with_group(group, found)
    return None if followed == decisions else followed


def same_collectives(captured: Program) -> str:
    """What graphs have in common that issue the same collectives, whatever lies between them."""
    return _digest(
        [f"{group}: {line}" for group, all_ in sequences(captured).items() for line in all_]
    )


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def agree_on_estimates(program: Program, timeout: float) -> Agree | None:
    """How the ranks of a program make their estimates the same; None where there are no others."""
    store = torch_api.job_store()
    if store is None:
        return None
    rank, _ = job.rank_and_world()
    ranks = deciding_ranks(program)
    _estimated[ranks] += 1
    name = f"estimates {_estimated[ranks]}"
    return agreement.Agreement(store, rank, ranks, name, "median", timeout)


def deciding_ranks(program: Program) -> tuple[int, ...]:
    """Who must decide the same on a graph."""
    return ranks_of_all(stream.ranks for stream in program.streams[2:])


def ranks_of_all(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """A group's ranks, or where there are several groups, all."""
    several = {ranks for ranks in groups if len(ranks) > 1}
    return several.pop() if len(several) == 1 else tuple(range(job.rank_and_world()[1]))


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
