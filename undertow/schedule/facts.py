"""What a construction needs to know of a Program, whatever the policy: found once.

All of it is by position in a base order: the captured one, or another that constructions are to
start from. What does not depend on the order is carried over to the other one and not found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter, mul

import numpy as np

from undertow.program import Kind, Lifetime, Order, Program, profile_memory
from undertow.program.hazards import as_rows, listed
from undertow.program.model import COMPUTE, HOST, START, VIEW, WAIT
from undertow.schedule.range_max import RangeAddMax
from undertow.schedule.running import touched_nbytes
from undertow.schedule.swept import CHEAP_NS, CHEAP_SHARE

_MOVABLE = (COMPUTE, VIEW)
_OURS = (Lifetime.INTERMEDIATE, Lifetime.DONATED)

Edges = list[tuple[int, ...]] | tuple[tuple[int, ...], ...]


class Facts:
    """The tasks of a Program by their position in a base order, and what follows from that."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.base_order = Order.captured(program)
        self._place: Sequence[int] = self.base_order.tasks  # task -> its position
        self.kinds: Sequence[Kind] = program.kinds
        self.ns = [task.ns for task in program.tasks]
        self.streams = [task.stream for task in program.tasks]
        self.awaited = [task.start for task in program.tasks]  # of a wait: its start
        self.touches: Edges = program.touches
        self.missing = [len(before) for before in program.predecessors]
        self.successors: Edges = program.successors
        self.starts = program.starts
        arrays = program.arrays
        self.nbytes: list[int] = arrays.nbytes.tolist()
        uses = np.bincount(arrays.touched, minlength=len(self.nbytes))
        self.uses: list[int] = uses.tolist()  # per buffer: how many tasks touch it
        self.most_nbytes = touched_nbytes(program)
        self.is_last = last_in_line(program)
        self._find()

    def in_order(self, order: Order) -> Facts:
        """The same for another base order, which must be legal."""
        if order == self.base_order:
            return self
        made = object.__new__(Facts)
        place: list[int] = order.positions().tolist()
        tasks = order.tasks
        in_turn = itemgetter(*tasks)  # of more than one, or there would be no other order
        made.program, made.base_order, made._place = self.program, order, place
        made.nbytes, made.uses = self.nbytes, self.uses
        made.kinds = in_turn(self.kinds)
        made.ns = list(in_turn(self.ns))
        made.streams = list(in_turn(self.streams))
        made.is_last = list(in_turn(self.is_last))
        made.awaited = [place[start] if start >= 0 else -1 for start in in_turn(self.awaited)]
        made.touches = in_turn(self.touches)
        made.most_nbytes = list(in_turn(self.most_nbytes))
        made.missing = list(in_turn(self.missing))
        made.successors = _rows_in_order(self.successors, order)
        made.starts = tuple(sorted([place[start] for start in self.starts]))
        made._find()
        return made

    def _find(self) -> None:
        """What depends on the order."""
        place = self._place
        self.waits_of = {
            place[start]: sorted([place[wait] for wait in waits])
            for start, waits in self.program.waits_of.items()
        }
        self.frees = self._freed_nbytes()
        self.releases = self._released_nbytes()
        self.units: dict[int, list[int]] = {}  # per start: itself and what moves with it, in order
        self.unit_of = self._serving_units()
        self.compute_before = self._compute_before()
        self.first_use = self._first_uses()

    # A delayed order is found from what is above, so what is below may never be asked for.

    @cached_property
    def live(self) -> RangeAddMax:
        """Bytes by position."""
        return RangeAddMax(profile_memory(self.program, self.base_order).during)

    @cached_property
    def entering(self) -> dict[int, int]:
        """Per start, how many edges come into its unit from outside."""
        unit_of, successors = self.unit_of, self.successors
        found = {
            start: sum([self.missing[task] for task in unit]) for start, unit in self.units.items()
        }
        for start, unit in self.units.items():
            if len(unit) > 1:
                inside = [unit_of[after] == start for task in unit for after in successors[task]]
                found[start] -= sum(inside)
        return found

    @cached_property
    def latest(self) -> dict[int, int]:
        """Per start whose result takes memory, how much compute may be done before it must begin,
        if those that are used later on its stream are to be in time too."""
        takers = [start for start in self.starts if self.releases[start] < 0]
        takers.sort(key=lambda start: (self.first_use[start], start), reverse=True)
        latest: dict[int, int] = {}
        next_begins: dict[int, int] = {}
        for start in takers:
            stream = self.streams[start]
            deadline = self.compute_before[self.first_use[start]]
            begin = min(deadline, next_begins.get(stream, deadline)) - self.ns[start]
            latest[start] = next_begins[stream] = begin
        return latest

    def _serving_units(self) -> list[int]:
        """Per task, the start that it moves with: the start itself, and where its result takes
        memory (a gather, to be prefetched) the cheap tasks that serve nothing else; -1 for all
        others."""
        unit_of = [-1] * len(self.kinds)
        for start in self.starts:
            self.units[start] = self._serving(start) if self.releases[start] < 0 else [start]
            for task in self.units[start]:
                unit_of[task] = start
        return unit_of

    def _serving(self, start: int) -> list[int]:
        """A start and the cheap tasks before it that all lead to it alone."""
        place, sources, successors = self._place, self.program.predecessors, self.program.successors
        most_ns = max(self.ns[start] // CHEAP_SHARE, CHEAP_NS)
        found, todo = [start], [self.base_order.tasks[start]]
        others: dict[int, int] = {}  # task -> how many follow it that are not found
        while todo:
            for task in sources[todo.pop()]:
                left = others[task] = others.get(task, len(successors[task])) - 1
                at = place[task]
                if not left and self.kinds[at] in _MOVABLE and self.ns[at] <= most_ns:
                    found.append(at)
                    todo.append(task)
        return sorted(found)

    def _compute_before(self) -> list[int]:
        """Per position, the compute time before it; one more entry for the end."""
        is_compute = [kind is COMPUTE for kind in self.kinds]
        return list(accumulate(map(mul, self.ns, is_compute), initial=0))

    def _first_uses(self) -> dict[int, int]:
        """Per start, the position of the first task that needs its result, looking through views,
        what moves for free and what is last in its line; the end if nothing does."""
        kinds, successors, is_last = self.kinds, self.successors, self.is_last
        count = len(kinds)
        need = list(range(count))
        for i in range(count - 1, -1, -1):
            kind = kinds[i]
            if (kind is COMPUTE or kind is HOST) and not is_last[i]:
                continue
            nearest = count
            for after in successors[i]:
                if need[after] < nearest:
                    nearest = need[after]
            need[i] = nearest
        return {
            start: min([need[wait] for wait in waits], default=count)
            for start, waits in self.waits_of.items()
        }

    def _freed_nbytes(self) -> dict[int, int]:
        """Per start, the bytes that are freed once it was waited for."""
        program, nbytes, buffers = self.program, self.nbytes, self.program.buffers
        last_use = self._last_uses()
        found = {}
        for start, waits in self.waits_of.items():
            task = program.tasks[self.base_order.tasks[start]]
            freed = 0
            for buffer in task.reads if waits else ():
                if last_use[buffer] == start and buffer not in task.writes:
                    is_ours = buffers[buffer].lifetime in _OURS
                    freed += nbytes[buffer] if is_ours else 0
            found[start] = freed
        return found

    def _released_nbytes(self) -> dict[int, int]:
        """Per start, the bytes that are freed once it is done, less those that it allocates."""
        program, nbytes = self.program, self.nbytes
        found = {}
        for start, freed in self.frees.items():
            task = program.tasks[self.base_order.tasks[start]]
            made = sum([nbytes[b] for b in task.writes if b not in task.reads])
            found[start] = freed - made
        return found

    def _last_uses(self) -> list[int]:
        """Per buffer, the position of the last task but a wait that touches it; -1 for none."""
        arrays = self.program.arrays
        place = self.base_order.positions().copy()
        place[[wait for waits in self.program.waits_of.values() for wait in waits]] = -1
        last = np.full(len(self.nbytes), -1, dtype=np.int64)
        np.maximum.at(last, arrays.touched, np.repeat(place, arrays.touch_counts))
        found: list[int] = last.tolist()
        return found


def last_in_line(program: Program) -> list[bool]:
    """Per task, whether no collective and no compute but such tasks follow it: what is done to a
    gradient after its reduction, an update of the optimizer."""
    kinds, successors = program.kinds, program.successors
    waited_for = [False] * len(kinds)  # some collective comes before it
    for i, kind in enumerate(kinds):
        if waited_for[i] or kind is WAIT:
            waited_for[i] = True
            for after in successors[i]:
                waited_for[after] = True
    is_last = [False] * len(kinds)
    for i in range(len(kinds) - 1, -1, -1):
        if waited_for[i] and kinds[i] is not START:
            for after in successors[i]:
                if not is_last[after]:
                    break
            else:
                is_last[i] = True
    return is_last


def _rows_in_order(rows: Edges, order: Order) -> Edges:
    """What follows each task, by positions in `order`, where it was by tasks."""
    counts, flat = listed(rows)
    begins = np.cumsum(counts) - counts
    tasks = order.array
    new_counts = counts[tasks]
    from_where = np.repeat(begins[tasks] - np.cumsum(new_counts) + new_counts, new_counts)
    moved = order.positions()[flat[from_where + np.arange(len(flat))]]
    return as_rows(moved, new_counts)
