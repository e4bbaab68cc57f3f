"""The benchmark's reference is really PyTorch's pass, and its result is a Program that verifies."""

from __future__ import annotations

import pytest
import torch

from bench.graph_parts import parts_of
from bench.reference_pass import VARIANTS, Costs, run_reference
from undertow.capture.mesh import Mesh, bind, fake_world
from undertow.capture.models import load
from undertow.capture.parallelize import Options
from undertow.capture.trace import trace_step
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.graph import convert
from undertow.program import Kind, Order, lower_bounds, simulate, verify

MESH = Mesh({"dp": 16})
CLUSTER = Cluster.parse("2xh100x8")


@pytest.fixture(scope="module")
def step():
    options = Options("fsdp", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trace_step(load("llama3-debug", seq=512), MESH, options)


def groups_of(step):
    return {group.name: ("dp", group.ranks) for group in step.groups.values()}


def priced(step, part):
    converted = convert(part.graph_module.graph, groups_of(step), donated=part.donated)
    return price(converted.program, CLUSTER).program


def reference(step, part, variant):
    """The pass's graph, and its priced Program."""
    costs = Costs(priced(step, part), CLUSTER, groups_of(step), part.donated)
    with fake_world(MESH.size):
        for group in step.groups.values():
            bind(MESH).group(*group.dims)
        run = run_reference(part.graph_module, costs, variant)
        program = costs.program(run.graph_module.graph)
    verify(program, Order.captured(program))
    return run, program


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_pass_runs_on_a_step_and_its_result_verifies(step, variant):
    (part,) = parts_of(step.graph_module, ("step",))
    captured = priced(step, part)
    run, program = reference(step, part, variant)
    assert run.cpu_seconds > 0
    assert simulate(program).exposed_ns < simulate(captured).exposed_ns
    if variant.pre_bucketing:
        assert len(program.starts) < len(captured.starts)
        assert simulate(program).compute_ns > simulate(captured).compute_ns  # copies are counted
    else:
        assert sorted(task.name for task in program.tasks) == sorted(captured.index)


def test_nodes_that_only_moved_cost_what_they_did(step):
    (part,) = parts_of(step.graph_module, ("step",))
    captured = priced(step, part)
    _, program = reference(step, part, VARIANTS[0])
    before = {task.name: task.ns for task in captured.tasks}
    assert {task.name: task.ns for task in program.tasks} == before


def test_the_captured_graph_is_left_as_it_was(step):
    (part,) = parts_of(step.graph_module, ("step",))
    before = [node.name for node in part.graph_module.graph.nodes]
    reference(step, part, VARIANTS[1])
    assert [node.name for node in part.graph_module.graph.nodes] == before


def test_forward_and_backward_are_the_whole_step(step):
    whole, forward, backward = parts_of(step.graph_module, ("step", "forward", "backward"))
    programs = [priced(step, part) for part in (whole, forward, backward)]
    names = [set(program.index) for program in programs]
    assert names[0] == names[1] | names[2]
    assert not names[1] & names[2]
    assert {task.kind for task in programs[1].tasks} >= {Kind.START, Kind.WAIT}
    assert backward.donated
    assert simulate(programs[2]).peak_nbytes <= simulate(programs[0]).peak_nbytes
    for program in programs:
        assert simulate(program).total_ns >= lower_bounds(program).best.ns
