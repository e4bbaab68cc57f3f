"""Small programs through the whole compiler, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen.kernels import compile_graph


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "chain": (lambda x, w: ((x + 1) * w).relu(), (normal(8, 100), normal(100)), 1),
    "softmax": (lambda x: x.softmax(-1), (normal(8, 100),), 1),
    "log softmax of columns": (lambda x: x.log_softmax(0), (normal(8, 100),), 1),
    "layer norm": (
        lambda x, w, b: torch.nn.functional.layer_norm(x, (100,), w, b),
        (normal(8, 100), normal(100), normal(100)),
        1,
    ),
    "sum of columns": (lambda x: x.sum(0), (normal(200, 30),), 1),
    "sum in the middle": (lambda x: (x * 2).sum(1), (normal(6, 7, 90),), 1),
    "sum of all": (lambda x: (x * x).sum(), (normal(300, 200),), 1),
    "mean of all, used": (lambda x: x - x.mean(), (normal(30, 20),), 1),
    "rows and columns": (lambda x: (x.sum(1), x.sum(0), x * 2), (normal(128, 40),), 1),
    "maximum of columns": (lambda x: x.amax(0), (normal(20, 150),), 1),
    "argmax": (lambda x: (x.argmax(1), x.argmax()), (normal(20, 30),), 1),
    "transposed": (lambda x: x.transpose(1, 2).reshape(4, -1) * 2, (normal(4, 5, 6),), 1),
    "split and merged loops": (
        lambda x: (x.view(4, 6, 5) + 1).view(24, 5).exp().view(120),
        (normal(4, 30),),
        1,
    ),
    "concatenation": (
        lambda x, y: torch.cat([x, y + 1], 1).relu(),
        (normal(5, 3), normal(5, 7)),
        1,
    ),
    "index": (lambda x, i: x[i] + 1, (normal(20, 3), torch.tensor([1, -1, 4])), 1),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 2, 0, 3), value=7.0), (normal(5, 4),), 1),
    "flip": (lambda x: x.flip(0) * 2, (normal(5, 4),), 1),
    "triangle": (lambda x: x.tril(-1), (normal(5, 5),), 1),
    "variance": (lambda x: torch.var_mean(x, [1], correction=0), (normal(20, 30),), 1),
    "bfloat16": (lambda x: (x.to(torch.bfloat16) * 2).sum(1).float(), (normal(20, 30),), 1),
    "integers wrap": (
        lambda x: x * x,
        (torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),),
        1,
    ),
    "matrix product": (lambda x, w: (x @ w).relu() + 1, (normal(5, 4), normal(4, 3)), 1),
    "number": (lambda x: (x * 3).sum() + 1, (normal(),), 1),
    "long row": (lambda x: x.softmax(0), (normal(9000),), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_kernel_counts(name: str) -> None:
    function, args, kernels = CASES[name]
    want = function(*(a.clone() for a in args))
    compiled = compile_function(function, *args)
    got = compiled(*args)
    want = list(want) if isinstance(want, tuple) else [want]
    same(got, want, rtol=1e-5, atol=1e-5)
    assert [g.stride() for g in got] == [w.stride() for w in want]
    assert compiled.kernels == kernels


@pytest.mark.parametrize("sizes", [(300, 64), (300, 131), (200, 5, 70)])
def test_sums_of_columns_are_added_in_blocks(sizes: tuple[int, ...]) -> None:
    x, y = torch.randn(sizes), torch.randn(sizes)

    def program(x, y):  # type: ignore[no-untyped-def]
        return [torch.relu(x * y), (x * y).sum(0), (x + y).sum(0)]

    compiled = compile_function(program, x, y)
    assert "_end(" in compiled.cpp
    assert compiled.kernels == 1
    same(compiled(x, y), program(x, y), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("sizes", [(64, 128), (70, 133), (16, 17)])
def test_what_is_read_across_is_turned_round_in_tiles(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    x = (torch.randn(3, *sizes) * 9).to(dtype)
    y = (torch.randn(3, *sizes[::-1]) * 9).to(dtype)

    def program(x, y):  # type: ignore[no-untyped-def]
        turned = x.transpose(1, 2)
        return [y + turned, (turned * 2 - turned[:1]).contiguous()]

    compiled = compile_function(program, x, y)
    assert "turn_tile<" in compiled.cpp
    same(compiled(x, y), program(x, y))


def test_an_input_that_is_no_tensor_is_passed_through() -> None:
    graph = torch.fx.Graph()
    thing, x = graph.placeholder("thing"), graph.placeholder("x")
    thing.meta["val"], x.meta["val"] = object(), torch.empty(3, device="meta")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    doubled.meta["val"] = torch.empty(3, device="meta")
    graph.output((thing, doubled))
    marker = object()
    found = compile_graph(torch.fx.GraphModule({}, graph))(marker, torch.ones(3))
    assert found[0] is marker
    same(found[1], torch.full((3,), 2.0))
