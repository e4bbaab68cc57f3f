"""The memory plan against real storages: right modules pass, and wrong plans are found out."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.codegen.test_kernels_reuse import Cell
from tests.loops.compiling import same
from undertow.backend.options import OptionError, parse_options
from undertow.codegen import kernels_plan, kernels_reuse
from undertow.codegen.kernels import CompiledGraph, compile_graph, link, open_segments
from undertow.codegen.kernels_check import Expected, MemoryPlanError
from undertow.codegen.kernels_module import write_module
from undertow.codegen.kernels_plan import Schedule
from undertow.codegen.kernels_runtime import Workspaces
from undertow.codegen.kernels_unit import unit_text
from undertow.loops.decompose import decompositions

SIDE = 640  # a matrix has more than a megabyte: a tensor of its own


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return (x + self.mlp(x)).softmax(-1)


@pytest.mark.parametrize(("model", "is_dynamic"), [(Block, False), (Cell, False), (Cell, True)])
def test_a_step_of_a_model_is_as_planned(model: Any, is_dynamic: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = model(), torch.randn(6, 40, 32)
    compiled = torch.compile(
        model, backend="undertow", dynamic=is_dynamic, options={"check_memory": True}
    )
    for _ in range(2):
        found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        same(found, want, rtol=1e-4, atol=1e-5)


def program(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a = x @ w
    b = (a @ w).tanh()
    c = b @ w
    return [(a - a.mean(1, keepdim=True)) @ w + b, c]


def plan_of(side: int) -> tuple[Schedule, tuple[torch.Tensor, ...]]:
    args = torch.randn(side, side), torch.randn(side, side)
    gm = make_fx(program, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    plan = compile_graph(gm, keep_plan=True).plan
    assert plan is not None
    return plan, args


def run_checked(plan: Schedule, args: tuple[torch.Tensor, ...], raises: bool = True) -> Any:
    """Run a plan as it is, right or wrong."""
    expected = Expected(plan, raises)
    module = write_module(plan, is_checked=True)
    run = link(module, {**open_segments(plan, unit_text(plan)), "expected": expected})
    workspaces = Workspaces(plan.arena, module.slots, module.pointers, module.views)
    return CompiledGraph(run, workspaces, "", module.text, {}, [], 0)(*args)


def overlapping(plan: Schedule) -> None:
    """Put two buffers that live at once in one place."""
    lives = sorted((plan.first_write[n], plan.last_use[n], n) for n in plan.offsets)
    for first, last, number in lives:
        for other in plan.offsets:
            if other != number and first < plan.first_write[other] < last:
                plan.offsets[other] = plan.offsets[number]
                return
    raise AssertionError("no two buffers of the arena live at once")


@pytest.mark.parametrize("side", [16, SIDE])
def test_a_right_plan_passes(side: int) -> None:
    plan, args = plan_of(side)
    same(run_checked(plan, args), program(*args), rtol=1e-3, atol=1e-2)


def test_buffers_that_share_memory_are_named_with_kernel_and_line() -> None:
    plan, args = plan_of(16)
    overlapping(plan)
    wanted = r"buffer b\d+ \(\w+\) and buffer b\d+ \(\w+\) are alive at once in .*line \d+"
    with pytest.raises(MemoryPlanError, match=wanted):
        run_checked(plan, args)


def test_a_wrong_plan_can_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    plan, args = plan_of(16)
    overlapping(plan)
    with caplog.at_level(logging.ERROR):
        run_checked(plan, args, raises=False)
    assert "memory is not as planned" in caplog.text


def test_a_tensor_that_is_freed_late_is_found() -> None:
    plan, args = plan_of(SIDE)
    outputs = {view.buffer for view in plan.lowered.outputs}
    victim = min(n for n in plan.fresh if n not in outputs and n not in plan.heirs.values())
    plan.last_use[victim] = len(plan.steps)  # never
    with pytest.raises(MemoryPlanError, match=rf"b{victim} \(\w+\) is still in memory.*line \d+"):
        run_checked(plan, args)


def test_a_tensor_that_is_freed_early_is_found() -> None:
    plan, args = plan_of(SIDE)
    outputs = {view.buffer for view in plan.lowered.outputs}
    victim = max(
        (n for n in plan.fresh if n not in outputs and n not in plan.heirs.values()),
        key=lambda n: plan.last_use[n] - plan.first_write[n],
    )
    assert plan.last_use[victim] > plan.first_write[victim]
    plan.last_use[victim] = plan.first_write[victim]
    with pytest.raises(MemoryPlanError, match=rf"b{victim} \(\w+\) was freed before"):
        run_checked(plan, args)


def test_values_of_the_option() -> None:
    assert parse_options({"check_memory": True}).check_memory == "raise"
    assert parse_options({"check_memory": "log"}).check_memory == "log"
    assert parse_options({"check_memory": False}).check_memory == ""
    with pytest.raises(OptionError, match="True, False, or 'log'"):
        parse_options({"check_memory": "often"})


def random_loss(seed: int) -> Any:
    """A loss of two matrices through values of different lives."""
    rng = random.Random(seed)
    picks = [(rng.randrange(7), rng.random(), rng.random()) for _ in range(14)]

    def loss(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = [x, w]
        for choice, one, two in picks:
            a, b = known[-1 - int(one * min(len(known), 3))], known[int(two * len(known))]
            made = [
                lambda a=a, b=b: a + b,
                lambda a=a, b=b: (a * b).tanh(),
                lambda a=a, b=b: a @ b / 8,
                lambda a=a, b=b: a.softmax(-1) - b,
                lambda a=a, b=b: torch.cat([a[:10], b[10:]]),
                lambda a=a, b=b: a - a.mean(0) + b.mean(1, keepdim=True),
                lambda a=a, b=b: a.t() * b,
            ][choice]()
            known.append(made)
        return known[-1], sum(item.square().mean() for item in known)

    return loss


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_are_as_planned_and_as_eager(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_plan, "LARGE_NBYTES", 1 << 10)  # small ones take every way
    monkeypatch.setattr(kernels_reuse, "LEAST_NBYTES", 1 << 10)
    torch._dynamo.reset()
    torch.manual_seed(seed)
    leaves = [torch.randn(24, 24, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss = random_loss(seed)
    compiled = torch.compile(loss, backend="undertow", options={"check_memory": True})
    (kept, want_loss), (out, found_loss) = loss(*leaves), compiled(*leaves)
    want = torch.autograd.grad(want_loss, leaves)
    found = torch.autograd.grad(found_loss, leaves)
    same((out, *found), (kept, *want), rtol=1e-8, atol=1e-9)
    del out
    same(torch.autograd.grad(compiled(*leaves)[1], leaves), want, rtol=1e-8, atol=1e-9)
