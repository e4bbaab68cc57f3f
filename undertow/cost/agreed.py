"""Costs that were measured, made the same on every rank before anything is decided on them.

A function that measures gives each rank its own numbers, and a schedule of its own, after which the
job hangs. So the function is asked for everything at once: each task of the Program, and for each
kind of collective that there is a curve over the sizes that merging and splitting can make of it.
Ranks agree on that one list, and from then on only what was agreed is looked up; a piece of split
compute takes the share of what was agreed for the whole that it has in the cluster's model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from undertow.cost.cluster import Cluster
from undertow.cost.sources import Answer, ModelSource, Query, Source
from undertow.errors import CostError
from undertow.program.model import Collective, CollectiveKind, Kind, Program, Task

Agree = Callable[[Sequence[int | float | None]], Sequence[int | float | None]]
"""Given what this rank measured, what all ranks use; `undertow.runtime.agreement.Agreement` is one.
"""

_LARGEST_NBYTES = 2 << 30  # of a bucket
_MOST_CHUNKS = 64  # the smallest size that is asked for is this part of the smallest there is

_Key = tuple[tuple[int, ...], CollectiveKind, str, str]


def agreed(
    program: Program, source: Source, agree: Agree, cluster: Cluster | None = None
) -> Source:
    """A source that gives, on all ranks, the same answers as `source` gave on some of them.

    With the cluster it also prices pieces of the program's compute.
    """
    tasks = [i for i, task in enumerate(program.tasks) if task.kind in (Kind.COMPUTE, Kind.START)]
    samples = _samples(program)
    asked = [Query(program.tasks[i], _ranks(program, i)) for i in tasks]
    asked += [
        Query(replace(task, work=replace(work, nbytes=size)), ranks)
        for (ranks, *_), (task, work, sizes) in samples.items()
        for size in sizes
    ]
    own = [source.price(query) for query in asked]
    numbers = list(agree([None if answer is None else answer.ns for answer in own]))
    if len(numbers) != len(asked):
        raise CostError(f"the ranks agreed on {len(numbers)} costs, but {len(asked)} were asked")
    nanoseconds = [None if number is None else round(number) for number in numbers]
    by_name = {
        program.tasks[i].name: (program.tasks[i], ns)
        for i, ns in zip(tasks, nanoseconds, strict=False)
    }
    curves: dict[_Key, _Line] = {}
    at = len(tasks)
    for key, (_, _, sizes) in samples.items():
        points = [(n, ns) for n, ns in zip(sizes, nanoseconds[at:], strict=False) if ns is not None]
        at += len(sizes)
        if points:
            curves[key] = _Line(*map(tuple, zip(*points, strict=True)))
    model = None if cluster is None else ModelSource(cluster)
    return _Agreed(source.name, by_name, curves, model)


def captured_name(name: str) -> str:
    """The task that a piece, or what puts pieces together, was made of: names of nodes have no
    dots."""
    return name.partition(".")[0]


def piece_share(model: ModelSource, piece: Task, whole: Task) -> float | None:
    """The part of a task's time that a piece of it takes, the fixed time of a kernel included; None
    for what is no piece: it puts pieces together, or copies one."""
    number = piece.name.removeprefix(f"{whole.name}.")
    if number == piece.name or not number.isdigit() or piece.kind is not whole.kind:
        return None
    of_piece, of_whole = model.price(Query(piece)), model.price(Query(whole))
    if of_piece is None or of_whole is None or not of_whole.ns:
        return 1.0
    return of_piece.ns / of_whole.ns


def _ranks(program: Program, task: int) -> tuple[int, ...]:
    is_start = program.tasks[task].kind is Kind.START
    return program.streams[program.tasks[task].stream].ranks if is_start else ()


def _samples(program: Program) -> dict[_Key, tuple[Task, Collective, list[int]]]:
    """For every kind of collective one that is there, and the sizes to ask about."""
    found: dict[_Key, list[tuple[Task, Collective]]] = {}
    for start in program.starts:
        task = program.tasks[start]
        if isinstance(task.work, Collective) and task.work.nbytes:
            key = _key(task.work, program.streams[task.stream].ranks)
            found.setdefault(key, []).append((task, task.work))
    samples = {}
    for key, members in found.items():
        sizes = [work.nbytes or 0 for _, work in members]
        smallest = max(min(sizes) // _MOST_CHUNKS, 1).bit_length() - 1
        largest = min(sum(sizes), _LARGEST_NBYTES).bit_length()
        powers = {1, *(1 << power for power in range(smallest, largest + 1))}
        samples[key] = (*members[0], sorted(powers))
    return samples


def _key(work: Collective, ranks: tuple[int, ...]) -> _Key:
    return ranks, work.kind, work.reduce_op, work.dtype


@dataclass(frozen=True, slots=True)
class _Line:
    """Straight between its points, and as steep as its last piece beyond them; in integers, so that
    every rank computes the same."""

    nbytes: tuple[int, ...]
    ns: tuple[int, ...]

    def at(self, nbytes: int) -> int:
        if len(self.nbytes) == 1:
            return self.ns[0]
        right = min(max(bisect_left(self.nbytes, nbytes), 1), len(self.nbytes) - 1)
        low, high = self.nbytes[right - 1 : right + 1]
        before, after = self.ns[right - 1 : right + 1]
        return max(before + (after - before) * (nbytes - low) // (high - low), 0)


@dataclass(frozen=True, slots=True)
class _Agreed:
    name: str
    by_name: dict[str, tuple[Task, int | None]]
    curves: dict[_Key, _Line]
    model: ModelSource | None = None
    by_description: bool = False

    def price(self, query: Query) -> Answer | None:
        work = query.task.work
        task, ns = self.by_name.get(query.task.name, (None, None))
        if task is not None and task.work == work:
            return None if ns is None else Answer(ns, self.name)
        if not isinstance(work, Collective):
            return self._piece(query.task)
        if work.nbytes is None:
            return None
        curve = self.curves.get(_key(work, query.ranks))
        return None if curve is None else Answer(curve.at(work.nbytes), self.name)

    def _piece(self, task: Task) -> Answer | None:
        whole, ns = self.by_name.get(captured_name(task.name), (None, None))
        if self.model is None or whole is None or ns is None:
            return None
        share = piece_share(self.model, task, whole)
        return None if share is None else Answer(round(ns * share), self.name)
