"""Small kernels that are apart in the order share a parallel region where that is legal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function
from undertow.capture.torch_api import collectives, new_fake_mode
from undertow.codegen import kernels_gather
from undertow.codegen.cpp_kernel import WORTH, Source
from undertow.codegen.kernels_dynamic import compile_any
from undertow.codegen.kernels_gather import gathered, regions
from undertow.codegen.kernels_plan import Launch, Schedule, drop_dead, output_buffers, schedule
from undertow.codegen.kernels_program import gather_small
from undertow.loops.decompose import decompositions
from undertow.loops.fuse import fuse
from undertow.loops.ir import Buffer, Extern
from undertow.loops.lower import lower_graph

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def branches(w, x, *xs):  # type: ignore[no-untyped-def]
    """One after the other, each with a product between two small kernels."""
    found = [(x.repeat(40, 1).exp() @ w).sum()]  # needs most memory
    for k, y in enumerate(xs):
        found.append(((y + k).tanh() @ w).exp().sin() + k)
    return found


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(64, 64) / 8, *(torch.randn(100 + 20 * k, 64) for k in range(5))]


def planned(function: Any, *args: torch.Tensor) -> Schedule:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    lowered = lower_graph(gm)
    drop_dead(lowered)
    return schedule(lowered, fuse(lowered))


def test_small_kernels_of_one_depth_share_a_region() -> None:
    plan = planned(branches, *inputs())
    before, peak = regions(plan), plan.peak
    assert gather_small(plan)
    assert regions(plan) <= before - 2
    assert plan.peak <= peak
    compiled = compile_function(branches, *inputs())
    torch.testing.assert_close(compiled(*inputs()), branches(*inputs()), rtol=1e-4, atol=1e-4)


def test_they_stay_apart_where_memory_would_rise() -> None:
    """Without the large kernel all operands of the products at once would be the peak."""

    def program(w, x, *xs):  # type: ignore[no-untyped-def]
        return branches(w, x, *xs)[1:]

    plan = planned(program, *inputs())
    order, peak = list(plan.steps), plan.peak
    assert not gather_small(plan)
    assert plan.steps == order
    assert plan.peak == peak


def test_a_dependent_kernel_is_not_moved_before_what_it_reads() -> None:
    def program(w, x):  # type: ignore[no-untyped-def]
        y = x.tanh()
        z = (y @ w).exp()
        return [(z @ w).sin(), y.softmax(0), z.sum(1)]

    args = torch.randn(64, 64) / 8, torch.randn(400, 64)
    compiled = compile_function(program, *args)
    torch.testing.assert_close(compiled(*args), program(*args), rtol=1e-4, atol=1e-4)


def with_collective(place: str) -> list[str]:
    """Two small kernels of one depth with a product and a collective's start or wait between."""
    graph = fx.Graph()
    with new_fake_mode():
        x, y, w = (graph.placeholder(name) for name in "xyw")
        for node in (x, y, w):
            node.meta["val"] = torch.empty(128, 128)

        def call(name: str, target: Any, *args: Any) -> fx.Node:
            node = graph.create_node("call_function", target, args, name=name)
            node.meta["val"] = torch.empty(128, 128)
            return node

        gather = collectives.all_gather_into_tensor.default
        started = call("start", gather, w, 1, "g") if place == "wait" else None
        one = call("mm_a", aten.mm.default, call("one", aten.exp.default, x), w)
        if place == "start":
            started = call("start", gather, w, 1, "g")
        elif place == "wait":
            started = call("wait", collectives.wait_tensor.default, started)
        two = call("mm_b", aten.mm.default, call("two", aten.exp.default, y), w)
        if place == "start":
            started = call("wait", collectives.wait_tensor.default, started)
        graph.output(tuple(node for node in (one, two, started) if node is not None))
    lowered = lower_graph(fx.GraphModule(torch.nn.Module(), graph))
    plan = schedule(lowered, fuse(lowered))
    order = gathered(plan.steps, lowered.buffers, output_buffers(lowered))
    steps = plan.steps if order is None else [plan.steps[at] for at in order]
    return [s.kernels[0].origins[0] if isinstance(s, Launch) else s.origin for s in steps]


def test_nothing_moves_across_a_collective() -> None:
    assert with_collective("") == ["one", "two", "mm_a", "mm_b"]
    assert with_collective("start") == ["one", "mm_a", "start", "two", "mm_b", "wait"]
    assert with_collective("wait") == ["start", "one", "mm_a", "wait", "two", "mm_b"]


def test_small_kernels_of_symbolic_sizes_share_a_region_too() -> None:
    args = inputs()
    gm = make_fx(branches, decomposition_table=decompositions(), tracing_mode="symbolic")(*args)
    compiled = compile_any(gm, tuple(args))
    for more in (0, 7):
        given = [args[0], *(torch.cat([x, x[:more]]) for x in args[1:])]
        torch.testing.assert_close(compiled(*given), branches(*given), rtol=1e-4, atol=1e-4)
    plan = compiled.symbolic.plan
    assert [len(combo) for combo in plan.combos] == [4, 4]


def random_steps(rng: random.Random) -> tuple[list[Launch | Extern], list[Buffer]]:
    """Steps that read and write a few buffers, in place too; some are too large to be moved."""
    buffers = [
        Buffer(n, f"b{n}", "f32", (rng.randrange(1, 50),), (1,), "temp" if n > 2 else "input")
        for n in range(14)
    ]
    steps: list[Launch | Extern] = []
    for _ in range(rng.randrange(3, 40)):
        work = WORTH if rng.random() < 0.6 else 100 * WORTH
        source = Source("", (), 1, work, 0, False)
        reads = set(rng.sample(range(14), rng.randrange(3)))
        writes = {rng.randrange(3, 14)} if rng.random() < 0.9 else {rng.randrange(14)}
        steps.append(Launch("k", [], [source], reads, writes))
    return steps, buffers


def peak_of(steps: list[Launch | Extern], buffers: list[Buffer]) -> int:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        for number in (*step.reads, *step.writes):
            last[number] = at
        for number in step.writes:
            first.setdefault(number, at)
    return max(
        sum(buffers[n].nbytes for n in first if first[n] <= at <= last[n] and n > 2)
        for at in range(len(steps))
    )


def test_the_order_is_legal_and_needs_no_more_memory() -> None:
    moved = 0
    for seed in range(300):
        steps, buffers = random_steps(random.Random(seed))
        order = gathered(steps, buffers, ())
        if order is None:
            continue
        moved += 1
        assert sorted(order) == list(range(len(steps)))
        place = {at: k for k, at in enumerate(order)}
        for late, step in enumerate(steps):
            for early, other in enumerate(steps[:late]):
                if (
                    other.writes & (step.reads | step.writes)  # type: ignore[operator]
                    or other.reads & step.writes  # type: ignore[operator]
                ):
                    assert place[early] < place[late], (seed, early, late)
        assert peak_of([steps[at] for at in order], buffers) <= peak_of(steps, buffers), seed
    assert moved > 100


def test_many_branches_take_linear_time() -> None:
    """Each looks at a few others: a thousand branches are a thousand looks, not a million."""
    looks = 0

    class Counted(kernels_gather._Gatherer):
        def fits(self, first: int, end: int, nbytes: int) -> bool:
            nonlocal looks
            looks += 1
            return False

    steps = planned(branches, *inputs()).steps * 100
    cells = kernels_gather._cells(steps, ())
    Counted(steps, cells, 0).run()
    assert looks <= 2 * kernels_gather.TRIED * len(steps)
