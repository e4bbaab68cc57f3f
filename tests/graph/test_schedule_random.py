"""`schedule_graph` on random graphs: legal, within limits, and the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.test_schedule_graph import (
    GROUPS,
    QUICK,
    X,
    assert_same_numbers,
    estimate,
    scheduled,
    traced,
)
from undertow.graph import convert
from undertow.program import Order, verify
from undertow.schedule.limits import Limits
from undertow.schedule.plan import sequence_digest

ops = torch.ops._c10d_functional
wait = ops.wait_tensor

STEPS = (
    "add", "mul", "mm", "view", "rows", "write", "write_view", "gather", "reduce", "scatter",
    "reduce_in_place", "gather_out", "coalesced", "wait", "wait", "wait",
)  # fmt: skip
INSTRUCTIONS = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 99), st.integers(0, 99)),
    min_size=3,
    max_size=16,
)


class Machine:
    """Runs random instructions on tensors of one shape; views of a tensor share its base.

    `busy` are bases that a collective works on: nobody may write to those, and results are used
    after their wait only, since anything else is a race in the graph as it is.
    """

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.values = [(x, k) for k, x in enumerate(inputs)]  # (tensor, base)
        self.bases = len(inputs)
        self.flying: list[tuple[list[torch.Tensor], int]] = []  # results, base of the input

    def run(self, instructions: list[tuple[str, int, int]]) -> list[torch.Tensor]:
        for name, a, b in instructions:
            getattr(self, name)(self.pick(a), self.pick(b))
        while self.flying:
            self.wait(None, None)
        return [x.clone() for x, _ in self.values[-4:]]

    def pick(self, k: int) -> tuple[torch.Tensor, int]:
        return self.values[k % len(self.values)]

    def new(self, x: torch.Tensor, base: int | None = None) -> None:
        if base is None:
            base, self.bases = self.bases, self.bases + 1
        self.values.append((x, base))

    def fly(self, results: list[torch.Tensor], base: int) -> None:
        self.flying.append((results, base))

    def add(self, a: Any, b: Any) -> None:
        self.new(a[0] + b[0])

    def mul(self, a: Any, b: Any) -> None:
        self.new(a[0] * 0.5)

    def mm(self, a: Any, b: Any) -> None:
        self.new(a[0] @ b[0].t()[:, :4] / 8)

    def view(self, a: Any, b: Any) -> None:
        self.new(a[0].view(4, 8).view(8, 4), a[1])

    def rows(self, a: Any, b: Any) -> None:
        self.new(torch.cat([a[0][:4], b[0][4:]]))

    def write(self, a: Any, b: Any) -> None:
        if a[1] not in [base for _, base in self.flying]:
            a[0].add_(b[0]).mul_(0.5)

    def write_view(self, a: Any, b: Any) -> None:
        if a[1] not in [base for _, base in self.flying]:
            a[0][2].mul_(0.25)

    def gather(self, a: Any, b: Any) -> None:
        self.fly([ops.all_gather_into_tensor(a[0], 4, "0")], a[1])

    def reduce(self, a: Any, b: Any) -> None:
        self.fly([ops.all_reduce(a[0], "sum", "0")], a[1])

    def scatter(self, a: Any, b: Any) -> None:
        self.fly([ops.reduce_scatter_tensor(torch.cat([a[0]] * 4), "sum", 4, "0")], -1)

    def reduce_in_place(self, a: Any, b: Any) -> None:
        self.fly([ops.all_reduce_(a[0] * 0.25, "sum", "0")], -1)

    def gather_out(self, a: Any, b: Any) -> None:
        out = torch.empty(32, 4)
        self.fly([ops.all_gather_into_tensor_out(a[0], 4, "0", out=out)], a[1])

    def coalesced(self, a: Any, b: Any) -> None:
        made = ops.all_reduce_coalesced([a[0], b[0] + 1], "sum", "0")
        self.fly(list(made), a[1])

    def wait(self, a: Any, b: Any) -> None:
        if self.flying:
            results, _ = self.flying.pop(0)
            for result in results:
                self.new(wait(result)[:8] / 4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(INSTRUCTIONS, st.booleans(), st.booleans())
def test_random_graphs_are_scheduled_legally_and_compute_the_same(instructions, merge, bounded):
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return Machine(x, y).run(instructions)

    module = traced(step, X, X + 1)
    before = copy.deepcopy(module)
    limits = Limits(steps=100) if bounded else QUICK
    _, plan = scheduled(module, estimate=estimate, merge=merge, limits=limits)
    module.graph.lint()
    program = convert(module.graph, GROUPS).program
    verify(program, Order.captured(program))
    if program.starts:
        assert sequence_digest(program, Order.captured(program)) == plan.digest
    if bounded:
        assert plan.planned.peak_nbytes <= plan.captured.peak_nbytes
    assert_same_numbers(before, module, X, X + 1)
