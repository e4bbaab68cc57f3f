"""Copies between devices block once a graph is scheduled; those on one device stay."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import fx

from undertow.errors import OrderError
from undertow.graph.copies import block_copies
from undertow.graph.schedule_graph import schedule_graph

aten, ops = torch.ops.aten, torch.ops._c10d_functional


def graph_with_copies() -> fx.Graph:
    """From the CPU to another device and back, and on one device; and a collective."""
    graph = fx.Graph()
    here, there = torch.empty(4, device="cpu"), torch.empty(4, device="meta")

    def add(target, *args, val, **kwargs):
        node = graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    x = graph.placeholder("x")
    x.meta["val"] = here
    up = add(aten._to_copy.default, x, device="meta", non_blocking=True, val=there)
    down = add(aten.copy_.default, x, up, True, val=here)
    add(aten._to_copy.default, x, dtype=torch.float64, non_blocking=True, val=here.double())
    start = add(ops.all_reduce.default, x, "sum", "0", val=here.clone())
    wait = add(ops.wait_tensor.default, start, val=here.clone())
    graph.output((down, wait))
    return graph


def test_copies_between_devices_block(caplog: pytest.LogCaptureFixture) -> None:
    graph = graph_with_copies()
    with caplog.at_level(logging.WARNING):
        assert block_copies(graph) == 2
    assert "2 copies between devices block now" in caplog.text
    up, down, same = [n for n in graph.nodes if n.target in _COPIES]
    assert up.kwargs["non_blocking"] is False
    assert down.args[2] is False
    assert same.kwargs["non_blocking"] is True
    assert block_copies(graph) == 0


_COPIES = (aten._to_copy.default, aten.copy_.default)


def test_a_plan_that_is_refused_leaves_them() -> None:
    options = {"cluster": "h100x4", "groups": {"0": ("dp", (0, 1, 2, 3))}}
    _, plan = schedule_graph(fx.GraphModule({}, graph_with_copies()), **options)
    module = fx.GraphModule({}, graph_with_copies())
    before = str(module.graph)
    with pytest.raises(OrderError, match="made for another step"):
        schedule_graph(module, plan=replace(plan, program="0"), **options)
    assert str(module.graph) == before
    schedule_graph(module, plan=plan, **options)
    assert block_copies(module.graph) == 0


def test_scheduling_a_graph_does_so() -> None:
    module = fx.GraphModule({}, graph_with_copies())
    schedule_graph(module, cluster="h100x4", groups={"0": ("dp", (0, 1, 2, 3))})
    assert block_copies(module.graph) == 0
