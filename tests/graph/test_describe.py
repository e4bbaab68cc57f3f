"""Descriptions of compute nodes, shared where nodes do the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.graph.describe import Descriptions, describe
from undertow.graph.nodes import Values


def calls(function: Any, *inputs: Tensor, mode: str = "fake") -> list[fx.Node]:
    graph = make_fx(function, tracing_mode=mode)(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def layers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.cat([torch.relu(x @ w), x.sum(0, keepdim=True)]).narrow(0, 0, 8)
    return x


def test_layers_share_descriptions_that_are_those_of_their_nodes():
    nodes = calls(layers, torch.ones(8, 4), torch.ones(4, 4))
    descriptions = Descriptions(Values())
    found = [descriptions.of(node) for node in nodes]
    assert found == [describe(node) for node in nodes]
    products = [work for work in found if work.op == "aten.mm"]
    assert len(products) == 3
    assert products[1] is products[2]


def test_other_strides_sizes_dtypes_and_arguments_are_described_anew():
    def function(x: Tensor) -> Tensor:
        parts = [
            x.clone(), x.t().clone(), x[:4].clone(), x.double().clone(), x.sum(0), x.sum(1),
            x.expand(2, 8, 4).clone(),
        ]  # fmt: skip
        return sum(part.sum() for part in parts)

    nodes = calls(function, torch.ones(8, 4))
    descriptions = Descriptions(Values())
    assert [descriptions.of(node) for node in nodes] == [describe(node) for node in nodes]


def test_numbers_that_are_equal_and_of_other_types_are_not_mistaken_for_each_other() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat([(x * number).relu().reshape(-1) for number in (1, 1.0, True, 1)])

    nodes = calls(function, torch.ones(8, dtype=torch.bool))
    descriptions = Descriptions(Values())
    found = [descriptions.of(node) for node in nodes]
    assert found == [describe(node) for node in nodes]
    whole, real, flag, again = [work for work in found if work.op == "aten.mul"]
    assert whole is again
    assert len({work.nbytes_written for work in (whole, real, flag)}) == 3


def test_numbers_that_nodes_give_out_are_not_mistaken_for_each_other_either() -> None:
    graph = fx.Graph()
    flags = graph.placeholder("flags")
    flags.meta["val"] = torch.ones(8, dtype=torch.bool)
    for place, number in enumerate((1, 1.0, True)):
        given = graph.placeholder(f"number{place}")
        given.meta["val"] = number
        product = graph.call_function(torch.ops.aten.mul.Tensor, (flags, given))
        product.meta["val"] = flags.meta["val"] * number
    descriptions = Descriptions(Values())
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    found = [descriptions.of(node) for node in products]
    assert found == [describe(node) for node in products]
    assert len({work.nbytes_written for work in found}) == 3


def test_what_values_decide_on_is_described_on_its_own() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.nonzero().double(), y.nonzero().double()

    nodes = calls(function, torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1]), mode="real")
    descriptions = Descriptions(Values())
    assert [descriptions.of(node) for node in nodes] == [describe(node) for node in nodes]


def test_devices_are_not_mistaken_for_each_other() -> None:
    """Statistics of a norm in bfloat16 are bfloat16 on one and float32 on another."""
    with FakeTensorMode():
        inputs = [torch.empty(4, 8, dtype=torch.bfloat16, device=d) for d in ("cpu", "cuda")]

        def function(*given: Tensor) -> list[Tensor]:
            norm = torch.ops.aten.native_layer_norm.default
            return [part for x in given for part in norm(x, [8], None, None, 1e-5)]

        graph = make_fx(function)(*inputs).graph
    norms = graph.find_nodes(op="call_function", target=torch.ops.aten.native_layer_norm.default)
    descriptions = Descriptions(Values())
    assert [descriptions.of(node) for node in norms] == [describe(node) for node in norms]


def test_what_writes_to_its_arguments_is_described_on_its_own():
    def function(x: Tensor) -> Tensor:
        return x.clone().add_(1).mul_(2)

    nodes = calls(function, torch.ones(8))
    descriptions = Descriptions(Values())
    first = descriptions.of(nodes[1])
    assert first == describe(nodes[1])
    assert descriptions.of(nodes[1]) is not first


def test_symbolic_sizes_are_described_by_their_hints():
    nodes = calls(lambda x: (x * 2).relu() * 2, torch.ones(8, 4), mode="symbolic")
    described = [node for node in nodes if isinstance(node.meta["val"], Tensor)]
    descriptions = Descriptions(Values())
    assert [descriptions.of(node) for node in described] == [describe(node) for node in described]
    assert descriptions.of(described[0]).shape == (8, 4)


def test_values_ask_each_node_once():
    (node, *_) = calls(lambda x: x + 1, torch.ones(8))
    values = Values()
    assert values.tensors(node) is values.tensors(node)
    assert len(values.storages(node)) == 1
