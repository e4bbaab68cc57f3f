"""Gradients computed where they are reduced: which are, what they come to, what is left alone."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.graph.stand_ins import run_alone
from tests.graph.test_ddp import X, step, traced, weights
from undertow.capture.mesh import fake_world
from undertow.graph import convert
from undertow.graph.flat_gradients import _by_size, flatten_gradients
from undertow.program import Order, verify

aten, ops = torch.ops.aten, torch.ops._c10d_functional
FAKE = ("fake",)


def flattened(module: fx.GraphModule) -> fx.GraphModule:
    changed = copy.deepcopy(module)
    with fake_world(4):
        assert flatten_gradients(changed.graph, FAKE) == 1
    changed.graph.lint()
    changed.recompile()
    program = convert(changed.graph).program
    assert not verify(program, Order.captured(program))
    return changed


def calls(module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("divide", ["before", "after", "never"])
def test_products_write_into_their_bucket_and_nothing_else_changes(divide: str, late: bool) -> None:
    with_flat, inputs = step(divide=divide)
    changed = flattened(with_flat)
    assert len(calls(changed, ops.all_reduce_.default)) == 1
    assert len(calls(changed, aten.addmm_.default)) == 3  # the others are transposed: copied
    assert not calls(changed, ops.all_reduce.default)
    assert not calls(changed, aten.div.Tensor)  # four ranks: half of a half is exact
    expected, _ = run_alone(with_flat, inputs, late)
    found, _ = run_alone(changed, inputs, late)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)  # their strides are compared on real ranks


@pytest.mark.parametrize("divide", ["before", "after"])
def test_a_divisor_that_is_no_power_of_two_divides_as_it_did(divide: str) -> None:
    def function(x: Tensor) -> list[Tensor]:
        grads = []
        for grad in (x.t() @ x, x.sum(0)):
            mine = grad / 3 if divide == "before" else grad
            mine = ops.wait_tensor(ops.all_reduce(mine, "sum", "0"))
            grads.append(mine / 3 if divide == "after" else mine)
        return grads

    module = traced(function, X)
    changed = flattened(module)
    assert len(calls(changed, aten.addmm_.default)) == (1 if divide == "after" else 0)
    assert len(calls(changed, aten.div_.Tensor)) == (1 if divide == "after" else 0)
    expected, _ = run_alone(module, [X], late=True)
    found, _ = run_alone(changed, [X], late=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_gradient_that_others_need_is_copied_or_left_alone() -> None:
    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        shared = x.t() @ x
        first = ops.wait_tensor(ops.all_reduce(shared, "sum", "0")) / 4
        second = ops.wait_tensor(ops.all_reduce(torch.relu(shared), "sum", "0")) / 4
        used = ops.wait_tensor(ops.all_reduce(shared + 1, "sum", "0"))
        return [first, second, used + first.sum() * 0, w]

    inputs = [X, weights(1)[0]]
    module = traced(function, *inputs)
    changed = flattened(module)
    assert not calls(changed, aten.addmm_.default)  # the product is read by others
    assert calls(changed, ops.all_reduce.default)  # what is more than given out
    expected, _ = run_alone(module, inputs, late=True)
    found, _ = run_alone(changed, inputs, late=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_groups_of_other_backends_are_left_alone() -> None:
    module, _ = step()
    before = module.graph.python_code("self").src
    with fake_world(4):
        assert flatten_gradients(module.graph) == 0
    assert module.graph.python_code("self").src == before


def of_sizes(sizes: list[int], key: str = "k") -> list[Any]:
    values = [torch.empty(size, device="meta") for size in sizes]
    return [
        SimpleNamespace(value=SimpleNamespace(meta={"val": value}), key=lambda: key)
        for value in values
    ]


def test_a_full_bucket_is_not_kept_back_by_a_tiny_gradient_that_comes_after_it() -> None:
    """As of the norm before a model's head, which comes when most of backward's first products
    are done: the head's own could be on its way by then."""
    head, norm, matrix = of_sizes([1 << 21, 448, 1 << 19])
    assert _by_size([head, norm, matrix], 8) == [[head], [norm, matrix]]
    assert _by_size([matrix, head, norm], 8) == [[matrix], [head, norm]]  # no bucket of its own


def test_buckets_of_one_group_do_not_depend_on_what_is_reduced_in_another() -> None:
    """Its other ranks may have larger parts of what they share with others again."""
    ours = of_sizes([1 << 19, 1 << 16, 1 << 18], "tp")
    small, large = of_sizes([1 << 16] * 9, "dp"), of_sizes([1 << 19] * 9, "dp")
    for others in (small, large):
        mixed = [one for pair in zip(others[:3], ours, strict=True) for one in pair] + others[3:]
        buckets = _by_size(mixed, 8)
        assert [b for b in buckets if b[0].key() == "tp"] == _by_size(ours, 8)


@given(st.lists(st.sampled_from([320, 1 << 12, 1 << 18, 1 << 20, 1 << 22]), max_size=40))
def test_a_tiny_gradient_makes_no_bucket_of_its_own(sizes: list[int]) -> None:
    """One vector alone would be given out as the bucket itself, which others hold meanwhile."""
    gradients = of_sizes(sizes)
    buckets = _by_size(gradients, 32)
    assert [one for bucket in buckets for one in bucket] == gradients
    if max(sizes, default=0) > 1 << 12:
        for bucket in buckets:
            assert sum(one.value.meta["val"].numel() for one in bucket) > 1 << 12
