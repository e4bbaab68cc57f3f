"""Graphs cut into regions: what goes into one, what stays outside, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.codegen.load import load_module
from undertow.codegen.module import write_module
from undertow.codegen.regions import Region, in_regions

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Tensor, table: Any = None) -> fx.GraphModule:
    """The calls of a function as they are, in-place ones too."""
    gm: fx.GraphModule = make_fx(function, table, tracing_mode="fake")(*inputs)
    return gm


class Interpreted:
    """A compiler that keeps what it was given, and runs it as it is."""

    def __init__(self) -> None:
        self.regions: list[list[str]] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        self.regions.append([str(getattr(node.target, "__name__", "")) for node in calls])

        def run(boxed: list[Any]) -> Any:
            taken = list(boxed)
            boxed.clear()
            return gm(*taken)

        return run


def run_in_regions(gm: fx.GraphModule, compiler: Any, inputs: Sequence[Tensor]) -> Any:
    cut = in_regions(gm, compiler)
    return load_module(write_module(cut, "cut"), "cut")(list(inputs))


def test_work_between_two_collectives_is_one_call_and_they_stay_where_they_are() -> None:
    c10d = torch.ops._c10d_functional

    def step(a: Tensor, b: Tensor) -> Tensor:
        scaled = (a * 2).relu()
        started = c10d.all_reduce(scaled, "sum", "0")
        behind = (b + 1).sin()
        return c10d.wait_tensor(started) + behind.exp() * 3

    compiler = Interpreted()
    cut = in_regions(traced(step, torch.ones(4), torch.ones(4)), compiler)
    order = [
        "region" if isinstance(node.target, Region) else node.target.overloadpacket.__name__
        for node in cut.graph.nodes
        if node.op == "call_function" and "getitem" not in node.name
        if isinstance(node.target, Region) or hasattr(node.target, "overloadpacket")
    ]
    assert order == ["region", "all_reduce", "region", "wait_tensor", "region"]
    assert compiler.regions[1] == ["add.Tensor", "sin.default"]


def test_regions_that_look_the_same_are_compiled_once() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x * 2).relu()
            x = torch.ops._c10d_functional.wait_tensor(x)
        return x

    compiler = Interpreted()
    cut = in_regions(traced(step, torch.ones(4)), compiler)
    assert len(compiler.regions) == 1
    assert sum(isinstance(node.target, Region) for node in cut.graph.nodes) == 3


def test_writes_come_after_the_work_before_them_and_before_what_reads_them() -> None:
    def step(x: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        a = (x * 2).relu()
        held.copy_(a)
        b = (x + 1).sin()  # reads nothing that was written: belongs to the work before
        c = (held * 3).exp()
        return b, c

    compiler = Interpreted()
    x, held = torch.rand(4), torch.zeros(4)
    found = run_in_regions(traced(step, x, held), compiler, [x, held])
    assert compiler.regions == [
        ["mul.Tensor", "relu.default", "add.Tensor", "sin.default"],
        ["mul.Tensor", "exp.default"],
    ]
    assert torch.equal(held, (x * 2).relu())
    torch.testing.assert_close(found, ((x + 1).sin(), (held * 3).exp()))


def test_random_numbers_are_drawn_outside_in_their_order() -> None:
    def step(x: Tensor) -> Tensor:
        a = (x * 2).relu() + torch.rand_like(x)
        return (a * torch.rand_like(x)).exp()

    compiler, x = Interpreted(), torch.ones(8)
    gm = traced(step, x)
    torch.manual_seed(1)
    expected = step(x)
    torch.manual_seed(1)
    assert torch.equal(run_in_regions(gm, compiler, [x]), expected)
    assert not any("rand" in name for region in compiler.regions for name in region)


def test_one_call_or_a_product_is_no_region_and_neither_is_what_cannot_be_compiled() -> None:
    def step(x: Tensor) -> Tensor:
        return (x @ x).t().relu()

    x = torch.rand(3, 3)
    compiler = Interpreted()
    assert torch.equal(run_in_regions(traced(step, x), compiler, [x]), step(x))
    assert compiler.regions == []

    def longer(x: Tensor) -> Tensor:
        return (x * 2).relu().exp()

    assert torch.equal(run_in_regions(traced(longer, x), lambda *_: None, [x]), longer(x))


def test_a_region_alone_holds_its_inputs() -> None:
    def step(x: Tensor) -> Tensor:
        return (x * 2).relu().exp()

    source = write_module(in_regions(traced(step, torch.ones(3)), Interpreted()), "x").source
    lines = [line.strip() for line in source.splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("boxed = "))
    assert lines[at + 1].startswith("del ")
    assert lines[at + 2].endswith("= REGION0(boxed)")


MOVES = ("add", "mul", "relu", "view", "row", "write", "write a row", "copy", "draw", "sum")


def program(moves: list[tuple[str, int, int]]) -> Callable[..., Any]:
    """A straight program of these moves on its values so far; writes go to inputs and views."""

    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for name, i, j in moves:
            x, y = values[i % len(values)], values[j % len(values)]
            if name == "add":
                values.append(x + y)
            elif name == "mul":
                values.append(x * 0.5)
            elif name == "relu":
                values.append(x.relu())
            elif name == "view":
                values.append(x.t())
            elif name == "row":
                values.append(x[1].expand(4, 4))
            elif name == "write":
                values[j % 2].add_(x)
            elif name == "write a row":
                values[i % 2][j % 4].copy_(y[0])
            elif name == "copy":
                values.append(x.clone())
            elif name == "draw":
                values.append(torch.rand_like(x))
            elif name == "sum":
                values.append(x.sum(0, keepdim=True) + y)
        return values[2:]

    return step


@given(
    st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 9), st.integers(0, 9)), max_size=25)
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_programs_give_the_same_in_regions(moves: list[tuple[str, int, int]]) -> None:
    step = program(moves)
    inputs = [torch.rand(4, 4), torch.rand(4, 4)]
    mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    gm = traced(step, *[x.clone() for x in inputs])
    torch.manual_seed(2)
    expected = step(*theirs)
    torch.manual_seed(2)
    found = run_in_regions(gm, Interpreted(), mine)
    for one, other in zip([*found, *mine], [*expected, *theirs], strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_inductor_keeps_strides_and_gives_out_views_of_what_it_was_given() -> None:
    from undertow.graph.inductor_bridge import compile_region, decompositions

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = (x * 2).relu().t()
        halves = (x * 3).exp().view(6, 2, 2)
        return a, x.view(-1), (a @ w).sin() + 1, (x + 1).exp().permute(1, 0), halves[:, 1]

    x, w = torch.rand(6, 4), torch.rand(6, 5)
    compiled = []

    def compiler(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(compile_region(gm, inputs))
        return compiled[-1]

    gm = traced(step, x, w, table=decompositions())
    found = run_in_regions(gm, compiler, [x, w])
    expected = step(x, w)
    torch.testing.assert_close(found, expected)
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert found[1].data_ptr() == x.data_ptr()
    assert len(compiled) == 1
    assert "def call" in compiled[0].source_code
