"""Complete schedules that `solve` compares: made by a recipe, simulated, ranked.

A recipe says how large buckets are and by which policy the order is constructed. It means the same
for a Program and for its fold, so that recipes can be tried on the small one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from undertow.program import (
    Collective,
    Order,
    Program,
    Timeline,
    liveness,
    renumbered,
    simulate,
)
from undertow.program.model import IntArray
from undertow.schedule.buckets import (
    Bucket,
    Key,
    Merged,
    Reprice,
    Style,
    keys_in,
    merge,
    propose,
)
from undertow.schedule.construct import Facts, Policy, construct
from undertow.schedule.delay import delayed_order
from undertow.schedule.limits import peak_in_flight

_LARGEST_NBYTES = 2 << 30
_REPAIRS = 3  # how often buckets that do not fit are taken back


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a schedule is made: buckets so large that latency is this share of a collective's time,
    in permille (0: nothing is merged), the policy by which the order is constructed, and which
    kinds of buckets there are."""

    latency_permille: int = 0
    policy: Policy = Policy()  # noqa: RUF009  it is frozen
    style: Style = "usual"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits in bytes, None for none; and what no schedule can beat. For a fold, `stands_for`
    says for how many tasks of the whole each of its tasks stands, and the whole is what counts."""

    peak_nbytes: int | None
    in_flight_nbytes: int | None
    least_ns: int
    compute_ns: int = 0
    stands_for: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    merged: Merged
    order: Order
    timeline: Timeline

    def rank(self, bounds: Bounds) -> tuple[int, int, int]:
        """The lower the better: within the limits before over them, then shorter, then the lower
        peak."""
        peak = self.timeline.peak_nbytes
        excess = 0 if bounds.peak_nbytes is None else max(peak - bounds.peak_nbytes, 0)
        if bounds.in_flight_nbytes is not None:
            in_flight = peak_in_flight(self.merged.program, self.order)
            excess += max(in_flight - bounds.in_flight_nbytes, 0)
        return excess, self.total_ns(bounds), peak

    def total_ns(self, bounds: Bounds) -> int:
        """What the step takes; of a fold, what the whole step would take."""
        if bounds.stands_for is None:
            return self.timeline.total_ns
        exposed = self.timeline.exposed
        starts = self.merged.program.starts
        weighted = sum(
            int(exposed[start]) * max(int(bounds.stands_for[i]) for i in self.merged.origins[start])
            for start in starts
        )
        tasks = self.merged.program.tasks
        for copies in self.merged.copies:
            more = sum(tasks[task].ns for task in (copies.pack, *copies.unpacks))
            weight = max(int(bounds.stands_for[i]) for i in self.merged.origins[copies.start])
            weighted += (more - copies.saved_ns) * weight
        return bounds.compute_ns + self.timeline.idle_ns + weighted // 1000

    def is_within(self, permille: int, bounds: Bounds) -> bool:
        """Whether it fits and takes at most so much of the lower bound."""
        near = 1000 * self.total_ns(bounds) <= permille * bounds.least_ns
        return near and self.rank(bounds)[0] == 0


def alone(program: Program) -> Merged:
    """Nothing is merged."""
    return Merged(program, (), tuple((i,) for i in range(len(program))))


class Bases:
    """What constructions of one Program start from: its captured order, and the delayed one."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self._captured = Facts(merged.program)
        self._delayed: tuple[Facts, Order] | None = None

    def candidate(self, policy: Policy, bounds: Bounds) -> Candidate:
        """The schedule that `policy` constructs."""
        order = self._order(policy, bounds)
        return Candidate(self.merged, order, simulate(self.merged.program, order))

    def _order(self, policy: Policy, bounds: Bounds) -> Order:
        limits = bounds.peak_nbytes, bounds.in_flight_nbytes
        if not policy.delays:
            return construct(self._captured, policy, *limits)
        if self._delayed is None:
            base = delayed_order(self._captured)
            self._delayed = Facts(renumbered(self._captured.program, base)), base
        facts, base = self._delayed
        found = construct(facts, policy, *limits)
        return Order(tuple(base.tasks[task] for task in found.tasks))


def fitted(
    program: Program, buckets: list[Bucket], reprice: Reprice | None, policy: Policy, bounds: Bounds
) -> list[tuple[Candidate, Bases]]:
    """A schedule with these buckets; where it does not fit, without those alive at the peak, until
    it does. All tries, the last of which counts."""
    tries: list[tuple[Candidate, Bases]] = []
    for _ in range(_REPAIRS + 1):
        merged = merge(program, buckets, reprice) if buckets and reprice else alone(program)
        bases = Bases(merged)
        candidate = bases.candidate(policy, bounds)
        tries.append((candidate, bases))
        if candidate.rank(bounds)[0] == 0:
            break
        kept = _without_those_at_peak(candidate)
        if len(kept) == len(merged.buckets):
            break
        buckets = kept
    return tries


def _without_those_at_peak(candidate: Candidate) -> list[Bucket]:
    program, peak = candidate.merged.program, candidate.timeline.memory.peak_position
    live = liveness(program, candidate.order)
    alive = (live.first <= peak) & (peak <= live.last)
    return [
        bucket
        for bucket in candidate.merged.buckets
        if not any(alive[b] for b in program.tasks[program.index[bucket.members[0]]].writes)
    ]


def bucketing(program: Program, recipe: Recipe, reprice: Reprice | None) -> list[Bucket]:
    """Buckets so large that latency is at most this share of their time; none for share 0."""
    if reprice is None or not recipe.latency_permille:
        return []
    keys = keys_in(program, recipe.style)
    examples: dict[Key, int] = {}
    for start, key in keys.items():
        if key is not None:
            examples.setdefault(key, start)
    sizes = {
        key: _size_for(program, start, recipe.latency_permille, reprice)
        for key, start in examples.items()
    }
    return propose(program, sizes, keys)


def _size_for(program: Program, start: int, permille: int, reprice: Reprice) -> int:
    """The smallest power of two at which latency is at most this share of the time."""
    task = program.tasks[start]
    work, ranks = task.work, program.streams[task.stream].ranks
    assert isinstance(work, Collective)

    def ns(nbytes: int) -> int:
        return reprice(replace(task, work=replace(work, nbytes=nbytes)), ranks).ns

    latency = ns(1)
    nbytes = 1 << 10
    while nbytes < _LARGEST_NBYTES and latency * 1000 > permille * ns(nbytes):
        nbytes *= 2
    return nbytes
