"""Which recipes are tried, on a fold and on the whole, and which are left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.synthetic import reprice as reprice_step
from undertow.program import (
    Collective,
    CollectiveKind,
    Order,
    Program,
    ProgramBuilder,
    Task,
    simulate,
)
from undertow.schedule.buckets import alone
from undertow.schedule.candidates import Bounds, Candidate, Recipe, Workshop
from undertow.schedule.construct import Policy
from undertow.schedule.explore import (
    FOLD_POLICIES,
    NEAR_PERMILLE,
    ROOMY_PERMILLE,
    bounds_of_fold,
    climbed,
    construct_best,
    explored,
)
from undertow.schedule.repeats import fold

FREE = Bounds(None, None, 1, near_permille=NEAR_PERMILLE)
ROOMY = replace(FREE, near_permille=ROOMY_PERMILLE)
SLOW_NS, QUICK_NS = 100_000, 1_000


def two_groups(layers: int, compute_ns: int) -> Program:
    """Layers whose weights come from two groups, one of which takes much longer."""
    builder = ProgramBuilder("two groups")
    groups = builder.group("slow", range(2)), builder.group("quick", range(2))
    value = builder.input("batch", 8)
    for layer in range(layers):
        weights = []
        for group, ns in zip(groups, (SLOW_NS, QUICK_NS), strict=True):
            name = f"{layer}.{group}"
            weight = builder.buffer(f"w{name}", 16)
            work = Collective(CollectiveKind.ALL_GATHER, 1 << 20)
            start = builder.start(
                f"g{name}",
                group,
                reads=[builder.input(f"s{name}", 8)],
                writes=[weight],
                ns=ns,
                work=work,
            )
            builder.wait(f"r{name}", start)
            weights.append(weight)
        out = builder.buffer(f"out{layer}", 8)
        builder.compute(f"c{layer}", reads=[value, *weights], writes=[out], ns=compute_ns)
        value = out
    return builder.build()


def latency_in_quick_alone(task: Task, ranks: tuple[int, ...]) -> Task:
    """A bucket of the slow group takes as long as its members, one of the other as one of them."""
    assert isinstance(task.work, Collective)
    if task.stream == 2:
        return task.timed(SLOW_NS * (task.work.nbytes or 0) >> 20, launches=True)
    return task.timed(QUICK_NS, launches=True)


@pytest.fixture(name="tried")
def _tried(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes by which schedules were made."""
    found: list[Recipe] = []
    made = Workshop.better_by_recipe

    def better_by_recipe(self: Workshop, recipe: Recipe, best: Candidate) -> Candidate | None:
        found.append(recipe)
        return made(self, recipe, best)

    monkeypatch.setattr(Workshop, "better_by_recipe", better_by_recipe)
    return found


def climb(program: Program, recipes: list[Recipe], bounds: Bounds = FREE) -> None:
    layers = np.arange(len(program)) * 12 // len(program)
    workshop = Workshop(program, latency_in_quick_alone, bounds, layers)
    order = Order.captured(program)
    captured = Candidate(alone(program), order, simulate(program, order))
    climbed(workshop, recipes, set(), 1, captured)


def test_where_one_group_fills_the_step_only_what_may_shorten_its_work_is_tried(tried):
    others = [Recipe(100), Recipe(0, (2, 2))]
    climb(two_groups(12, SLOW_NS // 5), [Recipe(), *others])
    assert all(recipe.policy.horizon_ns == Policy().horizon_ns for recipe in tried)
    assert others[0] not in tried  # merges what the quick group gathers, and nothing else
    assert others[1] in tried


def test_where_compute_fills_the_step_all_is_tried(tried):
    others = [Recipe(100), Recipe(0, (2, 2))]
    climb(two_groups(12, SLOW_NS * 3), [Recipe(), *others])
    assert any(recipe.policy.horizon_ns < Policy().horizon_ns for recipe in tried)
    assert set(others) <= set(tried)


def test_other_buckets_are_those_of_another_size(tried):
    recipes = [Recipe(20), Recipe(20, style="coalesced"), Recipe(100), Recipe(50), Recipe(300)]
    climb(two_groups(12, SLOW_NS * 3), recipes)
    assert [recipe.latency_permille for recipe in tried if recipe not in recipes[:1]][-2:] == [
        100,
        50,
    ]
    assert recipes[1] not in tried
    assert recipes[4] not in tried


def test_who_gives_more_memory_gets_all_sizes_tried(tried):
    recipes = [Recipe(20), Recipe(100), Recipe(50), Recipe(300)]
    climb(two_groups(12, SLOW_NS * 3), recipes, ROOMY)
    assert set(recipes) <= set(tried)


def sizes_tried(more_ns: int) -> set[int]:
    """The shares of latency for which buckets of a fold are tried, where a bucket takes so much
    more for each of its members than they do by their bytes."""

    def reprice(task: Task, ranks: tuple[int, ...]) -> Task:
        assert isinstance(task.work, Collective)
        nbytes = task.work.nbytes or 0
        ns = 15_000 + (85_000 * nbytes >> 20) + more_ns * max((nbytes >> 20) - 1, 0)
        return task.timed(ns, launches=True)

    program = two_groups(60, SLOW_NS // 5)
    folded = fold(program)
    assert folded is not None
    bounds = bounds_of_fold(folded, FREE, simulate(program))
    workshop = Workshop(folded.program, reprice, bounds, folded.layers)
    found = explored(workshop, FOLD_POLICIES[:1], 1)
    return {recipe.latency_permille for _, recipe in found if recipe.layers is None}


def test_a_size_between_two_is_left_out_where_larger_is_worse():
    assert sizes_tried(0) == {0, 100, 50, 20}
    assert sizes_tried(40_000) == {0, 100, 20}


def exchanges(layers: int) -> Program:
    """Layers in which what does not need the exchange comes after what does."""
    builder = ProgramBuilder("exchanges")
    experts, gathers = builder.group("experts", range(8)), builder.group("gathers", range(8))
    value = builder.input("batch", 8)
    for k in range(layers):
        weight = builder.buffer(f"w{k}", 16)
        shard = builder.input(f"s{k}", 2)
        gather = Collective(CollectiveKind.ALL_GATHER, 1 << 20)
        start = builder.start(
            f"g{k}", gathers, reads=[shard], writes=[weight], ns=5_000, work=gather
        )
        builder.wait(f"r{k}", start)
        sent, got, routed, shared, out = (
            builder.buffer(f"{name}{k}", 8) for name in ("sent", "got", "routed", "shared", "out")
        )
        builder.compute(f"a{k}", reads=[value, weight], writes=[sent], ns=20_000)
        work = Collective(CollectiveKind.ALL_TO_ALL, 8)
        exchange = builder.start(f"x{k}", experts, reads=[sent], writes=[got], ns=30_000, work=work)
        builder.wait(f"xr{k}", exchange)
        builder.compute(f"b{k}", reads=[got], writes=[routed], ns=20_000)
        builder.compute(f"c{k}", reads=[value], writes=[shared], ns=40_000)
        builder.compute(f"d{k}", reads=[routed, shared], writes=[out], ns=1_000)
        value = out
    return builder.build()


def test_a_window_comes_first_where_it_makes_much_of_the_difference(tried, monkeypatch):
    program = exchanges(40)
    folded = fold(program)
    assert folded is not None
    policies: list[Policy] = []
    made = Workshop.fitted

    def fitted(self, buckets, policy, within_ns=None):
        if buckets:
            policies.append(policy)
        return made(self, buckets, policy, within_ns)

    monkeypatch.setattr(Workshop, "fitted", fitted)
    order = Order.captured(program)
    captured = Candidate(alone(program), order, simulate(program, order))
    workshop = Workshop(program, reprice_step, FREE, folded.whole_layers)
    best = construct_best(workshop, folded, captured)
    assert policies
    assert all(policy.window for policy in policies)
    assert best.timeline.exposed_ns < captured.timeline.exposed_ns / 10
