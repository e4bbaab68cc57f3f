"""Runs of work that a device could record: where they end, and their signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import same
from undertow.backend.options import parse_options
from undertow.codegen.kernels import CompiledGraph, compile_graph
from undertow.codegen.kernels_report import report_on
from undertow.codegen.kernels_settings import Settings
from undertow.codegen.kernels_symbolic import SymbolicGraph
from undertow.codegen.partitions import Partition
from undertow.loops.decompose import decompositions


def parts_of(function: Any, *args: torch.Tensor) -> tuple[Partition, ...]:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    return report_on(gm).partitions


def test_kernels_and_matrix_products_are_one_partition_with_its_signature() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        hidden = (x + 1).relu() @ w
        return [hidden.softmax(-1), x * 2]

    (part,) = parts_of(function, torch.randn(4, 6), torch.randn(6, 5))
    assert part.calls == ("mm",)
    assert part.kernels >= 2
    assert {name.partition(".")[0] for name in part.inputs} == {"x_1", "w_1"}
    assert {name.partition(".")[0] for name in part.outputs} == {"div", "mul"}
    assert part.symbols == ()
    assert part.ends == "the graph ends"


def test_random_numbers_and_looks_by_the_host_end_a_partition() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        y = x.exp()
        z = torch.rand_like(y) * y
        return [z.log(), z]

    first, second = parts_of(function, torch.randn(8))
    assert "random numbers" in first.ends
    assert [name.partition(".")[0] for name in first.outputs] == ["exp"]
    assert second.first == first.last + 2
    assert {name.partition(".")[0] for name in second.inputs} == {"exp", "rand_like"}


def test_a_collective_is_in_no_partition() -> None:
    ops = torch.ops._c10d_functional

    def function(x):  # type: ignore[no-untyped-def]
        return [ops.wait_tensor(ops.all_reduce(x * 2, "sum", "0")) + 1]

    first, second = parts_of(function, torch.randn(4, 4))
    assert "collective" in first.ends
    assert (first.kernels, second.kernels) == (1, 1)
    assert second.ends == "the graph ends"


def test_symbols_are_part_of_the_signature_and_numbers_are_apart() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        return [x.exp().sum(1), w.tanh()]

    trace = make_fx(function, decomposition_table=decompositions(), tracing_mode="symbolic")
    args = torch.randn(4, 6), torch.randn(3)
    gm = trace(*args)
    found = SymbolicGraph(gm).report.partitions
    assert found[0].symbols
    assert all(part.symbols for part in found)  # both inputs have symbolic sizes here

    def mixed(x):  # type: ignore[no-untyped-def]
        return [x * 2, torch.arange(6) * 3]

    gm = make_fx(mixed, tracing_mode="symbolic")(args[0])
    found = SymbolicGraph(gm).report.partitions
    assert [bool(part.symbols) for part in found] in ([True, False], [False, True])
    assert found[0].ends in ("sizes become numbers", "sizes become symbols")


def compiled_for(function: Any, partition: int | None, *args: torch.Tensor) -> CompiledGraph:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    return compile_graph(gm, args, settings=Settings(partition=partition))


def sorted_apart(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Draws between kernels that do not need them, and their use at the end."""
    found = []
    for x in tensors:
        found.append(x.softmax(-1) * 2 + torch.rand_like(x))
    return found


def test_kernels_that_can_be_recorded_run_together_if_asked() -> None:
    args = [torch.randn(8, 40 + k) for k in range(3)]
    torch.manual_seed(0)
    plain, ordered = (compiled_for(sorted_apart, way, *args) for way in (None, 0))
    assert plain.report is not None
    assert ordered.report is not None
    assert len(ordered.report.partitions) == 1 < len(plain.report.partitions)
    found = []
    for run in (plain, ordered, sorted_apart):
        torch.manual_seed(0)
        found.append(run(*args))
    same(found[0], found[2])
    same(found[1], found[2])  # draws are in the same sequence


def test_runs_that_are_too_short_are_no_partitions() -> None:
    def function(x):  # type: ignore[no-untyped-def]
        y = torch.rand_like(x.exp()) + x.exp()
        return [(y.sum(0) @ y.t()).softmax(0).cumsum(0)]

    args = (torch.randn(8, 8),)
    every, long = (compiled_for(function, least, *args).report for least in (0, 3))
    assert every is not None
    assert long is not None
    lengths = [part.last - part.first + 1 for part in every.partitions]
    assert min(lengths) < 3
    assert [part.last - part.first + 1 for part in long.partitions] == [
        length for length in lengths if length >= 3
    ]


def test_collectives_keep_their_order_when_partitions_are_gathered() -> None:
    ops = torch.ops._c10d_functional

    def function(x, y):  # type: ignore[no-untyped-def]
        a = ops.all_reduce(x * 2, "sum", "0")
        b = (y @ y).exp()
        c = ops.all_reduce(y + 1, "sum", "0")
        d = (b @ y).tanh()
        return [ops.wait_tensor(a) + d, ops.wait_tensor(c) * b]

    args = torch.randn(8, 8), torch.randn(8, 8)
    plain, ordered = (compiled_for(function, way, *args) for way in (None, 0))
    assert plain.report is not None
    assert ordered.report is not None
    calls = [step.nodes[0] for step in ordered.report.steps if "c10d" in step.name]
    assert calls[:2] == [name for name in calls if name.startswith("all_reduce")]
    assert calls[:2] == ["all_reduce", "all_reduce_1"]
    assert len(ordered.report.partitions) <= len(plain.report.partitions)


def test_values_of_the_option() -> None:
    given = [{}, {"partition": False}, {"partition": True}, {"partition": 3}]
    assert [parse_options(options).partition for options in given] == [None, None, 0, 3]
