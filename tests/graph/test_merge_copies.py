"""Copied buckets are written as traced copies: the same numbers, in the memory that was counted."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import run_alone
from tests.programs import random_order
from undertow.capture.mesh import fake_world
from undertow.errors import OrderError
from undertow.graph import collective_call, convert, rewrite
from undertow.program import Kind, Order, profile_memory, verify
from undertow.schedule.buckets import Bucket, Merged, bucket_key, merge, propose, ways

ops = torch.ops._c10d_functional
wait = ops.wait_tensor
GROUPS = {"0": ("dp", tuple(range(4)))}
X, Y = torch.arange(32.0).reshape(8, 4) / 8, torch.rand(4, 3, 2)
HALF = torch.bfloat16


def gather(x: torch.Tensor) -> torch.Tensor:
    return ops.all_gather_into_tensor(x, 4, "0")


def reduce(x: torch.Tensor) -> torch.Tensor:
    return ops.all_reduce(x, "sum", "0")


def scatter(x: torch.Tensor) -> torch.Tensor:
    return ops.reduce_scatter_tensor(x, "sum", 4, "0")


def exchange(x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0] // 4
    return ops.all_to_all_single(x, [rows] * 4, [rows] * 4, "0")


def exchange_unevenly(x: torch.Tensor) -> torch.Tensor:
    rows = [x.shape[0] - 3, 1, 1, 1]
    return ops.all_to_all_single(x, rows, rows, "0")


KINDS = [gather, reduce, scatter, exchange]


def traced(function: Any, *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    with fake_world(4):
        return make_fx(function, tracing_mode=mode)(*inputs)


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if collective_call(node)]


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def copied(
    module: fx.GraphModule, *inputs: torch.Tensor, rng: random.Random | None = None
) -> tuple[fx.GraphModule, Merged]:
    """All that can be copied, copied, in the adapted order or a random legal one; compared with the
    module as it was in numbers, and with the merged Program in memory."""
    before = copy.deepcopy(module)
    converted = convert(module.graph, GROUPS)
    program = converted.program
    keys = {s: bucket_key(program, s, "copied", mixed=True) for s in program.starts}
    buckets = propose(program, {key: 1 << 30 for key in keys.values() if key}, keys)
    merged = merge(program, buckets, lambda task, _: task)
    order = random_order(rng, merged.program) if rng else Order.captured(merged.program)
    verify(merged.program, order)
    rewrite(converted, merged, order)
    module.graph.lint()
    module.recompile()
    again = convert(module.graph, GROUPS).program
    verify(again, Order.captured(again))
    assert profile_memory(again).peak_nbytes == profile_memory(merged.program, order).peak_nbytes
    for late in (False, True):
        wanted, got = (run_alone(each, list(inputs), late) for each in (before, module))
        for a, b in zip(wanted[0] + wanted[1], got[0] + got[1], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return module, merged


@pytest.mark.parametrize("start", [*KINDS, exchange_unevenly])
def test_members_of_any_shape_become_one_collective(start):
    def step(x, y):
        return wait(start(x + 1)) * 2, wait(start(y)).sum(0), wait(start(x[:4]))

    module, _ = copied(traced(step, X, Y), X, Y)
    (call,) = calls(module)
    assert "coalesced" not in str(call.target)
    assert call.meta["val"].dim() == 1


@pytest.mark.parametrize("start", [gather, exchange, exchange_unevenly])
def test_mixed_dtypes_go_as_bytes(start):
    def step(x, y):
        small, whole = (x * 3).to(torch.int16), y.double()
        return wait(start(small)), wait(start(x)), wait(start(whole)), wait(start(x.to(HALF)))

    module, _ = copied(traced(step, X, Y), X, Y)
    (call,) = calls(module)
    assert call.meta["val"].dtype == torch.uint8


def test_reductions_of_two_dtypes_stay_two():
    module = traced(lambda x, y: (wait(reduce(x)), wait(reduce(y.double()))), X, Y)
    module, _ = copied(module, X, Y)
    assert len(calls(module)) == 2


@pytest.mark.parametrize("start", [gather, reduce, scatter])
def test_casts_are_done_by_the_copy(start):
    def step(x, y):
        return wait(start(x.to(HALF))).float(), wait(start(y.to(HALF))) + 1

    module, merged = copied(traced(step, X, Y), X, Y)
    assert len(calls(module)) == 1
    names = targets(module)
    assert names.count("aten._to_copy.default") == 1  # the one of the result
    assert names.count("aten._foreach_copy_.default") == 1
    assert len(merged.origins[merged.copies[0].pack]) == 2


def test_a_cast_up_is_done_by_the_copy_of_a_scatter_beside_one_that_needs_none():
    def step(x, y):
        return wait(scatter(x.to(HALF).float())), wait(scatter(y))

    module, _ = copied(traced(step, X, Y), X, Y)
    assert targets(module).count("aten._to_copy.default") == 1


def test_a_mixed_gather_folds_casts_too():
    def step(x, y):
        return wait(gather(x.to(HALF))), wait(gather(y)), wait(gather(x[:3].to(torch.int8)))

    module, _ = copied(traced(step, X, Y), X, Y)
    assert "aten._to_copy.default" not in targets(module)
    assert len(calls(module)) == 1


def test_a_cast_that_is_returned_or_used_elsewhere_stays():
    def step(x, y):
        one, two = x.to(HALF), y.to(HALF)
        return wait(gather(one)), one, wait(gather(two)), two + 1

    module, _ = copied(traced(step, X, Y), X, Y)
    assert targets(module).count("aten._to_copy.default") == 2


@pytest.mark.parametrize("start", [gather, reduce, scatter])
def test_inputs_that_are_not_contiguous_are_copied_once(start):
    def step(x, y):
        return wait(start((x + 1).t())), wait(start(y.transpose(0, 2).transpose(0, 1)[:, :2])), x

    def scattering(x, y):
        return wait(start((x + 1).t())), wait(start(y.transpose(1, 2)))

    module, merged = copied(traced(scattering if start is scatter else step, X, Y), X, Y)
    assert len(calls(module)) == 1
    assert len(merged.copies) == 1


def test_coalesced_members_are_flattened():
    def step(x, y):
        one = ops.all_gather_into_tensor_coalesced([x, y], 4, "0")
        two = ops.all_gather_into_tensor_coalesced([y + 1, x.to(HALF).float()], 4, "0")
        return [wait(item) for item in (*one, gather(x * 2), *two)]

    module, _ = copied(traced(step, X, Y), X, Y)
    assert len(calls(module)) == 1


def test_results_are_written_where_they_were_to_be_written():
    def step(x, y):
        a, b, out = x * 2, torch.cat([y, y]), [torch.empty(32, 4), torch.empty(4, 3, 2)]
        reduced = wait(ops.all_reduce_(a, "sum", "0")), wait(ops.all_reduce_(b[4:], "sum", "0"))
        more = [wait(r) for r in ops.all_reduce_coalesced_([x + 3], "sum", "0")]
        gathered = wait(ops.all_gather_into_tensor_out(x, 4, "0", out=out[0])), wait(gather(y))
        scattered = (
            wait(ops.reduce_scatter_tensor_out(torch.cat([y] * 4), "sum", 4, "0", out=out[1])),
            wait(scatter(x)),
        )
        return [z + 1 for z in (*reduced, *more, *gathered, *scattered, a, b, *out)]

    module, merged = copied(traced(step, X, Y), X, Y)
    assert len(merged.copies) == 3
    assert len(calls(module)) == 3


def test_a_reduced_result_that_is_written_to_does_not_change_its_neighbours():
    def step(x, y):
        one, two = wait(reduce(x)), wait(reduce(y))
        one.mul_(2)
        return one, two, one.view(-1)[3:7] + 1

    copied(traced(step, X, Y), X, Y)


def test_views_of_reduced_results_are_views_of_the_flat_one():
    def step(x, y):
        one, two = wait(reduce(x)), wait(scatter(torch.cat([y, y])))
        three, four = wait(reduce(y)), wait(scatter(x))
        parts = one.view(4, 8).split(4, 1)
        return parts[1] + 1, two.transpose(0, 2), three[1:].sum(), four

    module, merged = copied(traced(step, X, Y), X, Y)
    assert len(merged.copies) == 2
    kinds = [task.kind for task in convert(module.graph, GROUPS).program.tasks]
    assert kinds.count(Kind.COMPUTE) == targets(module).count("aten.cat.default") + 2


# -- forms that break other passes ----------------------------------------------------------------


def test_two_waits_for_one_collective():
    def step(x, y):
        one, two = reduce(x), gather(x)
        first = wait(one) + 1, wait(one) * 2, wait(reduce(y))
        return *first, wait(two), wait(two).sum(), wait(gather(y))

    module, _ = copied(traced(step, X, Y), X, Y)
    assert len(calls(module)) == 2


def test_a_result_that_nobody_waits_for_keeps_its_collective_alone():
    module = traced(lambda x, y: (reduce(x), wait(reduce(y)), wait(reduce(x + 1))), X, Y)
    program = convert(module.graph, GROUPS).program
    assert ways(program, program.starts[0]) == ("coalesced",)
    module, merged = copied(module, X, Y)
    assert len(calls(module)) == 2
    assert merged.buckets == (Bucket(("all_reduce_1", "all_reduce_2"), "copied"),)


def test_broadcasts_and_sends_among_the_collectives_stay_as_they_are():
    def step(x, y):
        one = reduce(x)
        sent = ops.broadcast(x, 0, "0")
        two = reduce(y)
        return wait(one), wait(sent), wait(two)

    module, _ = copied(traced(step, X, Y), X, Y)
    kinds = sorted(collective_call(node).work.kind.value for node in calls(module))
    assert kinds == ["all_reduce", "broadcast"]


REFUSED = {
    "broadcast": (lambda x: ops.broadcast(x, 0, "0"), "a broadcast is never merged"),
    "complex": (lambda x: reduce(torch.complex(x, x)), "complex numbers"),
    "expanded": (lambda x: reduce(x[:1].expand(8, 4)), "its input is expanded"),
    "strided": (lambda x: exchange(x.t().contiguous().t()), "its input is not contiguous"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_be_copied_is_refused_with_a_reason_and_the_graph_left_alone(form):
    start, reason = REFUSED[form]
    module = traced(lambda x, y: (wait(start(x)), wait(start(x + 1))), X, Y)
    converted = convert(module.graph, GROUPS)
    program = converted.program
    names = tuple(program.tasks[start].name for start in program.starts)
    assert not any("copied" in ways(program, start) for start in program.starts)
    merged = merge(program, [Bucket(names, "copied")], lambda task, _: task)
    before = str(module.graph)
    with pytest.raises(OrderError, match=reason):
        rewrite(converted, merged, Order.captured(merged.program))
    assert str(module.graph) == before


# -- symbolic sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", KINDS)
@pytest.mark.parametrize("cast", [False, True])
def test_symbolic_sizes_stay_symbolic(start, cast):
    def step(x, y):
        one, two = (x.to(HALF), y.to(HALF)) if cast else (x, y)
        return wait(start(one)) * 2, wait(start(two)).sum(0)

    module, _ = copied(traced(step, X, Y, mode="symbolic"), X, Y)
    assert len(calls(module)) == 1
    # Other sizes than those that it was traced with.
    x, y = torch.rand(12, 5), torch.rand(8, 2, 3)
    plain = traced(step, x, y)
    for late in (False, True):
        wanted, got = (run_alone(each, [x, y], late)[0] for each in (plain, module))
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


# -- random graphs --------------------------------------------------------------------------------

STARTS = ("gather", "reduce", "scatter", "exchange", "reduce_in_place", "gather_out", "coalesced")
STEPS = ("add", "cast", "view", "write", *STARTS, *STARTS, "wait", "wait", "wait")
INSTRUCTIONS = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.integers(0, 99)),
    min_size=4,
    max_size=24,
)


class Machine:
    """Runs random instructions on 8 x 4 tensors of any dtype; `busy` bases are in flight."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.values = [(x, k) for k, x in enumerate(inputs)]
        self.bases = len(inputs)
        self.flying: list[tuple[list[torch.Tensor], int]] = []

    def run(self, instructions: list[tuple[str, int, int]]) -> list[torch.Tensor]:
        for name, a, b in instructions:
            x, y = (self.values[k % len(self.values)] for k in (a, b))
            if name in STARTS:
                self.flying.append((getattr(self, name)(x[0], y[0]), x[1]))
            elif name == "wait":
                self.wait()
            elif name == "view":
                self.values.append((x[0].view(4, 8).view(8, 4), x[1]))
            elif name == "write":
                if x[1] not in [base for _, base in self.flying]:
                    x[0].add_(y[0]).mul_(0.5)
            else:
                self.new(x[0] + y[0] if name == "add" else x[0].to((HALF, torch.float32)[b % 2]))
        while self.flying:
            self.wait()
        return [x.clone() for x, _ in self.values[-4:]]

    def new(self, x: torch.Tensor) -> None:
        self.values.append((x, self.bases))
        self.bases += 1

    def wait(self) -> None:
        if self.flying:
            for result in self.flying.pop(0)[0]:
                self.new(wait(result)[:8] * 0.25)

    def gather(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [gather(x)]

    def reduce(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [reduce(x)]

    def scatter(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [scatter(torch.cat([x, y, x, y]).to(x.dtype))]

    def exchange(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [exchange(x)]

    def reduce_in_place(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [ops.all_reduce_(x * 0.25, "sum", "0")]

    def gather_out(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [ops.all_gather_into_tensor_out(x, 4, "0", out=torch.empty(32, 4, dtype=x.dtype))]

    def coalesced(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return list(ops.all_reduce_coalesced([x, y.to(x.dtype) + 1], "sum", "0"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(INSTRUCTIONS, st.randoms(use_true_random=False))
def test_random_graphs_have_the_numbers_and_the_memory_that_were_counted(instructions, rng):
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return Machine(x, y).run(instructions)

    copied(traced(step, X, X.to(HALF)), X, X.to(HALF), rng=rng)
