"""Gradients reduced in buckets: what is fused, what never is, one division, waits in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import run_alone
from tests.graph.test_schedule_graph import estimate
from undertow.capture.mesh import Mesh, fake_world
from undertow.capture.models import load
from undertow.capture.trace import trace_step
from undertow.errors import UndertowError
from undertow.graph import collective_call, convert, is_wait
from undertow.graph.ddp import fuse_gradients
from undertow.graph.gradients import find_gradients
from undertow.program import Order, verify
from undertow.schedule.limits import Limits

aten, ops = torch.ops.aten, torch.ops._c10d_functional
GROUPS = {"0": ("dp", tuple(range(4))), "1": ("other", tuple(range(4)))}
KIB = 1 << 10
X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def reduced(grad: Tensor, group: str = "0", op: str = "sum", divide: str = "before") -> Tensor:
    grad = grad / 4 if divide == "before" else grad
    grad = ops.wait_tensor(ops.all_reduce(grad, op, group))
    return grad / 4 if divide == "after" else grad


def backward(x: Tensor, *weights: Tensor, **how: Any) -> list[Tensor]:
    """Gradients of a chain of layers, each reduced as soon as it is there; some are transposed."""
    grads = []
    for k, weight in enumerate(reversed(weights)):
        grad = x.t() @ x
        grads.append(reduced(grad.t() if k % 2 else grad, **how))
        x = torch.relu(x @ weight.t())
    return grads


def weights(count: int) -> list[Tensor]:
    return [torch.randn(32, 32, generator=torch.Generator().manual_seed(k)) for k in range(count)]


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with fake_world(4):
        return make_fx(function, tracing_mode="fake")(*inputs)


def step(count: int = 6, **how: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [X, *weights(count)]
    return traced(lambda *args: backward(*args, **how), *inputs), inputs


def count(module: fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in module.graph.nodes)


def calls(module: fx.GraphModule) -> list[Any]:
    return [call for node in module.graph.nodes if (call := collective_call(node))]


def assert_same(one: fx.GraphModule, other: fx.GraphModule, inputs: list[Tensor]) -> None:
    other.graph.lint()
    program = convert(other.graph, GROUPS).program
    verify(program, Order.captured(program))
    for late in (False, True):
        wanted, got = (run_alone(module, inputs, late)[0] for module in (one, other))
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("form", ["concat", "coalesced"])
@pytest.mark.parametrize("divide", ["before", "after", "not"])
def test_gradients_are_fused_and_the_numbers_stay(form: str, divide: str):
    module, inputs = step(divide=divide)
    before = copy.deepcopy(module)
    found = fuse_gradients(module, cap_nbytes=9 * KIB, first_nbytes=4 * KIB, form=form)
    assert found.gradients == 6
    assert [call.work.nbytes // KIB for call in calls(module)] == [4, 8, 8, 4]
    assert_same(before, module, inputs)


@pytest.mark.parametrize("form", ["concat", "coalesced"])
def test_a_bucket_is_divided_once(form: str):
    module, _ = step(8)
    found = fuse_gradients(module, cap_nbytes=100 * KIB, form=form, first_nbytes=16 * KIB)
    assert found.collectives == found.divisions == 2
    assert count(module, aten.div.Tensor, aten._foreach_div.Scalar) == 2


def test_the_first_bucket_is_small():
    module, _ = step(8)
    fuse_gradients(module, cap_nbytes=100 * KIB, first_nbytes=4 * KIB)
    assert [call.work.nbytes // KIB for call in calls(module)] == [4, 28]


@pytest.mark.parametrize("form", ["concat", "coalesced"])
@pytest.mark.parametrize("divide", ["before", "after"])
def test_the_division_can_be_left_to_the_reduction(form: str, divide: str):
    module, _ = step(divide=divide)
    found = fuse_gradients(module, form=form, average=True, groups=GROUPS, first_nbytes=4 * KIB)
    assert {call.work.reduce_op for call in calls(module)} == {"avg"}
    assert found.divisions == count(module, aten.div.Tensor, aten._foreach_div.Scalar) == 0
    module.graph.lint()


def test_a_division_by_another_number_is_not_left_to_the_reduction():
    module, _ = step()
    fuse_gradients(module, average=True, groups={"0": ("dp", (0, 1))})
    assert {call.work.reduce_op for call in calls(module)} == {"sum"}


def mixed(x: Tensor, w: Tensor) -> list[Tensor]:
    """Gradients that differ in group, reduce op, dtype and divisor, one after the other."""
    half = x.to(torch.bfloat16)
    return [
        reduced(x @ w, "0"),
        reduced(half @ w.to(torch.bfloat16), "0"),
        reduced(x @ w.t(), "1"),
        reduced(x @ (w + 1), "0", "max"),
        ops.wait_tensor(ops.all_reduce((x @ (w + 2)) / 8, "sum", "0")),
        reduced(x @ (w + 3), "0"),
    ]


@pytest.mark.parametrize("form", ["concat", "coalesced"])
def test_group_op_dtype_and_divisor_are_never_mixed(form: str):
    inputs = [X[:32], weights(1)[0]]
    module = traced(mixed, *inputs)
    before = copy.deepcopy(module)
    fuse_gradients(module, form=form, groups=GROUPS)
    kinds = [(call.group, call.work.reduce_op, call.work.dtype) for call in calls(module)]
    assert len(kinds) == 5  # only the first and the last agree in everything
    assert len(set(kinds)) == 4  # sums of float32 on group 0 come with two divisors
    assert_same(before, module, inputs)


@pytest.mark.parametrize("form", ["concat", "coalesced"])
def test_waits_stand_right_before_the_first_real_use(form: str):
    def function(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
        first, second = reduced(x.t() @ x), reduced(x.t() @ torch.relu(x))
        for _ in range(3):
            x = torch.tanh(x @ x.t() @ x)
        p.sub_(first)
        q.sub_(second)
        return x

    inputs = [X, *weights(2)]
    module = traced(function, *inputs)
    before = copy.deepcopy(module)
    fuse_gradients(module, form=form, first_nbytes=100 * KIB, limits=Limits(peak_ratio=None))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    first = next(k for k, node in enumerate(nodes) if is_wait(node))
    assert not any(node.target in (aten.mm.default, aten.tanh.default) for node in nodes[first:])
    assert_same(before, module, inputs)


def test_a_dividend_that_changes_meanwhile_is_divided_where_it_was():
    def function(x: Tensor) -> list[Tensor]:
        grad = x.t() @ x
        first = reduced(grad)
        grad.add_(1)
        return [first, reduced(grad * 2)]

    module = traced(function, X)
    before = copy.deepcopy(module)
    fuse_gradients(module, first_nbytes=100 * KIB)
    assert_same(before, module, [X])


def test_activations_are_left_alone():
    def function(x: Tensor, w: Tensor) -> Tensor:
        for k in range(3):
            x = ops.wait_tensor(ops.all_reduce(x @ (w + k), "sum", "0"))
        return x @ w

    module = traced(function, X, weights(1)[0])
    assert not find_gradients(convert(module.graph, GROUPS))
    assert fuse_gradients(module).gradients == 0
    assert len(calls(module)) == 3


def test_names_do_not_matter():
    one, _ = step()
    other, inputs = step()
    for k, node in enumerate(other.graph.nodes):
        if node.op == "call_function":
            node._rename(f"anything_{k}")
    found = [fuse_gradients(module, first_nbytes=8 * KIB) for module in (one, other)]
    assert found[0] == found[1]
    assert_same(one, other, inputs)


def test_the_solver_can_choose_the_buckets():
    module, inputs = step(8)
    before = copy.deepcopy(module)
    limits = Limits(peak_ratio=None, steps=500)
    found = fuse_gradients(
        module, cap_nbytes=None, cluster="h100x4", estimate=estimate, groups=GROUPS, limits=limits
    )
    assert found.collectives < found.gradients
    assert found.divisions == found.collectives
    assert_same(before, module, inputs)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cap_nbytes": 0}, "at least one byte"),
        ({"cap_nbytes": None, "form": "concat"}, "solver"),
        ({"cap_nbytes": "25MB"}, "cap_nbytes is '25MB'; give a number of bytes"),
        ({"first_nbytes": None}, "first_nbytes is None; give a number of bytes"),
        ({"form": "flat"}, "unknown form 'flat'.*concat.*coalesced"),
        ({"limits": 3}, "limits is 3"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(UndertowError, match=sentence):
        fuse_gradients(step()[0], **options)


@pytest.mark.slow
def test_a_real_model_with_its_optimizer_computes_the_same():
    example = load("llama3-debug", seq=32)
    captured = trace_step(example, Mesh({"dp": 4}), "ddp", optimizer="adamw")
    groups = {g.name: ("-".join(g.dims), g.ranks) for g in captured.groups.values()}
    before = captured.graph_module
    places = [node.meta["val"] for node in before.graph.nodes if node.op == "placeholder"]
    inputs = [(torch.rand(val.shape) * 0.1).to(val.dtype) for val in places]
    wanted = run_alone(before, inputs, late=True)
    for form in ("concat", "coalesced"):
        module = copy.deepcopy(before)
        sizes = {"cap_nbytes": 200 * KIB, "first_nbytes": 20 * KIB}
        found = fuse_gradients(module, form=form, groups=groups, **sizes)
        assert found.gradients == 21
        assert found.collectives < 8
        got = run_alone(module, inputs, late=True)
        for a, b in zip(wanted[0] + wanted[1], got[0] + got[1], strict=True):
            assert torch.equal(a, b)
