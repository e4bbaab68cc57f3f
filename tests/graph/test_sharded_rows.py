"""Rows of sharded tables: what is sent in place of a table, what backward comes to, what is left
alone. That lookups get their rows is tested on real ranks (backend/test_embedding_rows.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.stand_ins import RANKS
from tests.graph.test_embedding_rows import FAKE, assert_same, checked, collectives
from undertow.capture.mesh import fake_world
from undertow.errors import UndertowError
from undertow.graph.exchange import scatter_by_exchange
from undertow.graph.in_table import in_table
from undertow.graph.sharded_rows import exchange_sharded_rows
from undertow.program import CollectiveKind

aten, ops = torch.ops.aten, torch.ops._c10d_functional
ROWS, WIDTH, TOKENS = 200, 16, 12
INDEX = (torch.arange(TOKENS) * 17 % 70).reshape(3, 4)  # some of this rank's 50 rows, some not
GRAD = torch.arange(-96.0, 96.0).reshape(3, 4, WIDTH)  # whole numbers: sums are exact
SHARD = torch.arange(ROWS * WIDTH / RANKS)
GATHER, EXCHANGE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL
SCATTER = CollectiveKind.REDUCE_SCATTER


def gathered(shard: Tensor, rows: int = ROWS) -> Tensor:
    whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(shard, RANKS, "0"))
    return whole.view(rows, -1)


def scattered(grad: Tensor, op: str = "sum") -> Tensor:
    part: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(grad.view(-1), op, RANKS, "0"))
    return part


def table(grad: Tensor, index: Tensor, padding: int = -1, scaled: bool = False) -> Tensor:
    made: Tensor = aten.embedding_dense_backward(grad, index, ROWS, padding, scaled)
    return made


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with fake_world(RANKS):
        return make_fx(function, tracing_mode="fake")(*inputs)


def exchanged(module: fx.GraphModule, most: int = TOKENS) -> fx.GraphModule:
    changed = copy.deepcopy(module)
    with fake_world(RANKS):
        assert exchange_sharded_rows(changed.graph, most, FAKE) == 1
    return checked(changed)


@pytest.mark.parametrize("most", [TOKENS, TOKENS + 8])
def test_a_lookup_tells_its_tokens_and_gets_rows(most: int) -> None:
    module = traced(lambda shard, index: aten.embedding(gathered(shard), index), SHARD, INDEX)
    changed = exchanged(module, most)
    sent = RANKS * most * WIDTH * 4
    assert collectives(changed) == [(GATHER, most * 8), (SCATTER, sent)]
    with fake_world(RANKS):
        assert scatter_by_exchange(changed.graph, FAKE) == 1
    assert collectives(checked(changed)) == [(GATHER, most * 8), (EXCHANGE, sent)]
    (wanted,), (got,) = (
        [node.args[0] for node in one.graph.nodes if node.op == "output"]
        for one in (module, changed)
    )
    assert got.meta["val"].shape == wanted.meta["val"].shape


@pytest.mark.parametrize("most", [TOKENS, TOKENS + 8])
@pytest.mark.parametrize("padding", [-1, 0, 17])
def test_each_rank_adds_up_the_rows_of_its_own_shard(padding: int, most: int) -> None:
    module = traced(lambda grad, index: scattered(table(grad, index, padding)) / RANKS, GRAD, INDEX)
    changed = exchanged(module, most)
    assert collectives(changed) == [(GATHER, most * WIDTH * 4), (GATHER, most * 8)]
    assert_same(module, changed, GRAD, INDEX)


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tied": lambda shard, index: aten.embedding(whole := gathered(shard), index) @ whole.t(),
    "read twice": lambda shard, index: [
        aten.embedding(whole := gathered(shard), index),
        aten.embedding(whole, index + 1),
    ],
    "no whole rows": lambda shard, index: aten.embedding(gathered(shard, ROWS // 8), index % 9),
    "written later": lambda shard, index: [aten.embedding(gathered(shard), index), shard.add_(1)],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_other_lookups_are_left_alone(name: str) -> None:
    function = LOOKUPS[name]
    assert_left_alone(traced(function, SHARD, INDEX), TOKENS if name != "no whole rows" else 1)


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "averaged": lambda grad, index: scattered(table(grad, index), "avg"),
    "scaled": lambda grad, index: scattered(table(grad, index, scaled=True)),
    "used twice": lambda grad, index: [scattered(made := table(grad, index)), made.sum()],
    "of little precision": lambda grad, index: scattered(table(grad.bfloat16(), index)),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_other_gradients_are_left_alone(name: str) -> None:
    assert_left_alone(traced(BACKWARDS[name], GRAD, INDEX), TOKENS)


def assert_left_alone(module: fx.GraphModule, most: int) -> None:
    before = module.graph.python_code("self").src
    with fake_world(RANKS):
        assert exchange_sharded_rows(module.graph, most, FAKE) == 0
    assert module.graph.python_code("self").src == before


def test_a_table_of_hardly_more_rows_is_gathered() -> None:
    module = traced(lambda shard, index: aten.embedding(gathered(shard), index), SHARD, INDEX)
    row, index = WIDTH * 4, 8
    most = int(ROWS / RANKS * row / (row + index) / 1.5)
    assert_left_alone(module, most + 1)
    exchanged(module, most)


def test_more_tokens_than_were_said_are_an_error() -> None:
    module = traced(lambda shard, index: aten.embedding(gathered(shard), index), SHARD, INDEX)
    with fake_world(RANKS), pytest.raises(UndertowError, match="embedding_rows is 11"):
        exchange_sharded_rows(module.graph, TOKENS - 1, FAKE)


@pytest.mark.parametrize("tokens", [[3, ROWS], [-1, 3]])
def test_a_token_that_the_table_has_no_row_for_is_refused(tokens: list[int]) -> None:
    with pytest.raises(IndexError, match=rf"row {ROWS if ROWS in tokens else -1} .* has {ROWS}$"):
        in_table(torch.tensor(tokens), ROWS)


def test_tokens_of_the_table_are_handed_on() -> None:
    tokens = torch.tensor([0, ROWS - 1, 3])
    assert torch.equal(known := in_table(tokens, ROWS), tokens)
    assert known.data_ptr() != tokens.data_ptr()
    assert not in_table(tokens[:0], ROWS).numel()
