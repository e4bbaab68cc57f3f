"""Manual plans: the user names modules, and their collectives follow a fixed rule.

Each entry is a pattern of module paths (`layers.*`: one module for each that matches) or several,
which are then one module. Per module and pass over it, the gathers of its parameters run as one and
start before the module in front of it is waited for, and the reductions of its gradients run as one
and are waited for after those of the next module have started. No costs are asked for; memory is
counted, and prefetches, then buckets, that do not fit the limit are taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from undertow.errors import UndertowError, unknown_name
from undertow.program import (
    Collective,
    CollectiveKind,
    OpClass,
    Order,
    Program,
    Task,
    Work,
    liveness,
    profile_memory,
)
from undertow.schedule.buckets import Bucket, Key, Merged, Reprice, alone, bucket_key, merge
from undertow.schedule.fsdp_order import input_roots, parameter_gathers
from undertow.schedule.limits import Limits, peak_in_flight
from undertow.schedule.ready import Ready, order_by

Entry = str | Sequence[str]
"""A pattern of module paths, or several that count as one module.

Paths are compared part by part from the front; `*` stands for one part, or for a piece of one.
"""

_HEAVY = (OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION)
_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
_MOST_TAKEN_BACK = 64  # times that something is taken back for memory; then everything is


@dataclass(frozen=True, slots=True)
class Visit:
    """The collectives of one kind that one pass over a module needs, in captured order."""

    module: str
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Managed:
    """A schedule by a manual plan; `notes` say what could not be done and why."""

    merged: Merged
    order: Order
    notes: tuple[str, ...] = ()


def plan_manually(
    program: Program,
    entries: Sequence[Entry],
    limits: Limits | None = None,
    *,
    reprice: Reprice | None = None,
    order: Order | None = None,
) -> Managed:
    """The schedule that `entries` ask for, as far as it fits the limits.

    `reprice` prices merged collectives; without it nothing is merged. An entry without a collective
    that it could manage is an error.
    """
    limits = (limits or Limits()).fixed_for(program)
    incoming = order or Order.captured(program)
    gathers, reductions = managed_visits(program, entries, incoming)
    buckets: list[Bucket] = []
    if reprice is not None:
        buckets = list(_buckets(program, gathers + reductions))
    return _Manual(program, incoming, gathers, reductions, limits, reprice).run(buckets)


def managed_visits(
    program: Program, entries: Sequence[Entry], order: Order
) -> tuple[list[Visit], list[Visit]]:
    """Gathers of parameters and reductions of gradients, visit by visit."""
    place: list[int] = order.positions().tolist()
    gathers = sorted(parameter_gathers(program), key=place.__getitem__)
    reductions = sorted(gradient_reductions(program), key=place.__getitem__)
    module_of = _modules(program, entries, [*gathers, *reductions])
    roots = input_roots(program)
    return (
        list(_visits(gathers, module_of, roots)),
        list(_visits(reductions, module_of, None)),
    )


def gradient_reductions(program: Program) -> list[int]:
    """Reductions whose result no matmul needs: it goes to the optimizer, or out of the step."""
    is_needed = [False] * len(program)  # by something heavy
    for task in range(len(program) - 1, -1, -1):
        is_needed[task] = any(
            is_needed[after] or _is_heavy(program.tasks[after])
            for after in program.successors[task]
        )
    return [
        start
        for start in program.starts
        if not is_needed[start] and _is_reduction(program.tasks[start])
    ]


def _is_heavy(task: Task) -> bool:
    return isinstance(task.work, Work) and task.work.op_class in _HEAVY


def _is_reduction(task: Task) -> bool:
    return isinstance(task.work, Collective) and task.work.kind in _REDUCTIONS


# -- which module a collective belongs to -------------------------------------------------------


def matched_module(pattern: str, path: str) -> str | None:
    """The front of `path` that `pattern` matches.

    >>> matched_module("layers.*", "layers.3.mlp.up.weight"), matched_module("layers.*", "norm")
    ('layers.3', None)
    """
    wanted, parts = pattern.split("."), path.split(".")
    if len(parts) < len(wanted):
        return None
    if not all(fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False)):
        return None
    return ".".join(parts[: len(wanted)])


def _modules(program: Program, entries: Sequence[Entry], starts: Sequence[int]) -> dict[int, str]:
    """Start -> its module; every pattern must have one, and no start two."""
    if not entries:
        raise UndertowError("a manual plan needs at least one module path such as 'layers.*'")
    found: dict[int, tuple[str, str]] = {}
    for entry in entries:
        patterns = (entry,) if isinstance(entry, str) else tuple(entry)
        for pattern in patterns:
            matched = False
            for start in starts:
                module = matched_module(pattern, program.tasks[start].module)
                if module is None:
                    continue
                matched = True
                if start in found:
                    raise UndertowError(
                        f"{program.tasks[start].module!r} is in two entries of the manual plan, "
                        f"{found[start][1]!r} and {pattern!r}; leave it to one of them"
                    )
                name = module if len(patterns) == 1 else "+".join(patterns)
                found[start] = (name, pattern)
            if not matched:
                raise UndertowError(_refusal(program, pattern, starts))
    return {start: module for start, (module, _) in found.items()}


def _refusal(program: Program, pattern: str, starts: Sequence[int]) -> str:
    """Why a pattern manages nothing."""
    if not starts:
        return (
            "this step gathers no parameters and reduces no gradients, so that there is nothing "
            "for a manual plan to manage"
        )
    if any(matched_module(pattern, task.module) for task in program.tasks):
        return (
            f"{pattern!r} matches modules of this step, but none that gathers parameters or "
            "reduces gradients; leave it out of the manual plan"
        )
    depth = pattern.count(".") + 1
    fronts = (program.tasks[start].module.split(".")[:depth] for start in starts)
    known = dict.fromkeys(".".join(front) for front in fronts if any(front))
    return unknown_name("module path", pattern, known)


def _visits(
    starts: Sequence[int],
    module_of: dict[int, str],
    roots: Sequence[frozenset[int]] | None,
) -> Iterator[Visit]:
    """Neighbours of one module; gathering a parameter again begins a new visit."""
    current: list[int] = []
    seen: set[int] = set()
    for start in starts:
        module = module_of.get(start)
        if module is None:
            continue
        gathered = frozenset() if roots is None else roots[start]
        if current and (module != module_of[current[0]] or seen & gathered):
            yield Visit(module_of[current[0]], tuple(current))
            current, seen = [], set()
        current.append(start)
        seen |= gathered
    if current:
        yield Visit(module_of[current[0]], tuple(current))


def _buckets(program: Program, visits: Sequence[Visit]) -> Iterator[Bucket]:
    """The collectives of each visit that can be one."""
    for visit in visits:
        by_key: dict[Key, list[str]] = {}
        for start in visit.starts:
            key = bucket_key(program, start)
            if key is not None:
                by_key.setdefault(key, []).append(program.tasks[start].name)
        for key, names in by_key.items():
            if len(names) > 1:
                yield Bucket(tuple(names), key.how)


# -- the order ----------------------------------------------------------------------------------


class _Manual:
    """One manual plan on one Program: tried whole, then without what does not fit."""

    def __init__(
        self,
        program: Program,
        incoming: Order,
        gathers: list[Visit],
        reductions: list[Visit],
        limits: Limits,
        reprice: Reprice | None,
    ) -> None:
        self.program, self.incoming, self.limits, self.reprice = program, incoming, limits, reprice
        self.gathers, self.reductions = gathers, reductions
        self.prefetched = set(range(1, len(gathers)))  # visits that start under the one before
        self.delayed = set(range(len(reductions) - 1))  # visits waited for under the next
        self.notes: list[str] = []

    def run(self, buckets: list[Bucket]) -> Managed:
        for tries in range(2 * _MOST_TAKEN_BACK):
            merged = self._merged(buckets)
            order = self._order(merged)
            if order is None:
                if not self.prefetched and not self.delayed:
                    break
                self.notes.append("hazards forbid the prefetches together; none is done")
                self.prefetched, self.delayed = set(), set()
                continue
            if self._fits(merged.program, order):
                return Managed(merged, order, tuple(dict.fromkeys(self.notes)))
            buckets = self._taken_back(merged, order, list(merged.buckets), tries)
        return Managed(alone(self.program), self.incoming, tuple(dict.fromkeys(self.notes)))

    def _fits(self, program: Program, order: Order) -> bool:
        """Within the limits, or where the incoming order is not, within what that takes."""
        peak, in_flight = self.limits.peak_bytes, self.limits.in_flight_bytes
        if peak is not None:
            allowed = max(peak, profile_memory(self.program, self.incoming).peak_nbytes)
            if profile_memory(program, order).peak_nbytes > allowed:
                return False
        if in_flight is not None:
            allowed = max(in_flight, peak_in_flight(self.program, self.incoming))
            return peak_in_flight(program, order) <= allowed
        return True

    def _merged(self, buckets: list[Bucket]) -> Merged:
        if not buckets or self.reprice is None:
            return alone(self.program)
        merged = merge(self.program, buckets, self.reprice)
        for bucket in buckets:
            if bucket not in merged.buckets:
                self.notes.append(
                    f"{bucket.members[0]!r} and {len(bucket.members) - 1} others of its module "
                    "depend on each other and are not merged"
                )
        return merged

    def _order(self, merged: Merged) -> Order | None:
        """Tasks at their incoming places, but for what the edges move."""
        incoming: list[int] = self.incoming.positions().tolist()
        first = [min(incoming[origin] for origin in origins) for origins in merged.origins]
        rank = sorted(range(len(first)), key=first.__getitem__)
        places = [0] * len(first)
        for at, task in enumerate(rank):
            places[task] = at
        order = Order.captured(merged.program)
        edges = self._edges(merged, places)
        ready = Ready(merged.program, order, keep_sequences=False, extra=edges)
        return order_by(merged.program, ready, places)

    def _edges(self, merged: Merged, places: list[int]) -> dict[int, list[int]]:
        program = merged.program
        task_of = {origin: k for k, origins in enumerate(merged.origins) for origin in origins}
        edges: dict[int, list[int]] = {}

        def starts_of(visit: Visit) -> list[int]:
            return list(dict.fromkeys(task_of[start] for start in visit.starts))

        def waits_of(visit: Visit) -> list[int]:
            waits = {wait for start in starts_of(visit) for wait in program.waits_of[start]}
            return sorted(waits, key=places.__getitem__)

        for visits in (self.gathers, self.reductions):
            chain = list(dict.fromkeys(start for visit in visits for start in starts_of(visit)))
            for before, after in pairwise(chain):
                edges.setdefault(before, []).append(after)
        for k, visit in enumerate(self.gathers):
            ahead = self.gathers[k + 1] if k + 1 in self.prefetched else visit
            if waits_of(visit):
                edges.setdefault(starts_of(ahead)[-1], []).append(waits_of(visit)[0])
        for k in sorted(self.delayed):
            following = starts_of(self.reductions[k + 1])[0]
            edges.setdefault(following, []).extend(waits_of(self.reductions[k]))
        return edges

    def _taken_back(
        self, merged: Merged, order: Order, buckets: list[Bucket], tries: int
    ) -> list[Bucket]:
        """Give up what is alive at the peak: first prefetches and delays, then buckets."""
        alive = _alive_at_peak(merged, order)
        early = {k for k in self.prefetched if alive & set(self.gathers[k].starts)}
        late = {k for k in self.delayed if alive & set(self.reductions[k].starts)}
        if tries >= _MOST_TAKEN_BACK:
            early, late = self.prefetched, self.delayed
        if early or late:
            for k in sorted(early):
                self.notes.append(f"{self.gathers[k].module} is not prefetched: it does not fit")
            for k in sorted(late):
                module = self.reductions[k].module
                self.notes.append(f"the gradients of {module} are not delayed: they do not fit")
            self.prefetched, self.delayed = self.prefetched - early, self.delayed - late
            return buckets
        names = {self.program.tasks[start].name for start in alive}
        kept = [bucket for bucket in buckets if names.isdisjoint(bucket.members)]
        if len(kept) == len(buckets):
            kept = []
        if buckets:
            self.notes.append(f"{len(buckets) - len(kept)} buckets are dissolved: they do not fit")
        return kept


def _alive_at_peak(merged: Merged, order: Order) -> set[int]:
    """Captured starts whose buffers are alive where memory is highest."""
    program = merged.program
    peak = profile_memory(program, order).peak_position
    live = liveness(program, order)
    alive = (live.first <= peak) & (peak <= live.last)
    return {
        origin
        for start in program.starts
        if any(alive[buffer] for buffer in program.tasks[start].writes)
        for origin in merged.origins[start]
    }
