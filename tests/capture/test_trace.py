"""Traced steps: what goes in and out, where nodes come from, and that they compute the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from undertow.capture.flops import count_flops, node_flops
from undertow.capture.mesh import Mesh
from undertow.capture.models import Example, UserCodeError, load
from undertow.capture.optimizers import OPTIMIZERS
from undertow.capture.parallelize import Options, parallelize
from undertow.capture.trace import CapturedStep, Role, TraceError, trace_step

aten = torch.ops.aten
MODELS = ["llama3-debug", "gpt2-debug", "vit-debug", "deepseek-moe-debug"]


def calls(step: CapturedStep) -> list[Any]:
    return [n for n in step.graph_module.graph.nodes if n.op == "call_function"]


def real_inputs(step: CapturedStep, example: Example) -> list[torch.Tensor]:
    """The values of a real example in the order of the graph's placeholders."""
    by_role: dict[Role, dict[str, torch.Tensor]] = {
        Role.PARAM: dict(example.model.named_parameters()),
        Role.BUFFER: dict(example.model.named_buffers()),
        Role.INPUT: example.named_inputs(),
        Role.TARGET: {str(i): target for i, target in enumerate(example.targets)},
    }
    return [by_role[port.role][port.path] for port in step.placeholders]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_graph_computes_loss_and_gradients_of_the_model(model: str, checkpoint: bool) -> None:
    step = trace_step(load(model, batch=2, seq=16), None, Options("none", checkpoint=checkpoint))
    example = load(model, batch=2, seq=16)()
    loss = example.loss()
    loss.backward()
    results = step.graph_module(*real_inputs(step, example))
    assert step.outputs[0].role is Role.LOSS
    torch.testing.assert_close(results[0], loss.detach())
    parameters = dict(example.model.named_parameters())
    assert [port.path for port in step.outputs[1:]] == list(parameters)
    for port, result in zip(step.outputs[1:], results[1:], strict=True):
        torch.testing.assert_close(result, parameters[port.path].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_with_an_optimizer_the_graph_updates_parameters_in_place(name: str) -> None:
    make = load("gpt2-debug", batch=2, seq=16)
    step = trace_step(make, None, "none", optimizer=name)
    assert [port.role for port in step.outputs] == [Role.LOSS]
    written = {port.path for port in step.placeholders if port.mutated}
    parameters = {port.path for port in step.placeholders if port.role is Role.PARAM}
    states = {port.path for port in step.placeholders if port.role is Role.STATE}
    assert written == parameters | states
    assert len(states) == len(parameters) * len(OPTIMIZERS[name].names)

    example = make()
    inputs = []
    for port in step.placeholders:
        node = next(n for n in step.graph_module.graph.nodes if n.name == port.node)
        if port.role is Role.STATE:
            inputs.append(torch.zeros(node.meta["val"].shape))
        else:
            single = trace_ports(port, example)
            inputs.append(single.detach().clone() if port.role is Role.PARAM else single)
    step.graph_module(*inputs)
    example.loss().backward()
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(
            example.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1
        )
    optimizer.step()
    for port, value in zip(step.placeholders, inputs, strict=True):
        if port.role is Role.PARAM:
            expected = trace_ports(port, example).detach()
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def trace_ports(port: Any, example: Example) -> torch.Tensor:
    if port.role is Role.PARAM:
        return example.model.get_parameter(port.path)
    if port.role is Role.INPUT:
        return example.named_inputs()[port.path]
    target: torch.Tensor = example.targets[int(port.path)]
    return target


def test_nodes_carry_the_module_that_they_came_from_in_both_directions() -> None:
    step = trace_step(load("llama3-debug", seq=16), None, "none")
    products = [n for n in calls(step) if n.target is aten.mm.default]
    found = Counter((n.meta["module"], n.meta["phase"]) for n in products)
    assert found[("layers.1.mlp.down", "forward")] == 1
    assert found[("layers.1.mlp.down", "backward")] == 2
    assert found[("head", "backward")] == 2
    assert all(n.meta["module"] for n in products)


def test_recomputed_nodes_say_so() -> None:
    options = Options("fsdp", checkpoint=True)
    step = trace_step(load("llama3-debug", seq=16), Mesh({"dp": 4}), options)
    again = [n for n in calls(step) if n.meta["phase"] == "recompute"]
    assert {n.meta["module"].split(".")[0] for n in again} == {"layers"}
    plain = trace_step(load("llama3-debug", seq=16), Mesh({"dp": 4}), "fsdp")
    assert step.model_flops == plain.model_flops
    assert count_flops(step.graph_module.graph, ["recompute"]) > 0


@pytest.mark.parametrize("model", ["llama3-debug", "gpt2-debug", "vit-debug"])
def test_attention_stays_one_operation_each_way_with_flops(model: str) -> None:
    step = trace_step(load(model, seq=16), Mesh({"dp": 2}), "fsdp")
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    forward = [n for n in calls(step) if n.target is flash.default]
    backward = [
        n for n in calls(step)
        if n.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ]  # fmt: skip
    assert len(forward) == len(backward) == 2
    assert not any(n.target is aten._softmax.default for n in calls(step))
    for there, back in zip(forward, backward, strict=True):
        assert 2 * node_flops(back) == 5 * node_flops(there) > 0


def test_flops_are_six_per_parameter_and_token_and_those_of_attention() -> None:
    step = trace_step(load("llama3-debug", seq=16), None, "none")
    matrices = sum(
        p.numel() for p in load("llama3-debug", seq=16)().model.parameters() if p.dim() == 2
    )
    embedding, pairs = 512 * 64, 16 * 17 // 2
    attention = 2 * (4 + 8) * pairs * 64  # layers, (forward + backward), causal pairs, width
    assert step.model_flops == 6 * (matrices - embedding) * 16 + attention


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((10, 4), (3, 4, 5), 2 * 10 * 4 * 5),  # forward: rows shared out among 3 experts
        ((4, 10), (10, 5), 2 * 4 * 10 * 5),  # gradient of the weights: the sum shared out
        ((3, 2, 4), (3, 4, 5), 2 * 3 * 2 * 4 * 5),
    ],
)
def test_grouped_products_have_flops(
    left: tuple[int, ...], right: tuple[int, ...], flops: int
) -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(aten._grouped_mm.default, (a, b))
    a.meta["val"], b.meta["val"] = torch.empty(left), torch.empty(right)
    product.meta["val"] = None
    assert node_flops(product) == flops


def test_counts_are_those_of_the_whole_job() -> None:
    mesh = Mesh({"dp": 4, "tp": 2})
    step = trace_step(load("llama3-debug", batch=3, seq=16), mesh, "fsdp+tp")
    assert step.parameters == 164_160
    assert step.samples == 3 * 4
    assert step.tokens == 3 * 4 * 16
    assert {group.dims for group in step.groups.values()} == {("dp",), ("tp",)}


def test_every_node_has_a_value_and_no_dead_code_is_left() -> None:
    step = trace_step(load("deepseek-moe-debug", seq=16), Mesh({"dp": 2, "ep": 2}), "fsdp+ep")
    for node in step.graph_module.graph.nodes:
        if node.op == "output":
            continue
        assert "val" in node.meta
        assert node.users or node.op == "placeholder", node.name
        assert node.target not in (aten.detach.default, aten.alias.default)


def test_values_do_not_hold_the_autograd_graph() -> None:
    step = trace_step(load("llama3-debug", seq=16), None, "none")
    values = [n.meta["val"] for n in calls(step) if isinstance(n.meta["val"], torch.Tensor)]
    assert not any(value.requires_grad for value in values)


def test_steps_of_several_worlds_in_one_process_do_not_disturb_each_other() -> None:
    make = load("llama3-debug", seq=16)
    first = trace_step(make, Mesh({"dp": 4, "tp": 2}), "fsdp+tp")
    trace_step(make, Mesh({"dp": 512, "tp": 2}), "fsdp+tp")
    again = trace_step(make, Mesh({"dp": 4, "tp": 2}), "fsdp+tp")
    assert first.graph_module.code == again.graph_module.code
    assert first.groups == again.groups
    assert not dist.is_initialized()


def test_progress_counts_layers_forward_and_backward() -> None:
    heard: list[tuple[str, int, int]] = []
    trace_step(
        load("llama3-debug", seq=16), None, "none", progress=lambda *event: heard.append(event)
    )
    assert [event for event in heard if event[0] == "tracing"] == [
        ("tracing", done, 4) for done in (1, 2, 3, 4)
    ]
    assert heard[0][0] == "building"


def test_ctrl_c_leaves_nothing_behind() -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "tracing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_step(load("llama3-debug", seq=16), Mesh({"dp": 8}), "fsdp", progress=interrupt)
    assert not dist.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
    trace_step(load("llama3-debug", seq=16), Mesh({"dp": 4}), "fsdp")


class Peeking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if y.sum().item() > 0 else -y


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(7, 7)


def test_a_model_that_looks_at_values_is_refused_with_the_reason() -> None:
    with pytest.raises(TraceError, match=r"depends on values.*test_trace\.py:\d+"):
        trace_step(lambda: Example(Peeking(), torch.ones(1, 2), torch.sum))


def test_a_model_that_fails_shows_its_own_traceback() -> None:
    with pytest.raises(UserCodeError, match="forward of mine failed") as caught:
        trace_step(lambda: Example(Broken(), torch.ones(2, 2), torch.sum, name="mine"))
    assert "x @ torch.ones(7, 7)" in caught.value.traceback
    assert "undertow/capture" not in caught.value.traceback


def test_a_loss_without_trained_parameters_is_refused() -> None:
    with pytest.raises(TraceError, match="does not depend"):
        trace_step(lambda: Example(nn.ReLU(), torch.ones(2), torch.sum))


def test_an_unknown_optimizer_suggests_the_nearest() -> None:
    with pytest.raises(TraceError, match="did you mean 'adamw'"):
        trace_step(load("llama3-debug"), optimizer="adam")


def test_tensors_that_nobody_declared_become_inputs_or_constants() -> None:
    outside = torch.full((2,), 3.0)

    def make() -> Example:
        hidden = torch.ones(2)  # a fake tensor that no module owns
        return Example(nn.Linear(2, 2), torch.ones(1, 2), lambda y: (y * outside + hidden).sum())

    step = trace_step(make)
    assert [port.role for port in step.placeholders].count(Role.CONSTANT) == 1
    assert [tuple(t.shape) for t in step.graph_module.buffers()] == [(2,)]


def test_the_same_module_is_not_parallelised_twice() -> None:
    from undertow.capture.mesh import MeshError, fake_world

    with fake_world(2):
        model = parallelize(nn.Linear(2, 2), Mesh({"dp": 2}), "ddp")
        with pytest.raises(MeshError, match="already"):
            parallelize(model, Mesh({"dp": 2}), "ddp")


@pytest.mark.parametrize(
    ("model", "mesh", "parallel", "reason"),
    [
        ("llama3-debug", {"dp": 4}, "fdsp", "did you mean 'fsdp'"),
        ("llama3-debug", {"dp": 4}, "tp", "does not use dimension 'dp'"),
        ("llama3-debug", {"tp": 4}, "fsdp+tp", "needs a mesh with a dimension 'dp'"),
        ("llama3-debug", {"tp": 8}, "tp", "4 heads of layers.0.attention.wk"),
        ("llama3-debug", {"ep": 2}, "ep", "found no experts"),
        ("deepseek-moe-debug", {"ep": 3}, "ep", "8 experts"),
        ("deepseek-moe-debug", {"tp": 2}, "tp", "no tensor parallel plan"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    model: str, mesh: dict[str, int], parallel: str, reason: str
) -> None:
    from undertow.capture.mesh import MeshError

    with pytest.raises(MeshError, match=reason):
        trace_step(load(model, seq=16), Mesh(mesh), parallel)
