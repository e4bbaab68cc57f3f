"""Which recipe makes the best schedule of a Program: tried on its fold where layers repeat, and the
best of them on the whole.

A fold says cheaply what sizes of buckets, base orders and policies come to. It has too few layers
to show how much piles up at the end of a step: what is near the best is tried on the whole too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from undertow.program import Program, Timeline, profile_memory
from undertow.schedule.buckets import Bucket, Reprice
from undertow.schedule.candidates import Bases, Bounds, Candidate, Rank, Recipe, Workshop
from undertow.schedule.construct import Policy
from undertow.schedule.repeats import Folded, fold
from undertow.schedule.split_stage import FoldedSplit

NEAR_PERMILLE = 1010
"""Of the lower bound: near enough to stop, where stopping saves much."""
ROOMY_PERMILLE = 1001
"""The same for who gives more memory than the captured order takes: it is to buy something."""
SMALL_TASKS = 2_000
"""Above this size Programs are folded where layers repeat."""

# Buckets are as large as makes latency this share of a collective's time, in permille.
# The most telling come first: a large Program's budget is spent after a few.
_LATENCY_PERMILLE = (0, 100, 20, 50, 300)
_BESIDE_LAYERS = 4  # of them are tried where layers are known
# Or they hold what so many layers need, and what so many reduce.
_LAYERS = ((1, 1), (2, 2), (2, 4))
_FIRST_POLICY = Policy(delays=True)
FOLD_POLICIES = (_FIRST_POLICY, Policy(), Policy(window=64, delays=True))
"""What is tried on a fold, the first of them with all buckets."""
_HORIZONS = (2, 8)  # in durations of the longest collective
_WINDOWS = (0, 64, 1024)
_HOPEFUL_PERMILLE = 1020  # of the bound, on a fold: the whole may then be near enough at once
_LAYERS_PERMILLE = 1030  # of the best so far, for one layer: more of them are then tried too
_LAYERS_LOSE_SHARE = 1_000  # of what a fold lets hope for
_MUCH_BETTER_PERMILLE = 1030  # how much shorter a step another policy must make to come first
_MOST_PROMISING = 2  # bucketings of small programs for which every policy is tried
_LAYERS_AHEAD = 2  # whose collectives a fold may land before they are used, if the whole may
_OTHERS = 2  # recipes with other buckets that are tried on the whole if hopes do not come true
_AS_GOOD_PERMILLE = 1005  # of what the fold let hope for
_FILLED_PERMILLE = 800  # of the step: what a stream is busy for that limits its length
_CANDIDATE_TASKS = 150_000  # tasks placed over all candidates


def fold_if_large(program: Program) -> Folded | None:
    """What to explore first: the fold of a large Program whose layers repeat."""
    return fold(program) if len(program) > SMALL_TASKS else None


def construct_best(workshop: Workshop, folded: Folded | None, best: Candidate) -> Candidate:
    """The captured order, which is `best`, or what recipes make of it. Where layers repeat all
    recipes are tried on the fold, and the best of them on the whole."""
    program, reprice, bounds = workshop.program, workshop.reprice, workshop.bounds
    if folded is None and len(program) <= SMALL_TASKS:
        tried = explored(workshop, _all_policies(program), _MOST_PROMISING)
        return min(best, tried[0][0], key=by_rank(bounds))
    first = Recipe(policy=_FIRST_POLICY)
    if folded is None:
        best = min(best, workshop.by_recipe(first), key=by_rank(bounds))
        if best.is_near(bounds):
            return best
        tried = explored(workshop, _few_policies(program), 1)
        return min(best, tried[0][0], key=by_rank(bounds))
    fold_bounds = bounds_of_fold(folded, bounds, best.timeline)
    fold_workshop = Workshop(folded.program, reprice, fold_bounds, folded.layers)
    done: set[Recipe] = set()
    if fold_workshop.by_recipe(first).is_within(_HOPEFUL_PERMILLE, fold_bounds):
        done.add(first)
        best = min(best, workshop.by_recipe(first), key=by_rank(bounds))
        if best.is_near(bounds):
            return best
    tried = explored(fold_workshop, _most_suited_first(fold_workshop), 1)
    hoped_ns = tried[0][0].total_ns(fold_bounds)
    return climbed(workshop, [recipe for _, recipe in tried], done, hoped_ns, best)


def _most_suited_first(workshop: Workshop) -> Sequence[Policy]:
    """The policies for a fold. The one with which all buckets are tried is the usual one, unless
    without buckets a window is much better than all others: where exchanges of experts are waited
    for, what goes first matters more than what is merged."""
    *others, wide = FOLD_POLICIES
    excess, total_ns, _ = workshop.by_recipe(Recipe(policy=wide)).rank(workshop.bounds)
    for policy in others:
        rank = workshop.by_recipe(Recipe(policy=policy)).rank(workshop.bounds)
        if excess > rank[0] or total_ns * _MUCH_BETTER_PERMILLE >= rank[1] * 1000:
            return FOLD_POLICIES
    return [wide, *others]


def climbed(
    workshop: Workshop,
    recipes: Sequence[Recipe],
    done: set[Recipe],
    hoped_ns: int,
    best: Candidate,
) -> Candidate:
    """`best`, or what recipes make of the whole: the best of the fold first, then changes of what
    was best so far. `hoped_ns` is what the fold let hope for: if that does not come true, the best
    recipes with other buckets are tried too; with layers it never quite does. Where more memory is
    given than the captured order takes, all of them are."""
    bounds = workshop.bounds
    near_ns = _longest(workshop.program) * _HORIZONS[0]
    chosen = recipes[0]
    others = _of_other_sizes(recipes)
    is_good = False
    left: list[Callable[[Recipe], Recipe]] = [
        _as_it_is,
        _of_most_layers,
        _from_other_base,
        partial(_near_use, near_ns),
    ]
    while left and not best.is_near(bounds):
        change = left.pop(0)
        if change is _of_most_layers and is_good:
            continue  # the fold is right about these buckets, and thinks less of larger ones
        recipe = change(chosen)
        if recipe not in done and _may_be_shorter(workshop, recipe, chosen, best):
            done.add(recipe)
            candidate = workshop.better_by_recipe(recipe, best)
            if candidate is not None:
                best, chosen = candidate, recipe
        is_good = best.timeline.total_ns * 1000 <= hoped_ns * _AS_GOOD_PERMILLE
        is_thorough = bounds.near_permille < NEAR_PERMILLE
        if not left and (is_thorough or (not is_good and chosen.layers is None)):
            if is_thorough and others:
                others += [_frugal(recipe) for recipe in (chosen, *others)]
            elif not is_thorough:
                del others[_OTHERS:]
            left = [partial(_instead, other) for other in others]
            others = []
    return best


def _of_other_sizes(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The best for every size of buckets but the first one's."""
    found: dict[object, Recipe] = {}
    for recipe in recipes:
        found.setdefault((recipe.latency_permille, recipe.layers), recipe)
    return list(found.values())[1:]


def _may_be_shorter(workshop: Workshop, recipe: Recipe, chosen: Recipe, best: Candidate) -> bool:
    """Whether a recipe may make a shorter step than `chosen`, which made `best`. Where one group's
    collectives take nearly all of the step, those must become less: they do not by starting later,
    nor if only those of other groups are merged otherwise."""
    stream = _filled_stream(best)
    if stream < 0:
        return True
    if recipe.buckets == chosen.buckets:
        return recipe.policy.horizon_ns >= chosen.policy.horizon_ns
    tasks, index = workshop.program.tasks, workshop.program.index

    def on_stream(buckets: Sequence[Bucket]) -> list[Bucket]:
        return [b for b in buckets if tasks[index[b.members[0]]].stream == stream]

    return on_stream(workshop.bucketing(recipe)) != on_stream(best.merged.buckets)


def _filled_stream(best: Candidate) -> int:
    """The group whose collectives take nearly all of the step; -1 if none do."""
    program = best.merged.program
    totals = [0] * len(program.streams)
    for start in program.starts:
        totals[program.tasks[start].stream] += program.tasks[start].ns
    most = max(totals)
    is_filled = most * 1000 >= best.timeline.total_ns * _FILLED_PERMILLE
    return totals.index(most) if is_filled else -1


def _as_it_is(recipe: Recipe) -> Recipe:
    return recipe


def _instead(other: Recipe, recipe: Recipe) -> Recipe:
    return other


def _frugal(recipe: Recipe) -> Recipe:
    """With less work behind the last collectives of a step, where its own would come last."""
    return replace(recipe, policy=replace(recipe.policy, delays=True, is_frugal=True))


def _of_most_layers(recipe: Recipe) -> Recipe:
    """With what more layers need and reduce in a bucket, which a fold shows to be worse than it
    is."""
    return recipe if recipe.layers is None else replace(recipe, layers=_LAYERS[-1])


def _from_other_base(recipe: Recipe) -> Recipe:
    """Work is delayed over more layers than a fold has."""
    return replace(recipe, policy=replace(recipe.policy, delays=not recipe.policy.delays))


def _near_use(horizon_ns: int, recipe: Recipe) -> Recipe:
    """With many layers it can matter not to fill all memory with what is needed last."""
    return replace(recipe, policy=replace(recipe.policy, horizon_ns=horizon_ns))


def with_buckets(
    program: Program,
    buckets: Sequence[Bucket],
    reprice: Reprice | None,
    bounds: Bounds,
    best: Candidate,
) -> Candidate:
    """The captured order or what a few policies make of the buckets that were given."""
    bases = Workshop(program, reprice, bounds).fitted(buckets, _FIRST_POLICY)[-1][1]
    candidates = (bases.candidate(policy, bounds) for policy in _few_policies(program))
    return min(best, *candidates, key=by_rank(bounds))


def bounds_of_fold(
    folded: Folded, bounds: Bounds, captured: Timeline, chosen: FoldedSplit | None = None
) -> Bounds:
    """As much memory below the captured order's peak as the whole; above it, where there are fewer
    layers to fetch early, a share of that, but enough to fetch some. With a split of the fold,
    what that saves may be used too."""
    peak = bounds.peak_nbytes
    if peak is not None:
        fold_peak = profile_memory(folded.program).peak_nbytes
        own_peak = profile_memory(chosen.divided.program).peak_nbytes if chosen else fold_peak
        room = peak - captured.peak_nbytes + fold_peak - own_peak
        enough = min(room, folded.landing_nbytes * _LAYERS_AHEAD)
        room = room if room <= 0 else max(int(room * folded.share), enough)
        peak = own_peak + room
    return replace(
        bounds,
        peak_nbytes=peak,
        compute_ns=captured.compute_ns + (chosen.added_ns if chosen else 0),
        stands_for=chosen.stands_for if chosen else folded.stands_for,
    )


def explored(
    workshop: Workshop, policies: Sequence[Policy], promising: int
) -> list[tuple[Candidate, Recipe]]:
    """The first policy for every bucketing, then the others for the most promising of them; all
    candidates with their recipes, the best first."""
    first, *more = policies
    program, bounds = workshop.program, workshop.bounds
    is_fold = bounds.stands_for is not None
    is_large = len(program) > SMALL_TASKS or is_fold
    left = _CANDIDATE_TASKS
    tried: list[tuple[Candidate, Recipe, Bases]] = []
    seen: set[tuple[Bucket, ...]] = set()
    usual, *others = workshop.styles()
    recipes = [Recipe(permille, None, first, usual) for permille in _LATENCY_PERMILLE]
    if workshop.layers is not None:
        recipes = [*recipes[:_BESIDE_LAYERS], Recipe(0, _LAYERS[0], first, usual)]
    while recipes and left > 0:
        recipe = recipes.pop(0)
        if is_fold and _lies_between(recipe, tried, bounds):
            continue
        buckets = workshop.bucketing(recipe)
        if (buckets or not recipe.merges) and tuple(buckets) not in seen:
            seen.add(tuple(buckets))
            tries = workshop.fitted(buckets, first)
            tried.append((tries[-1][0], recipe, tries[-1][1]))
            left -= len(program) * len(tries)
            if recipe.layers is not None and recipe.style == usual:
                recipes += _of_more_layers(recipe, tried, bounds)
        if not recipes and others:
            sizes = [Recipe(permille) for permille in _LATENCY_PERMILLE[1:]]
            if is_large:  # only in the size that did best
                best = min(tried, key=lambda entry: entry[0].rank(bounds))[1]
                sizes = [best if best.merges else sizes[0]]
            style = others.pop(0)
            recipes = [replace(size, policy=first, style=style) for size in sizes]
    tried.sort(key=lambda entry: entry[0].rank(bounds))
    found = [(candidate, recipe) for candidate, recipe, _ in tried]
    for _, recipe, bases in tried[:promising]:
        for policy in more:
            if left > 0:
                candidate = bases.candidate(policy, bounds)
                found.append((candidate, replace(recipe, policy=policy)))
                left -= len(program)
    return sorted(found, key=lambda entry: _hope(entry[0], entry[1], bounds))


def _lies_between(
    recipe: Recipe, tried: Sequence[tuple[Candidate, Recipe, Bases]], bounds: Bounds
) -> bool:
    """Whether buckets would be larger than some that were tried and smaller than others, where it
    was best to merge nothing and the worse the larger buckets were."""
    by_size = {
        known.latency_permille: candidate.rank(bounds)
        for candidate, known, _ in tried
        if known.layers is None
    }
    smallest, largest = max(by_size, default=0), min(filter(None, by_size), default=0)
    if not largest < recipe.latency_permille < smallest:
        return False
    ranks = [by_size[0], *[by_size[size] for size in sorted(filter(None, by_size), reverse=True)]]
    return all(smaller < larger for smaller, larger in pairwise(ranks))


def _hope(candidate: Candidate, recipe: Recipe, bounds: Bounds) -> Rank:
    """How good a recipe is by what it makes of a fold. That never quite comes true for buckets by
    layers: others that are as good come first."""
    excess, total_ns, peak = candidate.rank(bounds)
    if recipe.layers is not None and bounds.stands_for is not None:
        total_ns += total_ns // _LAYERS_LOSE_SHARE
    return excess, total_ns, peak


def _of_more_layers(
    recipe: Recipe, tried: Sequence[tuple[Candidate, Recipe, Bases]], bounds: Bounds
) -> list[Recipe]:
    """More layers in a bucket, unless one is much worse than other sizes, or two are worse than
    one. `recipe` is the last that was tried."""
    *others, own = (candidate.rank(bounds) for candidate, _, _ in tried)
    at = _LAYERS.index(recipe.layers) if recipe.layers else 0
    if at == 0:
        best = min(others, default=own)
        goes_on = own[0] <= best[0] and own[1] * 1000 <= best[1] * _LAYERS_PERMILLE
    else:
        goes_on = own < others[-1]
    return [replace(recipe, layers=layers) for layers in _LAYERS[at + 1 : at + 2] if goes_on]


def by_rank(bounds: Bounds) -> Callable[[Candidate], Rank]:
    return lambda candidate: candidate.rank(bounds)


def _all_policies(program: Program) -> list[Policy]:
    horizons = [_FIRST_POLICY.horizon_ns, *(_longest(program) * times for times in _HORIZONS)]
    found = [
        Policy(horizon, window, delays)
        for horizon in horizons
        for window in _WINDOWS
        for delays in (True, False)
    ]
    return list(dict.fromkeys([_FIRST_POLICY, *found]))


def _few_policies(program: Program) -> list[Policy]:
    """The first, and those that differ from it in one thing."""
    near = _longest(program) * _HORIZONS[0]
    windows = [replace(_FIRST_POLICY, window=window) for window in _WINDOWS[1:]]
    return [
        _FIRST_POLICY,
        replace(_FIRST_POLICY, delays=False),
        replace(_FIRST_POLICY, horizon_ns=near),
        *windows,
    ]


def _longest(program: Program) -> int:
    return max(program.tasks[start].ns for start in program.starts)
