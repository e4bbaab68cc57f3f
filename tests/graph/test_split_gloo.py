"""Graphs in pieces compute on real gloo ranks what they computed whole.

To a tolerance: a matmul of fewer rows may add up its products in another order on a CPU, and
gradients of weights are sums of what the pieces give. Everything here is float32.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx

from tests.capture.gloo_ranks import Ranks
from tests.graph.splitting import split_all
from tests.graph.test_schedule_gloo import Case, Job, captured, estimate, run_job, sent
from undertow.graph import collective_call
from undertow.graph.schedule_graph import schedule_graph
from undertow.schedule.limits import Limits

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

TWO = [Case("llama", {"tp": 2}, "tp"), Case("deepseek_moe", {"ep": 2}, "ep")]
FOUR = [
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
    Case("deepseek_moe", {"dp": 2, "ep": 2}, "fsdp+ep"),
]


def compare(ranks: Ranks, case: Case) -> None:
    step = captured(case)
    groups = {g.name: ("-".join(g.dims), g.ranks) for g in step.groups.values()}
    everything = copy.deepcopy(step.graph_module)
    divided = split_all(everything.graph, pieces=2, groups=groups)
    assert len(divided.splits[0].tasks) > 40
    chosen, _ = schedule_graph(
        copy.deepcopy(step.graph_module),
        cluster="h100x4",
        estimate=estimate,
        limits=Limits(peak_ratio=None, steps=500),
        groups=groups,
    )
    modules = [step.graph_module, everything, chosen]
    for module in modules:
        module.graph.lint()
        module.recompile()
    places = [node for node in step.graph_module.graph.nodes if node.op == "placeholder"]
    job = Job(
        [sent(module) for module in modules],
        [(node.meta["val"].shape, node.meta["val"].dtype) for node in places],
        case.mesh,
        {group.name: group.dims for group in step.groups.values()},
    )
    for plain, in_pieces, planned in ranks.run(run_job, job):
        assert all(x.isfinite().all() for x in plain)
        for a, b, c in zip(plain, in_pieces, planned, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
            torch.testing.assert_close(a, c, **CLOSE)


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_compute_the_same_in_pieces(two: Ranks, case: Case) -> None:
    compare(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_compute_the_same_in_pieces(four: Ranks, case: Case) -> None:
    compare(four, case)


def sequence_parallel(x: Tensor, up: Tensor, down: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rows of all ranks are gathered, and scattered again after two matmuls: along dimension 0, so
    that a piece takes every so many rows."""
    ops = torch.ops._c10d_functional
    x = x @ up @ down
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x * 2.0, size, "0"))
    hidden = torch.relu(whole @ up)
    out = ops.wait_tensor(ops.reduce_scatter_tensor(hidden @ down, "sum", size, "0"))
    swapped = ops.all_to_all_single(out + x, [4] * size, [4] * size, "0")
    return ops.wait_tensor(swapped) @ up, hidden.t() @ whole


def sequence_parallel_graph(size: int) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return sequence_parallel(x, up, down, size)

    return make_fx(step, tracing_mode="fake")(*inputs(size))


def inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(4 * size, 8) / 4, torch.rand(8, 10) / 4, torch.rand(10, 8) / 4


def run_in_pieces(size: int) -> list[tuple[int, tuple[Tensor, ...]]]:
    """On one rank: how many collectives there are, and what comes out, whole and in pieces."""
    groups = {"0": ("tp", tuple(range(size)))}
    found = []
    for pieces in (1, 2, 4):
        module = sequence_parallel_graph(size)
        if pieces > 1:
            split_all(module.graph, pieces, groups)
        module.graph.lint()
        module.recompile()
        torch.manual_seed(torch.distributed.get_rank())
        calls = [node for node in module.graph.nodes if collective_call(node) is not None]
        found.append((len(calls), module(*inputs(size))))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_gathers_scatters_and_exchanges_along_dimension_0(
    size: int, two: Ranks, four: Ranks
) -> None:
    for (count, whole), *others in (two if size == 2 else four).run(run_in_pieces, size):
        assert [calls for calls, _ in others] == [2 * count, 4 * count]
        for _, pieces in others:
            for a, b in zip(whole, pieces, strict=True):
                torch.testing.assert_close(a, b, **CLOSE)
