"""Gradients of tables by the rows of all ranks: what they come to, and what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import RANKS, run_alone
from undertow.capture.mesh import fake_world
from undertow.errors import UndertowError
from undertow.graph import collective_call, convert
from undertow.graph.embedding_rows import gather_embedding_rows
from undertow.graph.flat_gradients import flatten_gradients
from undertow.program import CollectiveKind, Order, verify

aten, ops = torch.ops.aten, torch.ops._c10d_functional
FAKE = ("fake",)
ROWS, WIDTH, TOKENS = 200, 16, 12
INDEX = (torch.arange(TOKENS) * 7 % 5 + 1).reshape(3, 4)  # some of them several times
GRAD = torch.arange(-96.0, 96.0).reshape(3, 4, WIDTH)  # whole numbers: sums are exact

Function = Callable[[Tensor, Tensor], Any]


def table(grad: Tensor, index: Tensor, padding: int = -1, scaled: bool = False) -> Tensor:
    made: Tensor = aten.embedding_dense_backward(grad, index, ROWS, padding, scaled)
    return made


def reduced(grad: Tensor, op: str = "sum") -> Tensor:
    made: Tensor = ops.wait_tensor(ops.all_reduce(grad, op, "0"))
    return made


def traced(function: Function, grad: Tensor = GRAD, index: Tensor = INDEX) -> fx.GraphModule:
    with fake_world(RANKS):
        return make_fx(function, tracing_mode="fake")(grad, index)


def gathered(module: fx.GraphModule, most: int = TOKENS) -> fx.GraphModule:
    changed = copy.deepcopy(module)
    with fake_world(RANKS):
        assert gather_embedding_rows(changed.graph, most, FAKE) == 1
    return checked(changed)


def checked(changed: fx.GraphModule) -> fx.GraphModule:
    """A graph that was rewritten, once it is found to be in order."""
    changed.graph.lint()
    changed.recompile()
    program = convert(changed.graph).program
    assert not verify(program, Order.captured(program))
    return changed


def collectives(module: fx.GraphModule) -> list[tuple[CollectiveKind, int | None]]:
    found = (collective_call(node) for node in module.graph.nodes)
    return [(call.work.kind, call.work.nbytes) for call in found if call is not None]


def assert_same(one: fx.GraphModule, other: fx.GraphModule, *inputs: Tensor) -> None:
    for late in (False, True):
        wanted, got = (run_alone(module, list(inputs), late)[0] for module in (one, other))
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def assert_left_alone(function: Function, most: int = TOKENS) -> None:
    module = traced(function)
    before = module.graph.python_code("self").src
    with fake_world(RANKS):
        assert gather_embedding_rows(module.graph, most, FAKE) == 0
    assert module.graph.python_code("self").src == before


@pytest.mark.parametrize("most", [TOKENS, TOKENS + 8])
@pytest.mark.parametrize("padding", [-1, 0, 2])
@pytest.mark.parametrize("divide", ["before", "after", "never"])
def test_rows_and_their_indices_are_gathered_and_the_sums_stay(
    divide: str, padding: int, most: int
) -> None:
    def function(grad: Tensor, index: Tensor) -> Tensor:
        mine = table(grad, index, padding)
        mine = reduced(mine / RANKS if divide == "before" else mine)
        return mine / RANKS if divide == "after" else mine

    module = traced(function)
    changed = gathered(module, most)
    gather = CollectiveKind.ALL_GATHER
    assert collectives(changed) == [(gather, most * WIDTH * 4), (gather, most * 8)]
    divisions = [n for n in changed.graph.nodes if n.target is aten.div.Tensor]
    assert [n.meta["val"].shape[0] for n in divisions] == [TOKENS] * (divide != "never")
    assert_same(module, changed, GRAD, INDEX)


def test_a_divisor_that_is_no_power_of_two_divides_rows_too() -> None:
    module = traced(lambda grad, index: reduced(table(grad, index)) / 3)
    (wanted,), _ = run_alone(module, [GRAD, INDEX], late=True)
    (found,), _ = run_alone(gathered(module), [GRAD, INDEX], late=True)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


def test_gradients_and_indices_that_lie_otherwise_are_copied() -> None:
    grad, index = torch.arange(-96.0, 96.0).reshape(WIDTH, 3, 4), INDEX[0]

    def function(grad: Tensor, index: Tensor) -> Tensor:
        return reduced(table(grad.permute(1, 2, 0), index.expand(3, 4)))

    module = traced(function, grad, index)
    assert_same(module, gathered(module), grad, index)


def test_a_batch_without_tokens_gathers_as_many_rows() -> None:
    none = GRAD[:0], INDEX[:0]
    module = traced(lambda grad, index: reduced(table(grad, index)), *none)
    changed = gathered(module)
    assert [nbytes for _, nbytes in collectives(changed)] == [TOKENS * WIDTH * 4, TOKENS * 8]
    assert_same(module, changed, *none)


def test_what_is_issued_does_not_depend_on_the_batch() -> None:
    def issued(samples: int) -> Any:
        batch = GRAD[:samples], INDEX[:samples]
        return collectives(
            gathered(traced(lambda grad, index: reduced(table(grad, index)), *batch))
        )

    assert issued(1) == issued(2) == issued(3)


def test_other_gradients_are_flattened_as_ever() -> None:
    def function(grad: Tensor, index: Tensor) -> list[Tensor]:
        flat = grad.reshape(-1, WIDTH)
        return [reduced(flat.t() @ flat) / RANKS, reduced(table(grad, index)) / RANKS]

    module = traced(function)
    changed = gathered(module)
    with fake_world(RANKS):
        assert flatten_gradients(changed.graph, FAKE) == 1
    changed.recompile()
    assert [kind for kind, _ in collectives(changed)].count(CollectiveKind.ALL_REDUCE) == 1
    assert_same(module, changed, GRAD, INDEX)


@pytest.mark.parametrize(
    "function",
    [
        lambda grad, index: reduced(table(grad, index) + torch.ones(ROWS, WIDTH)),  # tied weights
        lambda grad, index: (lambda made: [reduced(made), made.sum()])(table(grad, index)),
        lambda grad, index: reduced(table(grad, index), "max"),
        lambda grad, index: reduced(table(grad, index, scaled=True)),
        lambda grad, index: reduced(table(grad.bfloat16(), index)),
        lambda grad, index: (reduced(table(grad, index)), grad.zero_())[0],
    ],
    ids=["sum of two", "used otherwise", "max", "scaled by frequency", "bfloat16", "overwritten"],
)
def test_other_tables_are_left_alone(function: Function) -> None:
    assert_left_alone(function)


def test_rows_that_save_less_than_half_are_left_alone() -> None:
    def function(grad: Tensor, index: Tensor) -> Tensor:
        return reduced(table(grad, index))

    # Three times most rows of 64 and 8 bytes, against six quarters of the table.
    most = ROWS * 64 // (RANKS * (64 + 8))
    gathered(traced(function), most)
    assert_left_alone(function, most + 1)


def test_groups_of_other_backends_are_left_alone() -> None:
    module = traced(lambda grad, index: reduced(table(grad, index)))
    with fake_world(RANKS):
        assert gather_embedding_rows(module.graph, TOKENS) == 0


def test_a_batch_of_more_tokens_is_refused() -> None:
    module = traced(lambda grad, index: reduced(table(grad, index)))
    with (
        fake_world(RANKS),
        pytest.raises(UndertowError, match="is 8, but this batch looks up 12 rows"),
    ):
        gather_embedding_rows(module.graph, 8, FAKE)


def test_a_batch_of_symbolic_size_is_refused() -> None:
    with fake_world(RANKS):
        function: Function = lambda grad, index: reduced(table(grad, index))  # noqa: E731
        module = make_fx(function, tracing_mode="symbolic")(GRAD, INDEX)
        for node in module.graph.nodes:  # tables themselves have fixed sizes
            if node.op == "call_function" and node.meta["val"].dim() == 2:
                node.meta["val"] = torch.empty(ROWS, WIDTH, device="meta")
        with pytest.raises(UndertowError, match="dynamic=False"):
            gather_embedding_rows(module.graph, TOKENS, FAKE)
