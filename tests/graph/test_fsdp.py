"""Clean-ups of sharded graphs: what goes, what must stay, and the numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives  # registers fsdp's operators
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import run_alone
from undertow.capture.mesh import fake_world
from undertow.graph import collective_call, convert
from undertow.graph.fsdp import clean_fsdp
from undertow.program import HazardKind, Order, verify

aten, ops = torch.ops.aten, torch.ops._c10d_functional
resize = torch.ops.inductor.resize_storage_bytes_
GROUPS = {"0": ("dp", tuple(range(4))), "1": ("other", tuple(range(4)))}
X = torch.linspace(-1, 1, 32).reshape(4, 8)
SHARD = torch.linspace(0, 1, 16).reshape(2, 8)
FULL = torch.zeros(8, 8)
NBYTES = FULL.nbytes


def gather(shard: Tensor) -> Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(shard, 4, "0"))


def scatter(x: Tensor, op: str = "sum", group: str = "0") -> Tensor:
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, op, 4, group))


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with fake_world(4):
        return make_fx(function, tracing_mode="fake")(*inputs)


def count(module: fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in module.graph.nodes)


def starts(module: fx.GraphModule) -> int:
    return sum(collective_call(node) is not None for node in module.graph.nodes)


def assert_same(one: fx.GraphModule, other: fx.GraphModule, inputs: list[Tensor]) -> None:
    other.graph.lint()
    program = convert(other.graph, GROUPS).program
    verify(program, Order.captured(program))
    for late in (False, True):
        wanted, got = (run_alone(module, inputs, late) for module in (one, other))
        for a, b in zip(wanted[0], got[0], strict=True):
            assert torch.equal(a, b)


# -- unsharded parameters -------------------------------------------------------------------------


def unsharded(x: Tensor, shard: Tensor, p: Tensor, layers: int = 1) -> Tensor:
    """A parameter that is grown, filled, used twice (once by a view) and shrunk, per layer."""
    for _ in range(layers):
        whole = gather(shard) + 1
        resize(p, NBYTES)
        p.copy_(whole)
        x = torch.relu(x @ p) @ p.t()
        resize(p, 0)
    return x


@pytest.mark.parametrize("layers", [1, 3])
def test_copies_into_unsharded_parameters_go(layers: int):
    module = traced(lambda *args: unsharded(*args, layers=layers), X, SHARD, FULL)
    before = copy.deepcopy(module)
    done = clean_fsdp(module)
    assert (done.copies, done.reasons) == (layers, [])
    assert count(module, resize.default, aten.copy_.default) == 0
    (p,) = [n for n in module.graph.nodes if n.op == "placeholder"][2:]
    assert not p.users
    assert_same(before, module, [X, SHARD, FULL])


def test_fsdps_own_copy_goes_too():
    def function(x: Tensor, shard: Tensor, p: Tensor) -> Tensor:
        resize(p, NBYTES)
        torch.ops.fsdp.copy_(p, gather(shard) * 2)
        x = x @ p
        resize(p, 0)
        return x

    module = traced(function, X, SHARD, FULL)
    before = copy.deepcopy(module)
    assert clean_fsdp(module).copies == 1
    assert_same(before, module, [X, SHARD, FULL])


def kept_unsharded(x: Tensor, shard: Tensor, p: Tensor) -> Tensor:
    resize(p, NBYTES)
    p.copy_(gather(shard) + 1)
    return x @ p


def written_by_the_user(x: Tensor, shard: Tensor, p: Tensor) -> Tensor:
    resize(p, NBYTES)
    p.copy_(gather(shard) + 1)
    p.view(-1).add_(1)
    x = x @ p
    resize(p, 0)
    return x


def value_changes(x: Tensor, shard: Tensor, p: Tensor) -> Tensor:
    whole = gather(shard) + 1
    resize(p, NBYTES)
    p.copy_(whole)
    whole.add_(1)
    x = x @ p + whole.sum()
    resize(p, 0)
    return x


def used_too_early(x: Tensor, shard: Tensor, p: Tensor) -> Tensor:
    x = x @ p
    resize(p, NBYTES)
    p.copy_(gather(shard) + 1)
    resize(p, 0)
    return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (kept_unsharded, "stays unsharded after the graph"),
        (written_by_the_user, "is written to while it is unsharded"),
        (value_changes, "changes while it is used"),
        (used_too_early, "used while it is sharded"),
    ],
)
def test_what_is_not_exactly_that_stays(function: Callable[..., Tensor], reason: str):
    module = traced(function, X, SHARD, FULL)
    before = str(module.graph)
    done = clean_fsdp(module)
    assert done.copies == 0
    assert any(reason in found for found in done.reasons)
    assert str(module.graph) == before


def test_a_resize_is_ordered_against_every_use():
    """Its schema declares no write; a scheduler that believed it would free memory in use."""
    module = traced(lambda *args: unsharded(*args), X, SHARD, FULL)
    program = convert(module.graph, GROUPS).program
    shrink = program.index["resize_storage_bytes__1"]
    reader = program.index["mm"]
    kinds = {h.kind for h in program.hazards if (h.src, h.dst) == (reader, shrink)}
    assert kinds == {HazardKind.WAR}


# -- gathers in place -----------------------------------------------------------------------------


def test_a_gather_writes_straight_into_its_buffer():
    def function(x: Tensor, shard: Tensor, buffer: Tensor) -> Tensor:
        x = torch.relu(x)
        buffer.copy_(gather(shard))
        return x @ buffer

    module = traced(function, X, SHARD, FULL)
    before = copy.deepcopy(module)
    done = clean_fsdp(module)
    assert (done.in_place, done.reasons) == (1, [])
    assert count(module, ops.all_gather_into_tensor_out.default) == 1
    assert count(module, aten.copy_.default) == 0
    assert_same(before, module, [X, SHARD, FULL])


def test_a_buffer_in_use_is_not_written_early():
    def function(x: Tensor, shard: Tensor, buffer: Tensor) -> Tensor:
        started = ops.all_gather_into_tensor(shard, 4, "0")
        x = x @ buffer  # still the old value
        buffer.copy_(ops.wait_tensor(started))
        return x @ buffer

    module = traced(function, X, SHARD, FULL)
    before = copy.deepcopy(module)
    done = clean_fsdp(module)
    assert done.in_place == 0
    assert "used between its start and the copy" in done.reasons[0]
    assert_same(before, module, [X, SHARD, FULL])


def test_fsdps_copy_in_gathers_around_its_part():
    def function(a: Tensor, b: Tensor) -> Tensor:
        buffer = torch.empty(4 * 32)
        sizes = [16, 16]
        part, _ = torch.ops.fsdp.all_gather_copy_in([a.view(-1), b.view(-1)], buffer, sizes, 32, 0)
        return gather(part) * 2

    module = traced(function, SHARD, SHARD)
    before = copy.deepcopy(module)
    assert clean_fsdp(module).in_place == 1
    (node,) = [n for n in module.graph.nodes if collective_call(n)]
    assert node.target is ops.all_gather_into_tensor_out.default
    assert_same(before, module, [SHARD, SHARD])


# -- reductions -----------------------------------------------------------------------------------


def test_the_same_reduction_is_done_once():
    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        return [scatter(y) + 1, scatter(y) * 3, scatter(y, group="1")]

    module = traced(function, FULL)
    before = copy.deepcopy(module)
    done = clean_fsdp(module)
    assert (done.reductions, starts(module)) == (1, 2)
    assert_same(before, module, [FULL + 1])


def test_a_reduction_of_a_value_that_changed_is_not_the_same():
    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        first = scatter(y)
        y.add_(1)
        return [first, scatter(y)]

    module = traced(function, FULL)
    assert clean_fsdp(module).reductions == 0
    assert starts(module) == 2


def test_results_that_are_written_to_stay_apart():
    def function(x: Tensor) -> list[Tensor]:
        first, second = scatter(x), scatter(x)
        first.add_(1)
        return [first, second]

    module = traced(function, FULL)
    done = clean_fsdp(module)
    assert done.reductions == 0
    assert "written to" in done.reasons[0]


def sums(x: Tensor) -> Tensor:
    """Three gradients of one parameter, as gradient accumulation makes them."""
    return (scatter(x) + scatter(torch.relu(x))) + scatter(x * 3)


def test_sums_of_reductions_are_merged_only_where_rounding_may_change():
    module = traced(sums, FULL)
    before = copy.deepcopy(module)
    assert clean_fsdp(copy.deepcopy(module)).reductions == 0
    done = clean_fsdp(module, change_rounding=True)
    assert (done.reductions, starts(module)) == (2, 1)
    inputs = [torch.linspace(-1, 1, 64).reshape(8, 8)]
    wanted, got = (run_alone(m, inputs, late=True)[0] for m in (before, module))
    torch.testing.assert_close(wanted, got)


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({}, {"group": "1"}, "two kinds or groups"),
        ({}, {"op": "avg"}, "reduce differently"),
        ({"op": "max"}, {"op": "max"}, "max of a sum is not the sum"),
    ],
)
def test_sums_of_other_reductions_stay(one: dict[str, str], other: dict[str, str], reason: str):
    module = traced(lambda x: scatter(x, **one) + scatter(x * 2, **other), FULL)
    done = clean_fsdp(module, change_rounding=True)
    assert (done.reductions, starts(module)) == (0, 2)
    assert reason in done.reasons[0]
