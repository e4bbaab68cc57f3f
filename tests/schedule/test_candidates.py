"""What recipes make of a Program, and what a schedule of its fold says of the whole."""

from __future__ import annotations

import pytest

from bench.synthetic import fsdp_step, reprice
from undertow.program import simulate
from undertow.schedule.candidates import Bounds, Recipe, Workshop
from undertow.schedule.repeats import Folded, fold

LAYERS = 40
UNLIMITED = Bounds(None, None, 0)


@pytest.fixture(name="step", scope="module")
def _step() -> tuple[Workshop, Folded]:
    program = fsdp_step(42 * LAYERS)
    folded = fold(program)
    assert folded is not None
    return Workshop(program, reprice, UNLIMITED, folded.whole_layers), folded


def test_tasks_of_a_layer_have_its_number_also_in_the_fold(step):
    workshop, folded = step
    numbers = {
        task.name: int(n)
        for task, n in zip(workshop.program.tasks, folded.whole_layers, strict=True)
    }
    assert len({numbers[f"f7.{op}"] for op in range(12)}) == 1
    assert numbers["f8.0"] == numbers["f7.0"] + 1
    assert numbers["bi7.0"] == numbers["bi8.0"] + 1
    assert [numbers[task.name] for task in folded.program.tasks] == folded.layers.tolist()


def test_buckets_hold_what_so_many_layers_need_and_reduce(step):
    workshop, _ = step
    buckets = workshop.bucketing(Recipe(layers=(2, 4)))
    sizes = {kind: [] for kind in ("gather", "scatter")}
    for bucket in buckets:
        start = workshop.program.tasks[workshop.program.index[bucket.members[0]]]
        kind = workshop.program.streams[start.stream].name
        sizes[kind].append(len(bucket.members))
    assert max(sizes["gather"]) == 2
    assert max(sizes["scatter"]) == 4
    assert sum(sizes["gather"]) >= 2 * LAYERS - 4  # all but those at the ends of stretches
    assert not workshop.bucketing(Recipe())


def test_a_bucket_counts_as_its_members_do(step):
    _, folded = step
    captured_ns = simulate(fsdp_step(42 * LAYERS)).compute_ns
    bounds = Bounds(None, None, 0, captured_ns, folded.stands_for)
    workshop = Workshop(folded.program, reprice, bounds, folded.layers)
    found = workshop.by_recipe(Recipe(layers=(2, 2)))
    starts = found.merged.program.starts
    exposed_ns = sum(
        int(found.timeline.exposed[start])
        * sum(int(folded.stands_for[member]) for member in found.merged.origins[start])
        / len(found.merged.origins[start])
        / 1000
        for start in starts
    )
    estimate_ns = captured_ns + found.timeline.idle_ns + exposed_ns
    assert found.total_ns(bounds) == pytest.approx(estimate_ns, abs=len(starts))


def test_buckets_that_did_not_fit_are_not_tried_again():
    program = fsdp_step(3_000)
    peak = simulate(program).peak_nbytes
    workshop = Workshop(program, reprice, Bounds(peak, None, 1))
    buckets = workshop.bucketing(Recipe(20))
    tries = workshop.fitted(buckets, Recipe().policy)
    assert len(tries) > 1
    again = workshop.fitted(buckets, Recipe().policy)
    assert len(again) < len(tries)
    assert again[-1][0].rank(workshop.bounds) == tries[-1][0].rank(workshop.bounds)


def test_what_a_size_takes_is_asked_once_for_all_shares_of_latency():
    asked = []

    def counting(task, ranks):
        asked.append((task.stream, task.work))
        return reprice(task, ranks)

    program = fsdp_step(42 * LAYERS)
    workshop = Workshop(program, counting, UNLIMITED)
    found = [workshop.bucketing(Recipe(permille)) for permille in (20, 100, 50)]
    assert len(asked) == len(set(asked))
    one_by_one = [
        Workshop(program, reprice, UNLIMITED).bucketing(Recipe(permille))
        for permille in (20, 100, 50)
    ]
    assert found == one_by_one
