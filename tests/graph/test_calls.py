"""Collectives that look alike are taken apart once, and those that do not are told apart."""

from __future__ import annotations

import torch
from torch import fx

from tests.graph.test_rewrite import GROUPS, X, Y, gather, ops, reduce, traced, wait
from undertow.graph import collective_call, convert
from undertow.graph.calls import Calls
from undertow.graph.describe import Descriptions
from undertow.graph.nodes import Values
from undertow.program import Join


def assert_as_asked_one_by_one(module: fx.GraphModule) -> None:
    calls = Calls(Descriptions(Values()).look)
    for node in module.graph.nodes:
        assert calls.of(node) == collective_call(node)


def test_alike_collectives_share_their_description():
    module = traced(lambda x, y: (wait(gather(x)), wait(gather(y)), wait(gather(x + y))), X, Y)
    assert_as_asked_one_by_one(module)
    program = convert(module.graph, GROUPS).program
    assert len({id(program.tasks[start].work) for start in program.starts}) == 1


def test_collectives_that_differ_in_size_or_op_are_told_apart():
    def step(x, y):
        return wait(reduce(x)), wait(reduce(y, "max")), wait(reduce(x[:4])), wait(gather(x[:4]))

    assert_as_asked_one_by_one(traced(step, X, Y))


def test_one_tensor_given_twice_is_read_twice():
    def step(x, y):
        several = ops.all_reduce_coalesced([x, y], "sum", "0")
        twice = ops.all_reduce_coalesced([y, y], "sum", "0")
        return [wait(made) for made in (*several, *twice)]

    module = traced(step, X, Y)
    assert_as_asked_one_by_one(module)


def test_what_is_used_before_its_wait_is_not_merged_like_its_equals():
    def step(x, y):
        early = reduce(y)
        return wait(reduce(x)), early.view(-1), wait(early)

    program = convert(traced(step, X, Y).graph, GROUPS).program
    joins = [program.tasks[start].work.join for start in program.starts]
    assert sorted(joins) == sorted([Join.ANY, Join.COALESCED])


def test_what_is_looked_at_as_another_dtype_is_not_merged_like_its_equals():
    def step(x, y):
        return wait(reduce(x)), wait(reduce(y)).view(torch.int32)

    program = convert(traced(step, X, Y).graph, GROUPS).program
    joins = [program.tasks[start].work.join for start in program.starts]
    assert joins == [Join.ANY, Join.COALESCED]
