"""Complete schedules that `solve` compares: made by a recipe, simulated, ranked.

A recipe says how large buckets are and by which policy the order is constructed. It means the same
for a Program and for its fold, so that recipes can be tried on the small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from undertow.program import (
    Collective,
    Order,
    Program,
    Timeline,
    liveness,
    simulate,
)
from undertow.program.model import IntArray
from undertow.schedule.bucket_copies import REDUCTIONS
from undertow.schedule.buckets import (
    Bucket,
    Key,
    Keys,
    Merged,
    Reprice,
    Style,
    keys_in,
    merge,
    propose,
    starts_before,
    styles,
)
from undertow.schedule.construct import Built, Policy, construct, construct_within
from undertow.schedule.delay import delayed_order
from undertow.schedule.flat_facts import AnyFacts, facts_of
from undertow.schedule.limits import peak_in_flight
from undertow.schedule.merged_bound import LARGEST_NBYTES

_REPAIRS = 3  # how often buckets that do not fit are taken back, or the beginning is kept


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a schedule is made: what is merged, the policy by which the order is constructed, and
    which kinds of buckets there are.

    Buckets are so large that latency is a share of a collective's time, in permille (0: nothing is
    merged); or they hold what so many layers need, or, for the second number, reduce.
    """

    latency_permille: int = 0
    layers: tuple[int, int] | None = None
    policy: Policy = Policy()  # noqa: RUF009  it is frozen
    style: Style = "usual"

    @property
    def buckets(self) -> tuple[object, ...]:
        """Equal for recipes that merge the same."""
        return self.latency_permille, self.layers, self.style

    @property
    def merges(self) -> bool:
        return self.latency_permille > 0 or self.layers is not None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits in bytes, None for none; and what no schedule can beat. For a fold, `stands_for`
    says for how many tasks of the whole each of its tasks stands, and the whole is what counts."""

    peak_nbytes: int | None
    in_flight_nbytes: int | None
    least_ns: int
    compute_ns: int = 0
    stands_for: IntArray | None = None
    near_permille: int = 1000  # of `least_ns`: near enough to stop looking


Excess = tuple[int, int]  # bytes over the limit at the peak, and over that in flight
Rank = tuple[Excess, int, int]  # bytes over the limits, nanoseconds, bytes at the peak
NO_EXCESS: Excess = (0, 0)


def excess_of(program: Program, order: Order, peak_nbytes: int, bounds: Bounds) -> Excess:
    """The bytes that a schedule with this peak takes over the limits. They are compared one after
    the other: what does not fit at the peak is never made up for by what is in flight."""
    at_peak = 0 if bounds.peak_nbytes is None else max(peak_nbytes - bounds.peak_nbytes, 0)
    if bounds.in_flight_nbytes is None:
        return at_peak, 0
    return at_peak, max(peak_in_flight(program, order) - bounds.in_flight_nbytes, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    merged: Merged
    order: Order
    timeline: Timeline
    _ranks: list[tuple[Bounds, Rank]] = field(default_factory=list, compare=False, repr=False)

    def rank(self, bounds: Bounds) -> Rank:
        """The lower the better: within the limit on the peak before over it, then within that on
        what is in flight, then shorter, then the lower peak."""
        for known, rank in self._ranks:  # each is compared with many
            if known is bounds:
                return rank
        rank = self._found_rank(bounds)
        self._ranks.append((bounds, rank))
        return rank

    def _found_rank(self, bounds: Bounds) -> Rank:
        peak = self.timeline.peak_nbytes
        excess = excess_of(self.merged.program, self.order, peak, bounds)
        return excess, self.total_ns(bounds), peak

    def fits(self, bounds: Bounds) -> bool:
        """Whether it is within all limits."""
        return self.rank(bounds)[0] == NO_EXCESS

    def total_ns(self, bounds: Bounds) -> int:
        """What the step takes; of a fold, what the whole step would take."""
        if bounds.stands_for is None:
            return self.timeline.total_ns
        exposed: list[int] = self.timeline.exposed.tolist()
        tasks = self.merged.program.tasks
        weighted = sum(
            exposed[start] * self._weight(start, bounds.stands_for)
            for start in self.merged.program.starts
            if exposed[start]
        )
        for copies in self.merged.copies:
            more = sum(tasks[task].ns for task in (copies.pack, *copies.unpacks))
            weighted += (more - copies.saved_ns) * self._weight(copies.start, bounds.stands_for)
        return bounds.compute_ns + self.timeline.idle_ns + weighted // 1000

    def _weight(self, start: int, stands_for: IntArray) -> int:
        """For how many collectives this one stands, in permille: a bucket as its members do."""
        members = self.merged.origins[start]
        return sum(int(stands_for[member]) for member in members) // len(members)

    def is_within(self, permille: int, bounds: Bounds) -> bool:
        """Whether it fits and takes at most so much of the lower bound."""
        excess, total_ns, _ = self.rank(bounds)
        return excess == NO_EXCESS and 1000 * total_ns <= permille * bounds.least_ns

    def is_near(self, bounds: Bounds) -> bool:
        """Whether it is so good that looking on is not worth its time."""
        return self.is_within(bounds.near_permille, bounds)


class Bases:
    """What constructions of one Program start from: its captured order, and the delayed one."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self._captured = facts_of(merged.program)
        self._delayed: dict[bool, AnyFacts] = {}  # the usual, and the frugal
        self._built: list[tuple[Bounds, Built, Candidate]] = []

    def candidate(self, policy: Policy, bounds: Bounds) -> Candidate:
        """The schedule that `policy` constructs."""
        found = self.candidate_within(None, policy, bounds)
        assert found is not None
        return found

    def candidate_within(
        self, within_ns: int | None, policy: Policy, bounds: Bounds
    ) -> Candidate | None:
        """The schedule that `policy` constructs; it may be None if that takes longer than so
        many nanoseconds."""
        is_frugal = policy.is_frugal
        if policy.delays and self._delayed_facts(is_frugal) is self._captured:
            policy = replace(policy, delays=False, is_frugal=False)  # there is nothing to delay
        elif is_frugal and self._delayed.get(False) is self._delayed_facts(is_frugal):
            policy = replace(policy, is_frugal=False)  # nor less
        for known_bounds, built, known in self._built:
            if known_bounds is bounds and built.is_same_for(policy):
                return known
        facts = self._delayed_facts(policy.is_frugal) if policy.delays else self._captured
        limits = bounds.peak_nbytes, bounds.in_flight_nbytes
        if within_ns is None:
            made: Built | None = construct(facts, policy, *limits)
        else:
            made = construct_within(within_ns, facts, policy, *limits)
        if made is None:
            return None
        timeline = simulate(self.merged.program, made.order)
        found = Candidate(self.merged, made.order, timeline)
        self._built.append((bounds, made, found))
        return found

    def lowered(self, candidate: Candidate, policy: Policy, bounds: Bounds) -> Candidate:
        """A candidate that is over the limit on memory, with the captured order up to where it is.
        Often that is near the beginning of backward alone, where all activations are alive."""
        limit, facts = bounds.peak_nbytes, self._captured
        place = facts.base_order.positions()
        for _ in range(_REPAIRS):
            timeline = candidate.timeline
            if limit is None or timeline.peak_nbytes <= limit:
                break
            last = int(np.flatnonzero(timeline.memory.during > limit)[-1])
            kept = 1 + max(int(place[task]) for task in candidate.order.tasks[: last + 1])
            made = construct(facts, policy, limit, bounds.in_flight_nbytes, kept=kept)
            timeline = simulate(self.merged.program, made.order)
            candidate = Candidate(self.merged, made.order, timeline)
        return candidate

    def _delayed_facts(self, is_frugal: bool) -> AnyFacts:
        if is_frugal not in self._delayed:
            order = delayed_order(self._captured, is_frugal=is_frugal)
            other = self._delayed.get(not is_frugal)
            if other is not None and other.base_order == order:
                self._delayed[is_frugal] = other
            else:
                self._delayed[is_frugal] = self._captured.in_order(order)
        return self._delayed[is_frugal]


class Workshop:
    """Makes candidates of one Program; what several of them start from is made once."""

    def __init__(
        self,
        program: Program,
        reprice: Reprice | None,
        bounds: Bounds,
        layers: IntArray | None = None,
    ) -> None:
        self.program, self.reprice, self.bounds = program, reprice, bounds
        self.layers = layers  # per task, the repetition that it lies in; None if they are unknown
        self._before: dict[int, int] | None = None
        self._keys: dict[Style, Keys] = {}
        self._curves: dict[Key, _Curve] = {}
        self._bases: dict[tuple[Bucket, ...], Bases] = {}
        self._asked: dict[tuple[object, ...], list[Bucket]] = {}  # by what a recipe says of them
        self._fitting: dict[tuple[Bucket, ...], list[Bucket]] = {}  # what was left of those asked

    def styles(self) -> list[Style]:
        """The ways to merge that make a difference, those to try first in front."""
        return styles(self.program, self.keys)

    def keys(self, style: Style) -> Keys:
        if style not in self._keys:
            usual = None if style == "usual" else self.keys("usual")
            self._keys[style] = keys_in(self.program, style, usual)
        return self._keys[style]

    def bases(self, buckets: Sequence[Bucket]) -> Bases:
        """For the Program with these buckets."""
        key = tuple(buckets)
        if key not in self._bases:
            self._bases[key] = Bases(merge(self.program, buckets, self.reprice))
        return self._bases[key]

    def by_recipe(self, recipe: Recipe) -> Candidate:
        """The schedule that a recipe makes."""
        return self.fitted(self.bucketing(recipe), recipe.policy)[-1][0]

    def better_by_recipe(self, recipe: Recipe, best: Candidate) -> Candidate | None:
        """The schedule that a recipe makes, if that is better than `best`."""
        excess, best_ns, _ = best.rank(self.bounds)
        within_ns = best_ns if excess == NO_EXCESS else None
        tries = self.fitted(self.bucketing(recipe), recipe.policy, within_ns)
        is_better = bool(tries) and tries[-1][0].rank(self.bounds) < best.rank(self.bounds)
        return tries[-1][0] if is_better else None

    def fitted(
        self, buckets: Sequence[Bucket], policy: Policy, within_ns: int | None = None
    ) -> list[tuple[Candidate, Bases]]:
        """A schedule with these buckets; where it does not fit, without those alive at the peak,
        until it does. All tries, the last of which counts. None once one takes longer than
        `within_ns`: that with fewer buckets would too."""
        tries: list[tuple[Candidate, Bases]] = []
        asked = tuple(buckets)
        buckets = self._fitting.get(asked, buckets)
        for _ in range(_REPAIRS + 1):
            bases = self.bases(buckets)
            candidate = bases.candidate_within(within_ns, policy, self.bounds)
            if candidate is None:
                return []
            tries.append((candidate, bases))
            if candidate.fits(self.bounds):
                break
            kept = _without_those_at_peak(candidate)
            if len(kept) == len(bases.merged.buckets):
                lowered = bases.lowered(candidate, policy, self.bounds)
                tries.append((lowered, bases))
                break
            buckets = self._fitting[asked] = kept
        return tries

    def bucketing(self, recipe: Recipe) -> list[Bucket]:
        """The buckets that a recipe asks for."""
        if self.reprice is None or not recipe.merges:
            return []
        known = self._asked.get(recipe.buckets)
        if known is None:
            known = self._asked[recipe.buckets] = self._bucketing(recipe, self.reprice)
        return known

    def _bucketing(self, recipe: Recipe, reprice: Reprice) -> list[Bucket]:
        if self._before is None:
            self._before = starts_before(self.program)
        keys = self.keys(recipe.style)
        if recipe.layers is not None:
            keys = self._by_layers(keys, *recipe.layers)
            all_of_it = {key: LARGEST_NBYTES for key in keys.values() if key is not None}
            return propose(self.program, all_of_it, keys, self._before)
        sizes: dict[Key, int] = {}
        for start, key in keys.items():
            if key is not None and key not in sizes:
                if key not in self._curves:
                    self._curves[key] = _Curve(self.program, start, reprice)
                sizes[key] = self._curves[key].size_for(recipe.latency_permille)
        return propose(self.program, sizes, keys, self._before)

    def _by_layers(self, keys: Keys, gathered: int, reduced: int) -> Keys:
        """Keys that keep every so many layers apart."""
        assert self.layers is not None
        found: Keys = {}
        made: dict[tuple[Key, int], Key] = {}
        layers: list[int] = self.layers[list(keys)].tolist()
        for (start, key), layer in zip(keys.items(), layers, strict=True):
            if key is not None:
                layer //= reduced if key.kind in REDUCTIONS else gathered
                known = made.get((key, layer))
                key = known or made.setdefault((key, layer), key._replace(layers=layer))
            found[start] = key
        return found


def _without_those_at_peak(candidate: Candidate) -> list[Bucket]:
    program, peak = candidate.merged.program, candidate.timeline.memory.peak_position
    live = liveness(program, candidate.order)
    alive = (live.first <= peak) & (peak <= live.last)
    return [
        bucket
        for bucket in candidate.merged.buckets
        if not any(alive[b] for b in program.tasks[program.index[bucket.members[0]]].writes)
    ]


class _Curve:
    """What collectives like one of a Program take, by their size; each size is asked for once."""

    def __init__(self, program: Program, start: int, reprice: Reprice) -> None:
        self._task = program.tasks[start]
        self._ranks = program.streams[self._task.stream].ranks
        self._reprice = reprice
        self._known: dict[int, int] = {}

    def ns(self, nbytes: int) -> int:
        if nbytes not in self._known:
            work = self._task.work
            assert isinstance(work, Collective)
            task = replace(self._task, work=replace(work, nbytes=nbytes))
            self._known[nbytes] = self._reprice(task, self._ranks).ns
        return self._known[nbytes]

    def size_for(self, permille: int) -> int:
        """The smallest power of two at which latency is at most this share of the time."""
        latency = self.ns(1)
        nbytes = 1 << 10
        while nbytes < LARGEST_NBYTES and latency * 1000 > permille * self.ns(nbytes):
            nbytes *= 2
        return nbytes
