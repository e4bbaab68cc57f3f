"""Sums of products as products that add to each other: the same numbers, in one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.compiling import compile_function, same
from undertow.codegen.kernels_gemm import blas
from undertow.codegen.sums import add_in_products

pytestmark = pytest.mark.skipif(blas() is None, reason="torch does not show its BLAS")
SIDE = 24


def matrices(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(count)]


def targets(program: Any, *args: torch.Tensor) -> list[str]:
    gm = add_in_products(make_fx(program)(*args))
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_chain_of_products_is_added_in_one_buffer(dtype: torch.dtype) -> None:
    def program(*args: torch.Tensor) -> torch.Tensor:
        found = args[0] @ args[1]
        for k in range(2, len(args), 2):
            found = found + args[k] @ args[k + 1]
        return found.tanh()

    args = matrices(12, dtype)
    assert "aten.add.Tensor" not in targets(program, *args)
    compiled = compile_function(program, *args)
    assert compiled.memory["peak"] == SIDE * SIDE * dtype.itemsize  # the result alone
    same(compiled(*args), [program(*args)], rtol=1e-4, atol=1e-4)


def test_views_and_transposes_of_products_are_seen_through() -> None:
    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a @ b).t() + (c @ a).t() + (b @ c).t().reshape(SIDE, SIDE)

    args = matrices(3)
    assert targets(program, *args).count("aten.addmm.default") == 2
    same(compile_function(program, *args)(*args), [program(*args)], rtol=1e-4, atol=1e-4)


def test_a_product_and_one_that_is_turned_are_not_mixed_up() -> None:
    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (a @ b) + (c @ a).t()

    args = matrices(3)
    assert "aten.addmm.default" not in targets(program, *args)
    same(compile_function(program, *args)(*args), [program(*args)], rtol=1e-4, atol=1e-4)


def test_the_bias_of_the_later_one_is_added_by_a_kernel() -> None:
    def program(*args: torch.Tensor) -> torch.Tensor:
        a, b, x, y = args[2:]
        return (torch.addmm(args[0], a, x) + torch.addmm(args[1], b, y)).sigmoid()

    args = [torch.randn(SIDE), torch.randn(SIDE), *matrices(4)]
    compiled = compile_function(program, *args)
    assert compiled.memory["peak"] == 4 * SIDE * SIDE
    same(compiled(*args), [program(*args)], rtol=1e-4, atol=1e-4)


def test_products_that_others_read_stay_as_they_are() -> None:
    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        early, late = a @ b, b @ c
        return early + late, late.exp(), early

    args = matrices(3)
    assert "aten.addmm.default" not in targets(program, *args)
    same(compile_function(program, *args)(*args), list(program(*args)), rtol=1e-4, atol=1e-4)


def test_a_bias_that_is_written_to_is_read_in_time() -> None:
    def program(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        early, late = a @ b, torch.addmm(bias, b, a)
        bias.copy_(bias + 1)
        return early + late

    args = [torch.randn(SIDE), *matrices(2)]
    want = program(args[0].clone(), *args[1:])
    compiled = compile_function(program, *args)
    same(compiled(args[0].clone(), *args[1:])[-1], want, rtol=1e-4, atol=1e-4)


def test_large_operands_are_left_to_panels() -> None:
    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return a @ b + a @ c

    a, b = torch.randn(1024, 128), torch.randn(128, 16)
    assert "aten.addmm.default" not in targets(program, a, b, b.clone())
    assert "aten.addmm.default" in targets(program, a[:64], b, b.clone())
