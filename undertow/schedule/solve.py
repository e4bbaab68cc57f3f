"""`solve`: buckets, splits and order together, for the shortest step within the memory limit.

For each of a few bucket sizes, taken from the latency and bandwidth of each group, the Program with
those buckets is scheduled by construction under a few policies; the best complete schedule is then
improved by sweeps of moves and, if the Program is small, by a beam over all orders and local
search. Where layers repeat, all that is tried on the Program's fold, and only what did best there
on the whole. Every candidate is simulated and its peak compared with the limit, and the winner is
verified; the captured order is always a candidate. Where collectives stay exposed that could be
split, the step is solved again with them in pieces (`undertow.schedule.split_stage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import le

from undertow.errors import OrderError
from undertow.garbage import without_collections
from undertow.notices import say_once
from undertow.program import Order, Program, Timeline, simulate, verify
from undertow.program.flat import step_of
from undertow.program.model import IntArray
from undertow.schedule.beam import beam
from undertow.schedule.buckets import Bucket, Merged, Reprice, alone
from undertow.schedule.candidates import (
    NO_EXCESS,
    Bounds,
    Candidate,
    Excess,
    Recipe,
    Workshop,
    excess_of,
)
from undertow.schedule.condense import Condensed, condense
from undertow.schedule.early_starts import Edges, raise_all
from undertow.schedule.explore import (
    FOLD_POLICIES,
    NEAR_PERMILLE,
    ROOMY_PERMILLE,
    SMALL_TASKS,
    bounds_of_fold,
    by_rank,
    climbed,
    construct_best,
    explored,
    fold_if_large,
    with_buckets,
)
from undertow.schedule.iterative import polish
from undertow.schedule.limits import Limits
from undertow.schedule.merged_bound import Rates, bound_for_any_merging
from undertow.schedule.peak_memory import peak_memory
from undertow.schedule.plan import (
    Figures,
    Plan,
    apply_plan,
    program_digest,
    sequence_digest,
    split_as_planned,
)
from undertow.schedule.repeats import Folded, fold
from undertow.schedule.search import improve
from undertow.schedule.split_bound import bound_for_any_splitting
from undertow.schedule.split_stage import (
    in_order_ns,
    is_gain,
    leave_out,
    split_folds,
    split_programs,
)
from undertow.schedule.splits import Divided, Split, Splitting, split

_SEARCHED_TASKS = 400  # programs up to this size are searched move by move
_SWEEPS = 8  # of each kind of move, where they are worth it
_POLISHED_TASKS = 20_000  # programs up to this size are polished by sweeps of moves


@dataclass(frozen=True, slots=True)
class Solution:
    """A Plan, and the schedule that it stands for.

    `merged` is the captured Program, or what splits made of it, with its buckets.
    """

    plan: Plan
    merged: Merged
    order: Order
    timeline: Timeline
    divided: Divided | None = None  # None: nothing is split


@without_collections
def solve(
    program: Program,
    limits: Limits | None = None,
    *,
    reprice: Reprice | None = None,
    should_merge: bool = True,
    buckets: Sequence[Bucket] | None = None,
    splitting: Splitting | None = None,
) -> Solution:
    """The best schedule found for `program` within `limits`.

    `reprice` prices collectives that do not exist yet; without it nothing is merged. `buckets` are
    taken instead of the solver's own, as far as they fit the limits; nothing is split then.
    `splitting` says what can be divided and prices the pieces; without it nothing is split.
    """
    limits = limits or Limits()
    reprice = reprice if should_merge else None
    step = _Step(program, reprice, Rates(reprice) if reprice is not None else None)
    found = _solve(step, limits, buckets, splitting)
    plan = found.plan
    lean_nbytes, allowed = plan.captured.peak_nbytes, limits.allowed_peak(program)
    is_roomy = allowed is None or allowed > lean_nbytes
    if not program.starts or not is_roomy:
        return found
    bounds = Bounds(allowed, limits.in_flight_bytes, plan.bound_ns)
    excess = _excess(found, bounds)
    if excess == NO_EXCESS and plan.planned.total_ns <= plan.bound_ns:
        return found
    # Where more fits, greed may take a wrong turn: no limit gives a longer step than the default.
    tight = replace(limits, peak_bytes=lean_nbytes, peak_ratio=None)
    lean = _solve(step, tight, buckets, splitting)
    if (excess, found.timeline.total_ns) <= (_excess(lean, bounds), lean.timeline.total_ns):
        return found
    return replace(lean, plan=replace(lean.plan, limits=limits))


def _excess(found: Solution, bounds: Bounds) -> Excess:
    peak_nbytes = found.plan.planned.peak_nbytes
    return excess_of(found.merged.program, found.order, peak_nbytes, bounds)


class _Step:
    """What is to be scheduled, and what is known of it whatever the limits."""

    def __init__(
        self,
        program: Program,
        reprice: Reprice | None,
        rates: Rates | None,
        layers: IntArray | None = None,
    ) -> None:
        self.program, self.reprice, self.rates = program, reprice, rates
        self.layers = layers  # per task, the repetition that it lies in, if that is known

    @cached_property
    def captured(self) -> Timeline:
        step_of(self.program)  # several loops over all of it are to come
        return simulate(self.program)

    @cached_property
    def bound_ns(self) -> int:
        return bound_for_any_merging(self.program, self.reprice, self.rates)

    @cached_property
    def fold(self) -> Folded | None:
        return fold_if_large(self.program)

    @cached_property
    def runs(self) -> Condensed:
        return condense(self.program)

    @cached_property
    def fold_of_runs(self) -> Folded | None:
        return fold(self.runs.program)


def _solve(
    step: _Step, limits: Limits, buckets: Sequence[Bucket] | None, splitting: Splitting | None
) -> Solution:
    whole = _solve_whole(step, limits, buckets)
    if splitting is None or not splitting.splittable or buckets is not None:
        return whole
    return _with_splits(step, limits, splitting, whole)


def _with_splits(step: _Step, limits: Limits, splitting: Splitting, whole: Solution) -> Solution:
    """The whole solution, or one with splits if that is shorter and fits as well."""
    program, reprice = step.program, step.reprice
    best, fixed = whole, limits.fixed_for(program)
    bounds = Bounds(fixed.peak_bytes, fixed.in_flight_bytes, whole.plan.bound_ns)
    whole_ns = 0
    for one in _proposed_splits(step, fixed, splitting, whole):
        hopes, layers = None, None
        if isinstance(one, Divided):
            divided = one
        else:
            hopes = one
            if not is_gain(hopes.total_ns, best.timeline.total_ns):
                break
            try:
                divided = split(program, [hopes.split], splitting.splittable, splitting.price)
            except OrderError as error:
                leave_out(error)
                continue
            layers = hopes.layers[[part.task for part in divided.parts]]
        whole_ns = whole_ns or in_order_ns(whole.timeline, splitting.price)
        found = _solve_whole(
            _Step(divided.program, reprice, step.rates, layers), fixed, hopes=hopes
        )
        fits = all(map(le, _excess(found, bounds), _excess(best, bounds)))
        if not fits or not is_gain(found.timeline.total_ns, best.timeline.total_ns):
            if hopes is None:
                break  # more pieces cost more
        elif in_order_ns(found.timeline, splitting.price) < whole_ns:
            best = replace(found, divided=divided)
    bound_ns = bound_for_any_splitting(program, reprice, splitting.splittable, step.rates)
    plan = replace(best.plan, bound_ns=bound_ns)
    if best.divided is not None:
        plan = replace(
            plan,
            program=whole.plan.program,
            limits=limits,
            captured=whole.plan.captured,
            splits=best.divided.splits,
        )
    return replace(best, plan=plan)


@dataclass(frozen=True, slots=True)
class _Hopes:
    """What the best recipes make of the fold of a split step."""

    recipes: tuple[Recipe, ...]
    total_ns: int
    split: Split  # of the whole
    layers: IntArray  # per task of the whole: the repetition that it lies in


def _proposed_splits(
    step: _Step, limits: Limits, splitting: Splitting, whole: Solution
) -> Iterator[Divided | _Hopes]:
    """Ways to divide the Program: by what they let hope for on its fold, the most hopeful first;
    where nothing repeats, few pieces before many."""
    if step.fold is not None:
        try:
            found = _hopes_of_splits(step, step.fold, limits, splitting, whole)
        except OrderError as error:  # a fold is made up: it may have what no step has
            told = f"splits are decided on the whole step, not on repeated layers: {error}"
            say_once("fold not split", told)
        else:
            yield from found
            return
    yield from split_programs(step.program, whole.timeline, splitting)


def _hopes_of_splits(
    step: _Step, folded: Folded, limits: Limits, splitting: Splitting, whole: Solution
) -> list[_Hopes]:
    """What recipes let hope for on the fold with each split of it, the most hopeful first."""
    bounds = Bounds(limits.peak_bytes, limits.in_flight_bytes, whole.plan.bound_ns)
    found = []
    for one in split_folds(step.program, folded, whole.timeline, splitting):
        runs = condense(one.divided.program)
        origins = [one.divided.parts[head].task for head in runs.heads]
        fold_bounds = bounds_of_fold(folded, bounds, step.captured, one)
        fold_bounds = replace(fold_bounds, stands_for=one.stands_for[runs.heads])
        workshop = Workshop(runs.program, step.reprice, fold_bounds, folded.layers[origins])
        tried = explored(workshop, FOLD_POLICIES, 1)
        recipes = tuple(recipe for _, recipe in tried)
        total_ns = tried[0][0].total_ns(fold_bounds)
        found.append(_Hopes(recipes, total_ns, one.split, folded.whole_layers))
    return sorted(found, key=lambda hopes: hopes.total_ns)


def _solve_whole(
    step: _Step,
    limits: Limits,
    buckets: Sequence[Bucket] | None = None,
    hopes: _Hopes | None = None,
) -> Solution:
    """Buckets and order for a Program whose tasks stay as they are; `hopes` are those of its fold,
    where it is known already."""
    program = step.program
    allowed = limits.allowed_peak(program)
    is_roomy = allowed is None or allowed > step.captured.peak_nbytes
    near = ROOMY_PERMILLE if is_roomy else NEAR_PERMILLE
    bounds = Bounds(allowed, limits.in_flight_bytes, step.bound_ns, near_permille=near)
    best = Candidate(alone(program), Order.captured(program), step.captured)
    if program.starts and buckets is not None:
        best = with_buckets(program, buckets, step.reprice, bounds, best)
        best = _finished(best, bounds, limits)
    elif program.starts and len(program) > SMALL_TASKS:
        best = _solve_runs(step, limits, bounds, hopes, best)
    else:
        if program.starts:
            best = construct_best(Workshop(program, step.reprice, bounds), None, best)
        best = _finished(best, bounds, limits)
    verify(best.merged.program, best.order)
    return _solution(program, limits, step.captured, best, step.bound_ns)


def _solve_runs(
    step: _Step, limits: Limits, bounds: Bounds, hopes: _Hopes | None, best: Candidate
) -> Candidate:
    """The captured order, which is `best`, or what is decided in runs of tasks that stay together.
    Runs never count less memory than their tasks: what fits still does when taken apart."""
    runs = step.runs
    if hopes is not None:
        assert step.layers is not None
        workshop = Workshop(runs.program, step.reprice, bounds, step.layers[runs.heads])
        found = climbed(workshop, hopes.recipes, set(), hopes.total_ns, best)
    else:
        folded = step.fold_of_runs
        layers = folded.whole_layers if folded else None
        workshop = Workshop(runs.program, step.reprice, bounds, layers)
        found = construct_best(workshop, folded, best)
    if found is best:
        order = Order.captured(runs.program)
        found = Candidate(alone(runs.program), order, simulate(runs.program, order))
    found = _finished(found, bounds, limits)
    merged, order = runs.expanded(found.merged, found.order, step.reprice)
    expanded = Candidate(merged, order, simulate(merged.program, order))
    return min(best, expanded, key=by_rank(bounds))


def _finished(best: Candidate, bounds: Bounds, limits: Limits) -> Candidate:
    """What memory orders, sweeps of moves and, where it is small, search make of a schedule."""
    if not best.fits(bounds):
        best = _lowered(best, bounds)
    if best.merged.program.starts:
        best = _polished(best, bounds, limits)
    if len(best.merged.program) <= _SEARCHED_TASKS:
        best = _search(best, bounds, limits.steps)
    return _with_early_starts(best, bounds)


def _with_early_starts(best: Candidate, bounds: Bounds) -> Candidate:
    """Starts as early as they go within the peak that there is anyway. A collective that starts
    just in time by the prediction comes late in a step that is not quite as predicted."""
    program = best.merged.program
    if not program.starts or not best.fits(bounds):
        return best
    peaks = Limits(
        peak_bytes=best.timeline.peak_nbytes,
        peak_ratio=None,
        in_flight_bytes=bounds.in_flight_nbytes,
    )
    order = raise_all(program, best.order, peaks, Edges(program))
    early = Candidate(best.merged, order, simulate(program, order))
    return early if early.rank(bounds) <= best.rank(bounds) else best


def solution_of(
    program: Program, limits: Limits, merged: Merged, order: Order, reprice: Reprice | None
) -> Solution:
    """A schedule that was made by other means, with its figures and bound."""
    verify(merged.program, order)
    made = Candidate(merged, order, simulate(merged.program, order))
    bound_ns = bound_for_any_merging(program, reprice)
    return _solution(program, limits, simulate(program), made, bound_ns)


def apply_solution(
    program: Program, plan: Plan, reprice: Reprice | None, splitting: Splitting | None = None
) -> Solution:
    """The schedule that a saved Plan stands for, without solving; OrderError if it does not fit.

    Its Plan decides the same; the figures and the bound are those for the costs at hand, which may
    be other ones than it was made with.
    """
    divided = split_as_planned(program, plan, splitting)
    merged, order = apply_plan(program, plan, reprice, divided)
    timeline = simulate(merged.program, order)
    if splitting is not None and splitting.splittable:
        bound_ns = bound_for_any_splitting(program, reprice, splitting.splittable)
    else:
        bound_ns = bound_for_any_merging(program, reprice)
    captured, planned = _figures(simulate(program)), _figures(timeline)
    applied = replace(plan, captured=captured, planned=planned, bound_ns=bound_ns)
    return Solution(applied, merged, order, timeline, divided)


def _lowered(best: Candidate, bounds: Bounds) -> Candidate:
    """Nothing fits yet, not even the captured order: the lowest peak that memory orders reach."""
    program = best.merged.program
    order = peak_memory(program, best.order, Limits(peak_ratio=None))
    candidate = Candidate(best.merged, order, simulate(program, order))
    return min(best, candidate, key=by_rank(bounds))


def _polished(best: Candidate, bounds: Bounds, limits: Limits) -> Candidate:
    """Starts up and waits down, within the limits. Under a tight limit these moves, which never
    raise memory, get further than building anew: then the captured order is still the best. In a
    large step that was built anew they find nothing that early starts do not."""
    program = best.merged.program
    if best.is_near(bounds) or len(program) > _POLISHED_TASKS:
        return best
    is_captured = best.order == Order.captured(program)
    if not is_captured and len(program) > SMALL_TASKS:
        return best
    rounds = 2 if is_captured else 1
    fixed = replace(limits, peak_bytes=bounds.peak_nbytes, peak_ratio=None)
    timeline = polish(best.timeline, fixed, _SWEEPS, rounds)
    candidate = Candidate(best.merged, timeline.order, timeline)
    return min(best, candidate, key=by_rank(bounds))


def _search(best: Candidate, bounds: Bounds, steps: int) -> Candidate:
    program = best.merged.program
    if not best.fits(bounds) or not steps:
        return best  # the search only moves between orders that fit, and where it may
    known, limits = best.timeline.total_ns, (bounds.peak_nbytes, bounds.in_flight_nbytes)
    found = beam(program, known, *limits, steps)
    if found.order is not None:
        best = Candidate(best.merged, found.order, simulate(program, found.order))
    if found.is_exact:
        return best
    order = improve(program, best.order, bounds.peak_nbytes, steps * 4)
    candidate = Candidate(best.merged, order, simulate(program, order))
    return min(best, candidate, key=by_rank(bounds))


def _solution(
    program: Program, limits: Limits, captured: Timeline, best: Candidate, bound_ns: int
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
