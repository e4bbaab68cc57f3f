"""Generated modules: what they say, and when they let go of memory."""

from __future__ import annotations

import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from undertow.codegen.lifetimes import frees
from undertow.codegen.load import load_module
from undertow.codegen.module import Module, write_module

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def module_of(build: Any) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule(torch.nn.Module(), graph)


def lines(gm: fx.GraphModule) -> list[str]:
    return [
        line.strip()
        for line in write_module(gm, "x").source.split("def run(args):\n")[1].splitlines()
    ]


def test_every_value_is_deleted_after_its_last_use() -> None:
    def build(graph: fx.Graph) -> Any:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        c = graph.call_function(aten.mm.default, (a, b))
        d = graph.call_function(aten.relu.default, (c,))
        return (graph.call_function(aten.add.Tensor, (d, a), {"alpha": 2}),)

    assert lines(module_of(build)) == [
        "a, b = args",
        "args.clear()",
        "mm_default = aten.mm.default(a, b)",
        "del b",
        "relu_default = aten.relu.default(mm_default)",
        "del mm_default",
        "add_tensor = aten.add.Tensor(relu_default, a, alpha=2)",
        "del a, relu_default",
        "return (add_tensor,)",
    ]


def test_what_a_collective_reads_is_held_until_its_wait() -> None:
    def build(graph: fx.Graph) -> Any:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        started = graph.call_function(c10d.all_reduce.default, (a, "sum", "0"))
        other = graph.call_function(aten.relu.default, (b,))
        done = graph.call_function(c10d.wait_tensor.default, (started,))
        return (done, other)

    assert lines(module_of(build)) == [
        "a, b = args",
        "args.clear()",
        "all_reduce_default = c10d.all_reduce.default(a, 'sum', '0')",
        "relu_default = aten.relu.default(b)",
        "del b",
        "wait_tensor_default = c10d.wait_tensor.default(all_reduce_default)",
        "del a, all_reduce_default",
        "return (wait_tensor_default, relu_default)",
    ]


def test_a_coalesced_call_holds_its_inputs_until_the_first_wait() -> None:
    def build(graph: fx.Graph) -> Any:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        started = graph.call_function(c10d.all_reduce_coalesced.default, ([a, b], "sum", "0"))
        parts = [graph.call_function(operator.getitem, (started, i)) for i in range(2)]
        return tuple(graph.call_function(c10d.wait_tensor.default, (part,)) for part in parts)

    freed = {
        node.name: [value.name for value in values]
        for node, values in frees(module_of(build).graph).items()
    }
    assert freed == {
        "getitem_1": ["all_reduce_coalesced_default"],
        "wait_tensor_default": ["a", "b", "getitem"],
        "wait_tensor_default_1": ["getitem_1"],
    }


def test_unused_inputs_go_at_once_and_arguments_are_spelt() -> None:
    def build(graph: fx.Graph) -> Any:
        graph.placeholder("unused")
        full = graph.call_function(
            aten.full.default,
            ([2, 3], float("-inf")),
            {"dtype": torch.bfloat16, "device": torch.device("cpu"), "layout": torch.strided},
        )
        return (full, None)

    written = lines(module_of(build))
    assert "del unused" in written
    assert (
        'full_default = aten.full.default([2, 3], float("-inf"), dtype=torch.bfloat16, '
        'device=torch.device("cpu"), layout=torch.strided)'
    ) in written


def test_the_module_runs_and_empties_its_list() -> None:
    def build(graph: fx.Graph) -> Any:
        a = graph.placeholder("a")
        return (graph.call_function(aten.mul.Tensor, (a, 3.0)),)

    run = load_module(write_module(module_of(build), "x"), "x")
    args: list[Any] = [torch.ones(2)]
    (result,) = run(args)
    assert result.tolist() == [3.0, 3.0]
    assert args == []


def test_a_deleted_input_is_gone_for_good() -> None:
    source = (
        "def run(args):\n    a, b = args\n    args.clear()\n    del a\n    look()\n    return b\n"
    )
    first = torch.randn(3)
    watched, seen = weakref.ref(first), []
    run = load_module(Module(source), "x", {"look": lambda: seen.append(watched())})
    args: list[Any] = [first, torch.randn(3)]
    del first
    run(args)
    assert seen == [None]


def test_a_failing_line_is_shown_in_the_traceback() -> None:
    def build(graph: fx.Graph) -> Any:
        a, b = graph.placeholder("a"), graph.placeholder("b")
        return (graph.call_function(aten.mm.default, (a, b)),)

    run = load_module(write_module(module_of(build), "x"), "graph0.forward")
    with pytest.raises(RuntimeError) as caught:
        run([torch.ones(2, 3), torch.ones(2, 3)])

    text = "".join(traceback.format_exception(caught.value))
    assert "undertow graph0.forward" in text
    assert "mm_default = aten.mm.default(a, b)" in text


def test_objects_without_a_spelling_are_constants() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    def build(graph: fx.Graph) -> Any:
        return (graph.call_function(double, (graph.placeholder("a"),)),)

    written = write_module(module_of(build), "x")
    assert "CONSTANT_0(a)" in written.source
    assert load_module(written, "x")([torch.ones(1)])[0].item() == 2
