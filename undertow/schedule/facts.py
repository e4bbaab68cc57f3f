"""What a construction needs to know of a Program, whatever the policy: found once.

All of it is by position in a base order: the captured one, or another that constructions are to
start from. What does not depend on the order is carried over to the other one and not found again.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np

from undertow.program import Kind, Lifetime, Order, Program, profile_memory
from undertow.schedule.range_max import RangeAddMax

_CHEAP_SHARE = 4  # a task that only serves a collective moves with it if it takes a quarter or less

Edges = list[tuple[int, ...]] | tuple[tuple[int, ...], ...]


class Facts:
    """The tasks of a Program by their position in a base order, and what follows from that."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.base_order = Order.captured(program)
        self.kinds = [task.kind for task in program.tasks]
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
        before = np.cumsum(np.append(0, arrays.nbytes[arrays.touched]))
        ends = np.cumsum(np.append(0, arrays.touch_counts))
        # Per task: the bytes that it touches, and so the most that it can allocate.
        self.most_nbytes: list[int] = np.diff(before[ends]).tolist()
        self.is_last = self._last_in_line()
        self._find()

    def in_order(self, order: Order) -> Facts:
        """The same for another base order, which must be legal."""
        if order == self.base_order:
            return self
        made = object.__new__(Facts)
        place: list[int] = order.positions().tolist()
        tasks = order.tasks
        made.program, made.base_order = self.program, order
        made.nbytes, made.uses = self.nbytes, self.uses
        made.kinds = [self.kinds[t] for t in tasks]
        made.ns = [self.ns[t] for t in tasks]
        made.streams = [self.streams[t] for t in tasks]
        made.is_last = [self.is_last[t] for t in tasks]
        made.awaited = [place[start] if (start := self.awaited[t]) >= 0 else -1 for t in tasks]
        made.touches = [self.touches[t] for t in tasks]
        made.most_nbytes = [self.most_nbytes[t] for t in tasks]
        made.missing = [self.missing[t] for t in tasks]
        made.successors = [tuple([place[s] for s in self.successors[t]]) for t in tasks]
        made.starts = tuple(sorted([place[start] for start in self.starts]))
        made._find()
        return made

    def _find(self) -> None:
        """What depends on the order."""
        self.waits_of: dict[int, list[int]] = {start: [] for start in self.starts}
        for wait, start in enumerate(self.awaited):
            if start >= 0:
                self.waits_of[start].append(wait)
        self.frees = self._freed_nbytes()
        self.releases = self._released_nbytes()
        self.unit_of = self._serving_units()
        self.units: dict[int, list[int]] = {start: [] for start in self.starts}
        for task, start in enumerate(self.unit_of):
            if start >= 0:
                self.units[start].append(task)
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
        kinds, successors, releases, ns = self.kinds, self.successors, self.releases, self.ns
        unit = [-1] * len(kinds)
        for i in range(len(kinds) - 1, -1, -1):
            kind, following = kinds[i], successors[i]
            if kind is Kind.START:
                unit[i] = i
            elif following and (start := unit[following[0]]) >= 0:
                if kind is Kind.WAIT or kind is Kind.HOST or releases[start] >= 0:
                    continue
                serves_it = all(unit[after] == start for after in following)
                if serves_it and ns[i] * _CHEAP_SHARE <= ns[start]:
                    unit[i] = start
        return unit

    def _compute_before(self) -> list[int]:
        """Per position, the compute time before it; one more entry for the end."""
        is_compute = [kind is Kind.COMPUTE for kind in self.kinds]
        return list(accumulate(map(mul, self.ns, is_compute), initial=0))

    def _last_in_line(self) -> list[bool]:
        """Per task, whether no collective and no compute but such tasks follow it: what is done to
        a gradient after its reduction, an update of the optimizer."""
        kinds, successors = self.kinds, self.successors
        waited_for = [False] * len(kinds)  # some collective comes before it
        for i, kind in enumerate(kinds):
            if kind is Kind.WAIT or waited_for[i]:
                for after in successors[i]:
                    waited_for[after] = True
                waited_for[i] = True
        is_last = [False] * len(kinds)
        for i in range(len(kinds) - 1, -1, -1):
            if waited_for[i] and kinds[i] is not Kind.START:
                for after in successors[i]:
                    if not is_last[after]:
                        break
                else:
                    is_last[i] = True
        return is_last

    def _first_uses(self) -> dict[int, int]:
        """Per start, the position of the first task that needs its result, looking through views,
        what moves for free and what is last in its line; the end if nothing does."""
        kinds, successors, is_last = self.kinds, self.successors, self.is_last
        count = len(kinds)
        need = [count] * count
        for i in range(count - 1, -1, -1):
            kind = kinds[i]
            if (kind is Kind.COMPUTE or kind is Kind.HOST) and not is_last[i]:
                need[i] = i
            else:
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
        program, nbytes = self.program, self.nbytes
        last_use = self._last_uses()
        found = {}
        for start, waits in self.waits_of.items():
            task = program.tasks[self.base_order.tasks[start]]
            freed = 0
            for buffer in task.reads:
                lifetime = program.buffers[buffer].lifetime
                is_ours = lifetime in (Lifetime.INTERMEDIATE, Lifetime.DONATED) and bool(waits)
                if is_ours and last_use[buffer] == start and buffer not in task.writes:
                    freed += nbytes[buffer]
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
        place = self.base_order.positions()
        place[[wait for waits in self.program.waits_of.values() for wait in waits]] = -1
        last = np.full(len(self.nbytes), -1, dtype=np.int64)
        np.maximum.at(last, arrays.touched, np.repeat(place, arrays.touch_counts))
        found: list[int] = last.tolist()
        return found
