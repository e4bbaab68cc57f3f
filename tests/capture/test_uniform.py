"""Tensors of one number are folded, and not saved between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.capture.uniform import fold_uniform


def joint(program: Any, *args: torch.Tensor) -> torch.fx.GraphModule:
    """A graph whose last input is named as a gradient of AOTAutograd's is."""
    gm = make_fx(program)(*args)
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    last._rename("tangents_1")
    return gm


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def check(program: Any, *args: torch.Tensor) -> list[str]:
    """What is left after folding, which computes the same."""
    gm = joint(program, *args)
    fold_uniform(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*args), program(*args), rtol=0, atol=0)
    return targets(gm)


def test_elementwise_work_on_zeros_is_folded() -> None:
    def program(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(4, 8)
        return x * torch.sigmoid(h) * (1 - torch.sigmoid(h)) + grad

    left = check(program, torch.randn(4, 8), torch.randn(4, 8))
    assert not any("sigmoid" in name or "rsub" in name for name in left)


def test_backward_has_its_own_of_what_forward_reads_too() -> None:
    def program(x: torch.Tensor, grad: torch.Tensor) -> Any:
        h = torch.zeros(4, 4)
        return x @ h, grad @ h, h * grad

    assert check(program, torch.randn(4, 4), torch.randn(4, 4)).count("aten.full.default") == 2


def test_what_is_written_to_or_random_or_of_a_part_is_left() -> None:
    def program(x: torch.Tensor, grad: torch.Tensor) -> Any:
        h, other = torch.zeros(4, 4), torch.ones(4, 4)
        h.add_(x)
        return h * 2, other.sum(0) * grad[0]

    left = check(program, torch.randn(4, 4), torch.randn(4, 4))
    assert "aten.add_.Tensor" in left
    assert "aten.sum.dim_IntList" in left


def test_types_are_promoted_as_eager_does() -> None:
    def program(x: torch.Tensor, grad: torch.Tensor) -> Any:
        h = torch.ones(3, dtype=torch.int64)
        return torch.true_divide(h, 3) + x, torch.div(h * 7, 2, rounding_mode="floor"), grad

    check(program, torch.randn(3), torch.randn(3))
