"""What can run in pieces, and that the graph in pieces is the Program that was decided on."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.splitting import split_all
from undertow.graph.convert import convert
from undertow.graph.row_axis import Axis, reshaped
from undertow.graph.schedule_graph import schedule_graph
from undertow.graph.splittable import find_row_work
from undertow.program import Collective, Kind, Program, Work, profile_memory
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan

GROUPS = {"0": ("tp", (0, 1, 2, 3))}
ops = torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("shape", "axis", "into", "expected"),
    [
        ((1, 8, 6), Axis(1, 8), (8, 6), Axis(0, 8)),
        ((4, 8, 6), Axis(1, 8), (32, 6), Axis(0, 8, outer=4)),
        ((32, 6), Axis(0, 8, outer=4), (4, 8, 6), Axis(1, 8)),
        ((8, 6), Axis(0, 8), (48,), Axis(0, 8, inner=6)),
        ((8, 6), Axis(0, 8), (2, 4, 6), None),
        ((8, 6), Axis(1, 6), (48,), Axis(0, 6, outer=8)),
    ],
)
def test_an_axis_goes_through_a_view(shape, axis, into, expected) -> None:
    assert reshaped(shape, axis, into) == expected


def layer(x, w1, w2, scale):
    """Two layers as tensor parallel has them, with the gradient of a weight at the end."""
    attended = x.softmax(1)  # over rows: not row-wise
    h = (
        ops.wait_tensor(ops.all_reduce(attended.view(-1, x.shape[-1]) @ w1, "sum", "0")).view_as(x)
        + x
    )
    normed = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5) * scale).transpose(0, 1)
    flat = normed.reshape(-1, x.shape[-1])
    up = torch.nn.functional.silu(flat @ w2)
    down = ops.wait_tensor(ops.all_reduce(up @ w2.t(), "sum", "0"))
    return down @ w1, flat.t() @ up, normed


def layer_graph(batch: int = 1, rows: int = 8, width: int = 16) -> fx.GraphModule:
    shapes = (batch, rows, width), (width, width), (width, 3 * width), (width,)
    return make_fx(layer, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes))


def figures(program: Program) -> tuple[int, int, list[int]]:
    work = [task.work for task in program.tasks]
    return (
        profile_memory(program).peak_nbytes,
        sum(one.flops for one in work if isinstance(one, Work)),
        [one.nbytes or 0 for one in work if isinstance(one, Collective)],
    )


@pytest.mark.parametrize(("batch", "pieces"), [(1, 2), (1, 4), (2, 2)])
def test_the_graph_in_pieces_is_the_program_in_pieces(batch: int, pieces: int) -> None:
    module = layer_graph(batch)
    divided = split_all(module.graph, pieces, GROUPS)
    module.graph.lint()
    again = convert(module.graph, GROUPS).program
    assert figures(again) == figures(divided.program)
    assert len(again.starts) == 2 * pieces


def test_row_wise_work_is_found_and_the_rest_is_not() -> None:
    module = layer_graph()
    work = find_row_work(convert(module.graph, GROUPS))
    divided = {node.name for node in work.ways}
    assert {"mm", "all_reduce", "pow_1", "mean", "rsqrt", "silu", "mm_2", "all_reduce_1"} <= divided
    assert "_softmax" not in divided
    sums = {node.name for node, way in work.ways.items() if way.adds}
    assert sums == {"mm_4"}


def test_gathers_of_weights_and_reductions_of_gradients_are_not_split() -> None:
    def step(shard, x):
        weight = ops.wait_tensor(ops.all_gather_into_tensor(shard, 4, "0"))
        grad = (x @ weight).t() @ x
        return ops.wait_tensor(ops.reduce_scatter_tensor(grad, "sum", 4, "0"))

    module = make_fx(step, tracing_mode="fake")(torch.rand(4, 16), torch.rand(8, 16))
    assert not find_row_work(convert(module.graph, GROUPS)).splittable


def slow_network(node: fx.Node, nbytes: int | None = None) -> float | None:
    if "all_reduce" not in node.name:
        return None
    return 300e-6 * (1 if nbytes is None else nbytes / (4 * 8192 * 1024))


def test_a_plan_with_splits_is_written_back_and_applied_again() -> None:
    first, plan = schedule_graph(
        layer_graph(1, 8192, 1024), cluster="h100x4", groups=GROUPS, estimate=slow_network,
        limits=Limits(peak_ratio=None, steps=100),
    )  # fmt: skip
    assert plan.splits
    assert plan.planned.total_ns < plan.captured.total_ns
    kept = Plan.from_json(plan.to_json())
    second, _ = schedule_graph(layer_graph(1, 8192, 1024), groups=GROUPS, plan=kept)
    names = [[node.name for node in module.graph.nodes] for module in (first, second)]
    assert names[0] == names[1]
    starts = [t for t in convert(first.graph, GROUPS).program.tasks if t.kind is Kind.START]
    assert len(starts) > 2


def test_split_false_keeps_every_collective_whole() -> None:
    module, plan = schedule_graph(
        layer_graph(1, 8192, 1024), cluster="h100x4", groups=GROUPS, estimate=slow_network,
        split=False,
        limits=Limits(peak_ratio=None, steps=100),
    )  # fmt: skip
    assert plan.splits == ()
    assert len(convert(module.graph, GROUPS).program.starts) == 2


def test_ranks_that_measure_differently_split_alike_once_they_agree() -> None:
    def measuring(factor: float):
        def seconds(node: fx.Node, nbytes: int | None = None) -> float | None:
            whole = slow_network(node, nbytes)
            return factor * (100e-6 if whole is None else whole)

        return seconds

    brought: list[list[float]] = []

    def agree(numbers):
        brought.append(list(numbers))
        return brought[0]  # the first rank's

    plans = [
        schedule_graph(
            layer_graph(1, 8192, 1024), cluster="h100x4", groups=GROUPS, agree=agree,
            estimate=measuring(factor), limits=Limits(peak_ratio=None, steps=100),
        )[1]
        for factor in (1.0, 1.7)
    ]  # fmt: skip
    assert brought[0] != brought[1]
    assert plans[0].splits
    assert plans[0].to_json() == plans[1].to_json()
