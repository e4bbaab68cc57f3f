"""Checks an order against its Program, trusting neither the builder's hazards nor the schedulers.

Beside the recorded hazards it replays the captured order and the order in question and compares
what every task *sees*: which write of each buffer it reads, and that nothing touches a buffer while
a collective works on it. So a pass that loses a hazard, or a hazard that was never derived, is
found. Runs after every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import numpy as np

from undertow.errors import OrderError
from undertow.program.memory import liveness
from undertow.program.model import COMPUTE, START, VIEW, WAIT, IntArray, Order, Program, listed
from undertow.units import format_nbytes

_SHOWN = 5


class Rule(StrEnum):
    """What an order can break."""

    PERMUTATION = "permutation"  # every task exactly once
    HAZARD = "hazard"  # a recorded hazard points backwards
    VALUE = "value"  # a task sees another write than in the captured order
    IN_FLIGHT = "in flight"  # a buffer is touched while a collective works on it
    STREAM = "stream"  # a group's collectives in another sequence than agreed
    LIFETIME = "lifetime"  # a buffer is touched outside the lifetime that memory is counted by
    MEMORY = "memory"  # the peak exceeds the limit


@dataclass(frozen=True, slots=True)
class Violation:
    rule: Rule
    task: int  # -1 where no single task is at fault
    message: str


def verify(
    program: Program,
    order: Order,
    *,
    sequences: Mapping[str, Sequence[str]] | None = None,
    peak_nbytes: int | None = None,
) -> None:
    """Raise OrderError, naming the tasks at fault, unless `order` is legal for `program`.

    `sequences` fixes the sequence of starts on each group named in it (what ranks agreed on);
    `peak_nbytes` is a memory limit that the order must keep.
    """
    found = find_violations(
        program, order, sequences=sequences, peak_nbytes=peak_nbytes, limit=_SHOWN
    )
    if found:
        lines = "\n".join(f"  {violation.message}" for violation in found)
        raise OrderError(f"the order is not legal for program {program.name!r}:\n{lines}")


def find_violations(
    program: Program,
    order: Order,
    *,
    sequences: Mapping[str, Sequence[str]] | None = None,
    peak_nbytes: int | None = None,
    limit: int = 100,
) -> list[Violation]:
    """Everything that is wrong with `order`, up to `limit` findings; empty if it is legal."""
    found = list(islice(_check_permutation(program, order), limit))
    if found:
        return found  # nothing else means anything

    def findings() -> Iterator[Violation]:
        accesses = _Accesses(program)
        yield from _check_hazards(program, order)
        yield from _check_values(program, order, accesses)
        yield from _check_in_flight(program, order)
        yield from _check_sequences(program, order, sequences or {})
        if peak_nbytes is not None or not _are_alive(program, order, accesses):
            yield from _check_lifetimes(program, order, peak_nbytes)

    return list(islice(findings(), limit))


def stream_sequences(program: Program, order: Order) -> dict[str, tuple[str, ...]]:
    """Per process group, the names of its starts in the sequence in which `order` issues them."""
    sequences: dict[str, list[str]] = {stream.name: [] for stream in program.streams[2:]}
    for i in order.tasks:
        task = program.tasks[i]
        if task.kind is START:
            sequences[program.streams[task.stream].name].append(task.name)
    return {name: tuple(starts) for name, starts in sequences.items()}


def _check_permutation(program: Program, order: Order) -> Iterator[Violation]:
    count = len(program)
    if len(order.tasks) == count and bool((np.sort(order.array) == np.arange(count)).all()):
        return
    seen = [False] * count
    for i in order.tasks:
        if not 0 <= i < count:
            yield Violation(Rule.PERMUTATION, -1, f"there is no task number {i}")
        elif seen[i]:
            name = program.tasks[i].name
            yield Violation(Rule.PERMUTATION, i, f"task {name!r} is in the order twice")
        else:
            seen[i] = True
    for i, there in enumerate(seen):
        if not there:
            name = program.tasks[i].name
            yield Violation(Rule.PERMUTATION, i, f"task {name!r} is missing from the order")


def _check_hazards(program: Program, order: Order) -> Iterator[Violation]:
    place, edges = order.positions(), program.edges
    for at in np.flatnonzero(place[edges.src] > place[edges.dst]).tolist():
        hazard = program.hazards[at]
        src, dst = program.tasks[hazard.src].name, program.tasks[hazard.dst].name
        on = f" on buffer {program.buffers[hazard.buffer].name!r}" if hazard.buffer >= 0 else ""
        yield Violation(
            Rule.HAZARD,
            hazard.dst,
            f"task {dst!r} is placed before {src!r}, which must come first ({hazard.kind}{on})",
        )


class _Accesses:
    """Every access of a task to a buffer: first all reads, then all writes.

    Views read no data. A wait makes its start's write valid: it sees that start's write and leaves
    it in place. A write counts as one that sees what was there, since it may cover only a part.
    """

    def __init__(self, program: Program) -> None:
        read = _listed([task.reads for task in program.tasks])
        written = _listed([task.writes for task in program.tasks])
        self.task, self.buffer = np.concatenate([read, written], axis=1)
        self._is_write = np.arange(len(self.task)) >= read.shape[1]
        is_wait = np.array([kind is WAIT for kind in program.kinds], dtype=bool)
        self._is_write &= ~is_wait[self.task]
        is_view = np.array([kind is VIEW for kind in program.kinds], dtype=bool)
        self.sees_data = ~is_view[self.task]
        self._count = len(program)

    def seen_writes(self, order: Order) -> IntArray:
        """For each access, the task that last wrote the buffer before it, -1 for none."""
        # Numbers that are sorted by buffer and, for one buffer, by place in the order.
        when = self.buffer * self._count + order.positions()[self.task]
        writes = np.append(-1, np.sort(when[self._is_write]))
        last = writes[np.searchsorted(writes, when) - 1]
        writer = order.array[last % self._count]
        return np.where(last // self._count == self.buffer, writer, -1)


def _listed(buffers: list[tuple[int, ...]]) -> IntArray:
    """Two rows: the tasks, each as often as it has buffers, and those."""
    counts, flat = listed(buffers)
    return np.stack([np.repeat(np.arange(len(buffers)), counts), flat])


def _check_values(program: Program, order: Order, accesses: _Accesses) -> Iterator[Violation]:
    captured = accesses.seen_writes(Order.captured(program))
    ordered = accesses.seen_writes(order)
    differs = np.flatnonzero((captured != ordered) & accesses.sees_data)
    for at in differs[np.argsort(accesses.task[differs], kind="stable")].tolist():
        task, buffer = int(accesses.task[at]), int(accesses.buffer[at])
        now, before = (_written_by(program, int(seen[at])) for seen in (ordered, captured))
        yield Violation(
            Rule.VALUE,
            task,
            f"task {program.tasks[task].name!r} finds buffer {program.buffers[buffer].name!r} as "
            f"{now}, not as {before}",
        )


def _written_by(program: Program, writer: int) -> str:
    return "it was at the beginning" if writer < 0 else f"written by {program.tasks[writer].name!r}"


def _check_in_flight(program: Program, order: Order) -> Iterator[Violation]:
    """A collective reads its buffers until the first wait for it, and writes each until a wait
    that makes it valid."""
    sending: dict[int, set[int]] = {}  # buffer -> collectives that read it
    filling: dict[int, int] = {}  # buffer -> collective that writes it
    started: set[int] = set()
    landed: set[int] = set()
    read, written = sending.keys(), filling.keys()  # by some collective, as of now
    tasks, kinds = program.tasks, program.kinds
    for i in order.tasks:
        kind = kinds[i]
        if kind is VIEW:
            continue
        task = tasks[i]
        if kind is COMPUTE:
            is_free = written.isdisjoint(task.reads) and written.isdisjoint(task.writes)
            if is_free and read.isdisjoint(task.writes):
                continue  # as most
        if kind is WAIT:
            if task.start not in started:
                start = program.tasks[task.start].name
                message = f"wait {task.name!r} is placed before its start {start!r}"
                yield Violation(Rule.IN_FLIGHT, i, message)
            elif task.start not in landed:
                landed.add(task.start)
                for buffer in program.tasks[task.start].reads:
                    sending[buffer].discard(task.start)
                    if not sending[buffer]:
                        del sending[buffer]
            for buffer in task.writes:
                if filling.get(buffer) == task.start:
                    del filling[buffer]
            continue
        for buffer in task.reads:
            if buffer in filling:
                yield _in_flight(program, i, "reads", buffer, filling[buffer])
        for buffer in task.writes:
            if buffer in filling:
                yield _in_flight(program, i, "writes", buffer, filling[buffer])
            elif buffer in sending:
                yield _in_flight(program, i, "writes", buffer, min(sending[buffer]))
        if kind is START:
            started.add(i)
            for buffer in task.reads:
                sending.setdefault(buffer, set()).add(i)
            for buffer in task.writes:
                filling[buffer] = i


def _in_flight(program: Program, i: int, does: str, buffer: int, start: int) -> Violation:
    return Violation(
        Rule.IN_FLIGHT,
        i,
        f"task {program.tasks[i].name!r} {does} buffer {program.buffers[buffer].name!r} while "
        f"collective {program.tasks[start].name!r} is still working on it",
    )


def _check_sequences(
    program: Program, order: Order, agreed: Mapping[str, Sequence[str]]
) -> Iterator[Violation]:
    if not agreed:
        return
    actual = stream_sequences(program, order)
    for group in sorted(agreed):
        wanted, got = tuple(agreed[group]), actual.get(group, ())
        if wanted == got:
            continue
        at = next(
            (k for k, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b),
            min(len(wanted), len(got)),
        )
        names = [repr(seq[at]) if at < len(seq) else "nothing" for seq in (wanted, got)]
        yield Violation(
            Rule.STREAM,
            program.index.get(got[at], -1) if at < len(got) else -1,
            f"group {group!r} must issue {names[0]} as its collective number {at}, "
            f"but the order issues {names[1]}",
        )


def _are_alive(program: Program, order: Order, accesses: _Accesses) -> bool:
    """Whether every buffer is alive wherever a task touches it, and until collectives let go."""
    live, at = liveness(program, order), order.positions()[accesses.task]
    is_alive = (live.first[accesses.buffer] <= at) & (at <= live.last[accesses.buffer])
    held = _held_by_collectives(program, order)
    buffers, until = np.array(list(held), dtype=np.int64), np.array(list(held.values()))
    return bool(is_alive.all() and (live.last[buffers] >= until).all())


def _check_lifetimes(
    program: Program, order: Order, peak_nbytes: int | None
) -> Iterator[Violation]:
    """Replays allocations and frees task by task, by the lifetimes that memory is counted by."""
    live = liveness(program, order)
    first, last = live.first.tolist(), live.last.tolist()
    dying = sorted(range(len(last)), key=last.__getitem__)
    deaths = [*(last[buffer] for buffer in dying), len(program)]
    next_dying, tasks = 0, program.tasks
    sizes = [buffer.nbytes for buffer in program.buffers]
    alive = list(program.there_before)
    nbytes = sum(size for size, there in zip(sizes, alive, strict=True) if there)
    peak, peak_at = nbytes, -1
    held = _held_by_collectives(program, order)
    for position, i in enumerate(order.tasks):
        task = tasks[i]
        for buffer in task.reads + task.writes:
            if not alive[buffer]:
                if first[buffer] != position:
                    yield _outside_lifetime(program, i, buffer)
                alive[buffer] = True
                nbytes += sizes[buffer]
        if nbytes > peak:
            peak, peak_at = nbytes, i
        while deaths[next_dying] <= position:
            buffer = dying[next_dying]
            next_dying += 1
            if alive[buffer]:
                if held.get(buffer, -1) > position:
                    yield _outside_lifetime(program, i, buffer)
                alive[buffer] = False
                nbytes -= sizes[buffer]
    if peak_nbytes is not None and peak > peak_nbytes:
        where = f" at task {program.tasks[peak_at].name!r}" if peak_at >= 0 else ""
        yield Violation(
            Rule.MEMORY,
            peak_at,
            f"memory peaks at {format_nbytes(peak)}{where}, {format_nbytes(peak - peak_nbytes)} "
            f"over the limit of {format_nbytes(peak_nbytes)}",
        )


def _held_by_collectives(program: Program, order: Order) -> dict[int, int]:
    """Buffer -> the position until which some collective holds it: the first wait for it in
    order."""
    place: list[int] = order.positions().tolist()
    held: dict[int, int] = {}
    for start, waits in program.waits_of.items():
        task = program.tasks[start]
        until = min([place[wait] for wait in waits], default=len(program) - 1)
        for buffer in task.reads + task.writes:
            held[buffer] = max(held.get(buffer, -1), until)
    return held


def _outside_lifetime(program: Program, i: int, buffer: int) -> Violation:
    return Violation(
        Rule.LIFETIME,
        i,
        f"buffer {program.buffers[buffer].name!r} is freed or not yet allocated while it is needed "
        f"(at task {program.tasks[i].name!r})",
    )
