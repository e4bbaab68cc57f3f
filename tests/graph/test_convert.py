"""FX graphs become Programs: collectives by schema, aliases and mutations as hazards, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from undertow.capture import torch_api
from undertow.capture.mesh import fake_world
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.errors import ProgramError
from undertow.graph import convert
from undertow.graph.nodes import number
from undertow.program import (
    CollectiveKind,
    Join,
    Kind,
    Lifetime,
    OpClass,
    Order,
    profile_memory,
    verify,
)

ops = torch.ops._c10d_functional
GROUPS = {"0": ("dp", tuple(range(4)))}
X = torch.ones(8, 4)


def traced(function: Any, *inputs: torch.Tensor) -> fx.Graph:
    with fake_world(4):
        return make_fx(function, tracing_mode="fake")(*inputs).graph


def program_of(function: Any, *inputs: torch.Tensor):
    converted = convert(traced(function, *inputs), GROUPS)
    verify(converted.program, Order.captured(converted.program))
    return converted.program


def only_start(program):
    (start,) = program.starts
    return program.tasks[start]


FORMS = {
    "all_gather": (
        lambda x: ops.wait_tensor(ops.all_gather_into_tensor(x, 4, "0")),
        CollectiveKind.ALL_GATHER,
        "",
    ),
    "all_gather_out": (
        lambda x: ops.wait_tensor(
            ops.all_gather_into_tensor_out(x, 4, "0", out=torch.empty(32, 4))
        ),
        CollectiveKind.ALL_GATHER,
        "",
    ),
    "reduce_scatter": (
        lambda x: ops.wait_tensor(ops.reduce_scatter_tensor(x, "avg", 4, "0")),
        CollectiveKind.REDUCE_SCATTER,
        "avg",
    ),
    "reduce_scatter_out": (
        lambda x: ops.wait_tensor(
            ops.reduce_scatter_tensor_out(x, "sum", 4, "0", out=torch.empty(2, 4))
        ),
        CollectiveKind.REDUCE_SCATTER,
        "sum",
    ),
    "all_reduce": (
        lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", "0")),
        CollectiveKind.ALL_REDUCE,
        "sum",
    ),
    "all_reduce_in_place": (
        lambda x: ops.wait_tensor(ops.all_reduce_(x * 2, "max", "0")),
        CollectiveKind.ALL_REDUCE,
        "max",
    ),
    "all_to_all": (
        lambda x: ops.wait_tensor(ops.all_to_all_single(x, [2] * 4, [2] * 4, "0")),
        CollectiveKind.ALL_TO_ALL,
        "",
    ),
    "broadcast": (
        lambda x: ops.wait_tensor(ops.broadcast(x, 0, "0")),
        CollectiveKind.BROADCAST,
        "",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_collective_is_recognised(form):
    function, kind, reduce_op = FORMS[form]
    program = program_of(function, X)
    task = only_start(program)
    assert (task.work.kind, task.work.reduce_op, task.work.dtype) == (kind, reduce_op, "float32")
    assert task.work.nbytes == X.nbytes
    assert program.streams[task.stream].ranks == (0, 1, 2, 3)
    assert len(program.waits_of[program.starts[0]]) == 1


def test_a_coalesced_collective_has_a_wait_for_each_result():
    def step(x):
        made = ops.all_gather_into_tensor_coalesced([x, x + 1], 4, "0")
        return [ops.wait_tensor(item) for item in made]

    program = program_of(step, X)
    task = only_start(program)
    assert task.work.nbytes == 2 * X.nbytes
    waits = [program.tasks[wait] for wait in program.waits_of[program.starts[0]]]
    assert [wait.writes for wait in waits] == [(task.writes[0],), (task.writes[1],)]


def test_a_wait_for_an_input_counts_as_done_and_is_noted():
    converted = convert(traced(lambda x: ops.wait_tensor(x) + 1, X), GROUPS)
    kinds = [task.kind for task in converted.program.tasks]
    assert kinds == [Kind.VIEW, Kind.COMPUTE]
    assert "collectives that it did not start" in converted.notes[0]


def test_two_waits_for_one_collective():
    def step(x):
        made = ops.all_reduce(x, "sum", "0")
        return ops.wait_tensor(made) + 1, ops.wait_tensor(made) * 2

    program = program_of(step, X)
    assert len(program.waits_of[program.starts[0]]) == 2


def test_recognition_does_not_look_at_names():
    graph = traced(FORMS["all_reduce"][0], X)
    for k, node in enumerate(graph.nodes):
        if node.op == "call_function":
            node.name = f"mul_{k}"
    program = convert(graph, GROUPS).program
    assert [task.kind for task in program.tasks] == [Kind.START, Kind.WAIT]

    def lookalike(x):
        all_gather_into_tensor = x * 2
        return all_gather_into_tensor + 1

    assert not program_of(lookalike, X).starts


def test_an_in_place_collective_waits_for_readers_of_the_old_value():
    def step(x):
        y = x * 2
        seen = y + 1
        return ops.wait_tensor(ops.all_reduce_(y, "sum", "0")), seen

    program = program_of(step, X)
    names = [task.name for task in program.tasks]
    pairs = {(names[h.src], names[h.dst], h.kind.value) for h in program.hazards}
    assert ("add", only_start(program).name, "WAR") in pairs


def test_a_mutation_through_a_view_orders_readers_of_the_base():
    def step(x):
        base = x * 2
        before = base.sum()
        base[0].add_(1)
        return before, base.sum()

    program = program_of(step, X)
    names = [task.name for task in program.tasks]
    pairs = {(names[h.src], names[h.dst], h.kind.value) for h in program.hazards}
    assert ("sum_1", "add_", "WAR") in pairs
    assert ("add_", "sum_2", "RAW") in pairs
    assert ("select", "add_", "RAW") in pairs  # the view itself comes first


def test_views_are_no_work_and_share_their_buffer():
    program = program_of(lambda x: x.t().reshape(2, 16) + 1, X)
    kinds = [task.kind for task in program.tasks]
    assert Kind.VIEW in kinds
    view = next(task for task in program.tasks if task.kind is Kind.VIEW)
    assert program.buffers[view.reads[0]].lifetime == "input"


def test_a_scaled_product_has_the_shape_of_its_factors():
    def step(a, b, sa, sb):
        return torch._scaled_mm(a, b, sa, sb, out_dtype=torch.bfloat16)

    fp8 = torch.float8_e4m3fn
    a, b = torch.ones(64, 32).to(fp8), torch.ones(16, 32).to(fp8).t()
    program = program_of(step, a, b, torch.ones(64, 1), torch.ones(1, 16))
    (work,) = [task.work for task in program.tasks if task.work]
    assert work.shape == (1, 64, 16, 32)


def test_allocations_take_memory_and_no_time():
    program = program_of(lambda x: torch.empty_like(x).copy_(x), X)
    priced = price(program, Cluster.parse("h100x8")).program
    assert priced.tasks[0].ns == 0
    assert not priced.tasks[0].launches
    assert profile_memory(program).peak_nbytes == 2 * X.nbytes


def test_what_is_written_in_place_counts_as_written():
    def step(p, g, m, v):
        torch.ops.aten._fused_adamw_.default(
            [p], [g], [m], [v], [], [torch.ones(())], lr=1e-3, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return p

    program = program_of(step, *(torch.ones(1024) for _ in range(4)))
    work = next(task.work for task in program.tasks if task.work and "adamw" in task.work.op)
    assert work.nbytes_read >= 4 * 4096
    assert work.nbytes_written >= 3 * 4096


def test_a_size_that_nobody_knows_gets_a_sentence():
    class Unknown:
        node = None

    with pytest.raises(ProgramError, match="not known before the step runs"):
        number(Unknown())


def test_random_operators_keep_their_sequence():
    program = program_of(lambda x: (torch.rand_like(x), torch.rand_like(x)), X)
    assert [(h.src, h.dst) for h in program.hazards] == [(0, 1)]


def test_reading_a_value_back_is_work_of_the_host():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(())
    item = graph.call_function(torch.ops.aten._local_scalar_dense.default, (x,))
    item.meta["val"] = 1.0
    graph.output(item)
    assert [task.kind for task in convert(graph).program.tasks] == [Kind.HOST]


def test_a_graph_that_is_not_traced_is_refused_with_a_sentence():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))).graph
    with pytest.raises(ProgramError, match="is a call_module; trace the model"):
        convert(graph)


def test_a_group_that_nobody_knows_has_no_ranks():
    program = convert(traced(FORMS["all_reduce"][0], X)).program
    assert program.streams[2].ranks == ()


def test_groups_of_the_running_job_are_found():
    with fake_world(4):
        graph = make_fx(FORMS["all_reduce"][0], tracing_mode="fake")(X).graph
        assert dist.get_world_size() == 4
        assert convert(graph).program.streams[2].ranks == (0, 1, 2, 3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).softmax(-1)


def mlp_step():
    model = Mlp()
    parameters = dict(model.named_parameters())

    def step(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        loss = torch.func.functional_call(model, parameters, (x,)).pow(2).sum()
        return loss, torch.autograd.grad(loss, list(parameters.values()))

    x = torch.ones(32, 16)
    return make_fx(step, tracing_mode="fake")(parameters, x), parameters, x, model


def test_flops_and_shapes_of_matmuls_are_described():
    module, _, x, model = mlp_step()
    program = convert(module.graph).program
    with FlopCounterMode(display=False) as counter:
        model(x).pow(2).sum().backward()
    matmuls = [t.work for t in program.tasks if t.work and t.work.op_class is OpClass.MATMUL]
    assert sum(work.flops for work in matmuls) == counter.get_total_flops()
    assert matmuls[0].shape == (1, 32, 64, 16)
    assert {work.op for work in matmuls} <= {"aten.mm", "aten.addmm"}


class LiveBytes(fx.Interpreter):
    """Runs a graph and notes after each node how many bytes are alive, by distinct storages. An
    interpreter drops inputs after their last use; they are not ours to free, so they are kept."""

    def __init__(self, module: fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        super().__init__(module)
        self.inputs = inputs
        self.live: dict[str, int] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        held = [*self.inputs, *self.env.values(), result]
        storages = {}
        for value in torch.utils._pytree.tree_leaves(held):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        self.live[node.name] = sum(storages.values())
        return result


def test_predicted_memory_is_what_an_interpreter_holds():
    module, parameters, x, _ = mlp_step()
    program = convert(module.graph).program
    predicted = profile_memory(program).during.tolist()
    flat = [*parameters.values(), x]
    interpreter = LiveBytes(module, flat)
    interpreter.run(*flat)
    compute = [k for k, task in enumerate(program.tasks) if task.kind is Kind.COMPUTE]
    assert len(compute) > 15
    actual = [interpreter.live[program.tasks[k].name] for k in compute]
    assert [predicted[k] for k in compute] == actual


def test_what_is_waited_for_and_returned_is_an_output():
    def step(x):
        out = torch.empty(32, 4)
        ops.wait_tensor(ops.all_gather_into_tensor_out(x, 4, "0", out=out))
        return ops.wait_tensor(ops.all_reduce(x, "sum", "0")), out

    program = program_of(step, X)
    outputs = [buffer.name for buffer in program.buffers if buffer.lifetime is Lifetime.OUTPUT]
    assert outputs == ["empty", "all_reduce"]


def test_sizes_are_known_to_the_host_without_waiting():
    with fake_world(4):
        graph = make_fx(lambda x: (x * 2).view(-1, 2) + x.shape[0], tracing_mode="symbolic")(X)
    kinds = {task.kind for task in convert(graph.graph, GROUPS).program.tasks}
    assert Kind.HOST not in kinds


@pytest.mark.parametrize(
    ("backend", "expected"), [("gloo", Join.ANY), ("mpi", Join.COPIED), ("", Join.ANY)]
)
def test_only_backends_that_coalesce_are_asked_to(monkeypatch, backend, expected):
    monkeypatch.setattr(torch_api, "backend_of_group", lambda name: backend)
    program = program_of(lambda x: ops.wait_tensor(ops.all_reduce(x, "sum", "0")), X)
    assert only_start(program).work.join is expected
