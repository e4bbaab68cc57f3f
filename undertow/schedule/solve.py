"""`solve`: buckets and order together, for the shortest step within the memory limit.

For each of a few bucket sizes, taken from the latency and bandwidth of each group, the Program with
those buckets is scheduled by construction under a few policies; the best complete schedule is then
improved by sweeps of moves and, if the Program is small, by local search. Every candidate is
simulated and its peak compared with the limit, and the winner is verified; the captured order is
always a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from undertow.program import (
    Collective,
    Order,
    Program,
    Timeline,
    liveness,
    renumbered,
    simulate,
    verify,
)
from undertow.schedule.buckets import (
    Bucket,
    Key,
    Merged,
    Reprice,
    bucket_key,
    merge,
    propose,
)
from undertow.schedule.construct import Facts, Policy, construct
from undertow.schedule.delay import delayed_order
from undertow.schedule.iterative import reorder_starts, sink_waits_iterative
from undertow.schedule.limits import Limits, peak_in_flight
from undertow.schedule.merged_bound import bound_for_any_merging
from undertow.schedule.peak_memory import peak_memory
from undertow.schedule.plan import (
    Figures,
    Plan,
    apply_plan,
    program_digest,
    sequence_digest,
)
from undertow.schedule.search import improve

# Buckets are as large as makes latency this share of a collective's time, in permille.
# The most telling come first: a large Program's budget is spent after a few.
_LATENCY_PERMILLE = (100, 20, 300, 50)
_LARGEST_NBYTES = 2 << 30
_HORIZONS = (2, 8)  # in durations of the longest collective; and without a limit
_WINDOWS = (0, 64, 1024)
_FIRST_POLICY = Policy()
_NEAR_PERMILLE = 1005  # of the lower bound: near enough to stop
_CLOSE_PERMILLE = 1030  # so near that only the most telling policies are tried
_FEW = 4  # of them
_REPAIRS = 3  # how often buckets that do not fit are taken back
_MOST_PROMISING = 2  # bucketings for which every policy is tried
_SEARCHED_TASKS = 400  # programs up to this size are searched move by move
_POLISHED_TASKS = 20_000  # programs up to this size are polished by sweeps of moves
_CANDIDATE_TASKS = 150_000  # tasks placed over all candidates


@dataclass(frozen=True, slots=True)
class Solution:
    """A Plan, and the schedule that it stands for."""

    plan: Plan
    merged: Merged
    order: Order
    timeline: Timeline


def solve(
    program: Program,
    limits: Limits | None = None,
    *,
    reprice: Reprice | None = None,
    should_merge: bool = True,
) -> Solution:
    """The best schedule found for `program` within `limits`.

    `reprice` prices collectives that do not exist yet; without it nothing is merged.
    """
    limits = limits or Limits()
    captured = simulate(program)
    allowed = limits.allowed_peak(program)
    best = _Candidate(_alone(program), Order.captured(program), captured)
    reprice = reprice if should_merge else None
    bound_ns = bound_for_any_merging(program, reprice)
    bounds = _Bounds(allowed, limits.in_flight_bytes, bound_ns)
    if program.starts:
        best = _construct_best(program, reprice, bounds, best)
    if best.rank(bounds)[0] > 0:
        best = _lowered(best, bounds)
    if program.starts:
        best = _polished(best, bounds, limits)
    if len(best.merged.program) <= _SEARCHED_TASKS:
        best = _search(best, bounds, limits.steps)
    verify(best.merged.program, best.order)
    return _solution(program, limits, captured, best, bound_ns)


def apply_solution(program: Program, plan: Plan, reprice: Reprice) -> Solution:
    """The schedule that a saved Plan stands for, without solving; OrderError if it does not fit."""
    merged, order = apply_plan(program, plan, reprice)
    timeline = simulate(merged.program, order)
    allowed = plan.limits.allowed_peak(program)
    if allowed is not None:
        verify(merged.program, order, peak_nbytes=max(allowed, plan.planned.peak_nbytes))
    return Solution(plan, merged, order, timeline)


@dataclass(frozen=True, slots=True)
class _Candidate:
    merged: Merged
    order: Order
    timeline: Timeline

    def rank(self, bounds: _Bounds) -> tuple[int, int, int]:
        """The lower the better: within the limits before over them, then shorter, then the lower
        peak."""
        peak = self.timeline.peak_nbytes
        excess = 0 if bounds.peak_nbytes is None else max(peak - bounds.peak_nbytes, 0)
        if bounds.in_flight_nbytes is not None:
            in_flight = peak_in_flight(self.merged.program, self.order)
            excess += max(in_flight - bounds.in_flight_nbytes, 0)
        return excess, self.timeline.total_ns, peak

    def is_within(self, permille: int, bounds: _Bounds) -> bool:
        """Whether it fits and takes at most so much of the lower bound."""
        near = 1000 * self.timeline.total_ns <= permille * bounds.least_ns
        return near and self.rank(bounds)[0] == 0


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The limits in bytes, None for none; and what no schedule can beat."""

    peak_nbytes: int | None
    in_flight_nbytes: int | None
    least_ns: int


def _alone(program: Program) -> Merged:
    return Merged(program, (), tuple((i,) for i in range(len(program))))


def _bucketings(program: Program, reprice: Reprice | None) -> Iterator[list[Bucket]]:
    """Ways to merge, from none to large buckets; each once."""
    yield []
    if reprice is None:
        return
    seen: set[tuple[Bucket, ...]] = set()
    examples = _examples(program)
    for permille in _LATENCY_PERMILLE:
        sizes = {
            key: _size_for(program, start, permille, reprice) for key, start in examples.items()
        }
        buckets = propose(program, sizes)
        if buckets and tuple(buckets) not in seen:
            seen.add(tuple(buckets))
            yield buckets


def _examples(program: Program) -> dict[Key, int]:
    """One collective of each key."""
    found: dict[Key, int] = {}
    for start in program.starts:
        key = bucket_key(program, start)
        if key is not None:
            found.setdefault(key, start)
    return found


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


def _construct_best(
    program: Program, reprice: Reprice | None, bounds: _Bounds, best: _Candidate
) -> _Candidate:
    """One policy for every bucketing, then the other policies for the most promising of them."""
    left = _CANDIDATE_TASKS
    tried: list[tuple[_Candidate, _Bases]] = []
    for buckets in _bucketings(program, reprice):
        if left <= 0:
            break
        tries = _fitted(program, buckets, reprice, bounds)
        tried.append(tries[-1])
        left -= len(program) * len(tries)
        if tried[-1][0].is_within(_NEAR_PERMILLE, bounds):
            break  # nothing left to gain
        if len(tried) > 1 and tried[0][0].is_within(_CLOSE_PERMILLE, bounds):
            break  # little left to gain: one way to merge is enough to see whether it helps
    tried.sort(key=lambda entry: entry[0].rank(bounds))
    best = min(best, tried[0][0], key=lambda candidate: candidate.rank(bounds))
    is_close = best.is_within(_CLOSE_PERMILLE, bounds)
    for first, bases in tried[: 1 if is_close else _MOST_PROMISING]:
        policies = _other_policies(first.merged.program)
        for policy in policies[: _FEW if is_close else len(policies)]:
            if left <= 0 or best.is_within(_NEAR_PERMILLE, bounds):
                return best
            candidate = _constructed(first.merged, bases, policy, bounds)
            best = min(best, candidate, key=lambda candidate: candidate.rank(bounds))
            left -= len(program)
    return best


def _fitted(
    program: Program, buckets: list[Bucket], reprice: Reprice | None, bounds: _Bounds
) -> list[tuple[_Candidate, _Bases]]:
    """A schedule with these buckets; where it does not fit, without those alive at the peak, until
    it does. All tries, the last of which counts."""
    tries: list[tuple[_Candidate, _Bases]] = []
    for _ in range(_REPAIRS + 1):
        merged = merge(program, buckets, reprice) if buckets and reprice else _alone(program)
        bases = _Bases(merged.program)
        candidate = _constructed(merged, bases, _FIRST_POLICY, bounds)
        tries.append((candidate, bases))
        kept = _without_those_at_peak(candidate)
        if candidate.rank(bounds)[0] == 0 or len(kept) == len(merged.buckets):
            break
        buckets = kept
    return tries


def _without_those_at_peak(candidate: _Candidate) -> list[Bucket]:
    program, peak = candidate.merged.program, candidate.timeline.memory.peak_position
    live = liveness(program, candidate.order)
    alive = (live.first <= peak) & (peak <= live.last)
    return [
        bucket
        for bucket in candidate.merged.buckets
        if not any(alive[b] for b in program.tasks[program.index[bucket.members[0]]].writes)
    ]


def _other_policies(program: Program) -> list[Policy]:
    longest = max(program.tasks[start].ns for start in program.starts)
    horizons = [_FIRST_POLICY.horizon_ns, *(longest * times for times in _HORIZONS)]
    return [
        policy
        for horizon in horizons
        for window in _WINDOWS
        for delays in (True, False)
        if (policy := Policy(horizon, window, delays)) != _FIRST_POLICY
    ]


class _Bases:
    """What constructions of one Program start from: its captured order, and the delayed one."""

    def __init__(self, program: Program) -> None:
        self._captured = Facts(program)
        self._delayed: tuple[Facts, Order] | None = None

    def construct(self, policy: Policy, bounds: _Bounds) -> Order:
        limits = bounds.peak_nbytes, bounds.in_flight_nbytes
        if not policy.delays:
            return construct(self._captured, policy, *limits)
        if self._delayed is None:
            base = delayed_order(self._captured)
            self._delayed = Facts(renumbered(self._captured.program, base)), base
        facts, base = self._delayed
        found = construct(facts, policy, *limits)
        return Order(tuple(base.tasks[task] for task in found.tasks))


def _constructed(merged: Merged, bases: _Bases, policy: Policy, bounds: _Bounds) -> _Candidate:
    order = bases.construct(policy, bounds)
    return _Candidate(merged, order, simulate(merged.program, order))


def _lowered(best: _Candidate, bounds: _Bounds) -> _Candidate:
    """Nothing fits yet, not even the captured order: the lowest peak that memory orders reach."""
    program = best.merged.program
    order = peak_memory(program, best.order, Limits(peak_ratio=None))
    candidate = _Candidate(best.merged, order, simulate(program, order))
    return min(best, candidate, key=lambda candidate: candidate.rank(bounds))


def _polished(best: _Candidate, bounds: _Bounds, limits: Limits) -> _Candidate:
    """Starts up and waits down, within the limits. Under a tight limit these moves, which never
    raise memory, get further than building anew: then the captured order is still the best."""
    program = best.merged.program
    if best.is_within(_NEAR_PERMILLE, bounds) or len(program) > _POLISHED_TASKS:
        return best
    rounds = 2 if best.order == Order.captured(program) else 1
    fixed = replace(limits, peak_bytes=bounds.peak_nbytes, peak_ratio=None)
    order = best.order
    for move in (reorder_starts, sink_waits_iterative) * rounds:
        order = move(program, order, fixed).order
    candidate = _Candidate(best.merged, order, simulate(program, order))
    return min(best, candidate, key=lambda candidate: candidate.rank(bounds))


def _search(best: _Candidate, bounds: _Bounds, steps: int) -> _Candidate:
    program = best.merged.program
    if best.rank(bounds)[0] > 0:
        return best  # the search only moves between orders that fit
    order = improve(program, best.order, bounds.peak_nbytes, steps * 4)
    candidate = _Candidate(best.merged, order, simulate(program, order))
    return min(best, candidate, key=lambda candidate: candidate.rank(bounds))


def _solution(
    program: Program, limits: Limits, captured: Timeline, best: _Candidate, bound_ns: int
) -> Solution:
    scheduled = best.merged.program
    plan = Plan(
        program=program_digest(program),
        order=tuple(scheduled.tasks[i].name for i in best.order.tasks),
        buckets=best.merged.buckets,
        limits=limits,
        captured=_figures(captured),
        planned=_figures(best.timeline),
        bound_ns=bound_ns,
        digest=sequence_digest(scheduled, best.order),
    )
    return Solution(plan, best.merged, best.order, best.timeline)


def _figures(timeline: Timeline) -> Figures:
    return Figures(timeline.total_ns, timeline.exposed_ns, timeline.peak_nbytes)
