"""Runs of work that a device could record: where they end, and their signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.codegen.kernels_report import report_on
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
