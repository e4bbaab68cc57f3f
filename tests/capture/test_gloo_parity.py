"""Parallelised modules on real gloo ranks: loss and gradients equal those of one process."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.capture.gloo_ranks import Ranks
from undertow.capture.mesh import Mesh
from undertow.capture.models import Example
from undertow.capture.parallelize import Options, data_dimensions, parallelize
from undertow.capture.trace import Role, trace_step

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """One comparison: which model, on which mesh, parallelised how."""

    model: str
    mesh: dict[str, int]
    parallel: str
    options: dict[str, Any] = field(default_factory=dict)
    device_mesh: bool = False  # torch's DeviceMesh in place of ours

    def __str__(self) -> str:
        how = "-".join(f"{key}={value}" for key, value in self.options.items())
        whose = "-device_mesh" if self.device_mesh else ""
        return f"{self.model}-{self.parallel}-{Mesh(self.mesh)}-{how}{whose}"


KEEP, AGAIN = {"reshard_after_forward": False}, {"reshard_after_forward": True}
CHECKPOINT = {"checkpoint": True}

TWO = [
    Case("llama", {"dp": 2}, "ddp"),
    Case("llama", {"dp": 2}, "ddp", CHECKPOINT),
    Case("llama", {"dp": 2}, "fsdp", AGAIN),
    Case("llama", {"dp": 2}, "fsdp", KEEP),
    Case("llama", {"dp": 2}, "fsdp", AGAIN | CHECKPOINT),
    Case("llama", {"dp": 2}, "fsdp", KEEP | CHECKPOINT),
    Case("llama", {"tp": 2}, "tp"),
    Case("llama", {"tp": 2}, "tp", CHECKPOINT),
    Case("gpt2", {"tp": 2}, "tp"),
    Case("gpt2", {"dp": 2}, "fsdp"),
    Case("vit", {"dp": 2}, "fsdp"),
    Case("vit", {"tp": 2}, "tp"),
    Case("deepseek_moe", {"ep": 2}, "ep"),
    Case("deepseek_moe", {"ep": 2}, "fsdp+ep", CHECKPOINT),
    Case("odd", {"dp": 2}, "fsdp"),
    Case("qwen3", {"tp": 2}, "tp"),
]
FOUR = [
    Case("llama", {"dp": 4}, "ddp"),
    Case("llama", {"dp": 4}, "fsdp"),
    Case("llama", {"replicate": 2, "shard": 2}, "hsdp"),
    Case("llama", {"replicate": 2, "shard": 2}, "hsdp", KEEP | CHECKPOINT),
    Case("llama", {"tp": 4}, "tp"),
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp", CHECKPOINT),
    Case("llama", {"dp": 2, "tp": 2}, "ddp+tp"),
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp", device_mesh=True),
    Case("gpt2", {"dp": 2, "tp": 2}, "fsdp+tp"),
    Case("deepseek_moe", {"dp": 2, "ep": 2}, "fsdp+ep"),
    Case("deepseek_moe", {"dp": 2, "ep": 2}, "ddp+ep"),
    Case("deepseek_moe", {"dp": 1, "ep": 4}, "ep"),
    Case("odd", {"dp": 4}, "fsdp"),
    Case("odd", {"dp": 4}, "fsdp", CHECKPOINT),
]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a frozen weight, and one parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 5)
        self.last.weight = self.layers[2].weight
        self.scale = nn.Parameter(torch.ones(1))
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        out: torch.Tensor = self.last(x)
        return out


def build(name: str, batch: int) -> Example:
    torch.manual_seed(1)
    if name == "odd":
        return Example(Odd(), torch.randn(batch, 7), lambda y: y.square().mean())
    if name == "qwen3":
        return _qwen3(batch)
    import importlib

    module = importlib.import_module(f"undertow.examples.{name}")
    config = module.SIZES["debug"]
    if name == "deepseek_moe":
        config = replace(config, capacity_factor=100.0)  # no token is turned away
    model = module.build(config)
    inputs, targets = module.example_inputs(model, batch, 16)
    return Example(model, inputs, module.loss_fn, targets)


def _qwen3(batch: int) -> Example:
    import transformers

    from undertow.capture.huggingface import _token_loss

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    tokens = torch.randint(64, (batch, 16))
    return Example(model, {"input_ids": tokens}, _token_loss, (tokens.clone(),))


def part(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:stop]
    if isinstance(value, dict):
        return {key: part(item, start, stop) for key, item in value.items()}
    return tuple(part(item, start, stop) for item in value)


def share_of_data(mesh: Mesh, options: Options) -> tuple[int, int]:
    """In how many parts the data is, and which of them is this rank's."""
    import torch.distributed as dist

    ways, place = 1, 0
    for name, size in mesh.dims.items():
        if name in data_dimensions(options):
            ways, place = ways * size, place * size + mesh.coordinate(dist.get_rank())[name]
    return ways, place


def on_own_data(whole: Example, model: Any, place: int) -> Example:
    """A model on this rank's two samples."""
    return replace(
        whole,
        model=model,
        inputs=part(whole.inputs, 2 * place, 2 * place + 2),
        targets=part(whole.targets, 2 * place, 2 * place + 2),
    )


def compare(case: Case) -> int:
    """On one rank: two steps, parallel and alone; the number of gradients that were compared."""
    mesh, options = Mesh(case.mesh), Options(case.parallel, **case.options)
    ways, place = share_of_data(mesh, options)
    whole = build(case.model, 2 * ways)
    given: Mesh | DeviceMesh = mesh
    if case.device_mesh:
        names = tuple(mesh.dims)
        given = init_device_mesh("cpu", tuple(mesh.dims.values()), mesh_dim_names=names)
    model = parallelize(copy.deepcopy(whole.model), given, options)
    mine = on_own_data(whole, model, place)
    compared = 0
    for _ in range(2):
        compared += one_step(whole, mine, mesh, options, ways)
    return compared


def one_step(whole: Example, mine: Example, mesh: Mesh, options: Options, ways: int) -> int:
    import torch.distributed as dist

    expected = whole.loss()
    expected.backward()
    loss = mine.loss()
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(
        mean / dist.get_world_size(), expected.detach(), rtol=2e-6, atol=1e-6
    )
    wanted = as_pieces(whole.model, mesh, options)
    compared = 0
    for path, parameter in mine.model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, path
        torch.testing.assert_close(
            parameter.grad, wanted[path], rtol=2e-5, atol=2e-6, msg=lambda m, p=path: f"{p}: {m}"
        )
        compared += 1
    for model in (whole.model, mine.model):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.zero_grad()
    return compared


def as_pieces(model: nn.Module, mesh: Mesh, options: Options) -> dict[str, torch.Tensor]:
    """The gradients of the whole, cut as parameters are: a copy that has them as its weights."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for held, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            held.copy_(torch.zeros_like(held) if parameter.grad is None else parameter.grad)
    parallelize(holder, mesh, options)
    return {path: parameter.detach() for path, parameter in holder.named_parameters()}


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_compute_what_one_process_computes(two: Ranks, case: Case) -> None:
    if case.model == "qwen3":
        pytest.importorskip("transformers")
    assert min(two.run(compare, case)) > 0


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_compute_what_one_process_computes(four: Ranks, case: Case) -> None:
    assert min(four.run(compare, case)) > 0


def mixed_precision(parallel: str) -> tuple[float, set[torch.dtype]]:
    """On one rank: how far bf16 gradients are from fp32 ones, and their dtypes."""
    import torch.distributed as dist

    grads = []
    for options in (
        Options(parallel),
        Options(parallel, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ):
        example = build("llama", 2)
        parallelize(example.model, Mesh({"dp": dist.get_world_size()}), options)
        example.loss().backward()
        pieces = [parameter.grad for parameter in example.model.parameters()]
        grads.append([piece for piece in pieces if piece is not None])
    exact, rough = (torch.cat([piece.flatten() for piece in pieces]) for pieces in grads)
    return float((exact - rough).norm() / exact.norm()), {piece.dtype for piece in grads[1]}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_bf16_compute_gives_fp32_gradients_near_the_exact_ones(two: Ranks, parallel: str) -> None:
    for error, dtypes in two.run(mixed_precision, parallel):
        assert 0 < error < 0.02
        assert dtypes == {torch.float32}


def run_graph(argument: tuple[bytes, Options, list[tuple[Role, str]]]) -> list[torch.Tensor]:
    """On one rank: a graph that was traced elsewhere, on this rank's pieces."""
    import torch.distributed as dist

    code, options, ports = argument
    example = build("llama", 2)
    parallelize(example.model, Mesh({"dp": dist.get_world_size()}), options)
    values: dict[tuple[Role, str], torch.Tensor] = {
        (Role.INPUT, "0"): example.named_inputs()["0"],
        (Role.TARGET, "0"): example.targets[0],
        **{(Role.PARAM, path): p.detach() for path, p in example.model.named_parameters()},
    }
    results = pickle.loads(code)(*[values[port] for port in ports])
    example.loss().backward()
    wanted = [parameter.grad for parameter in example.model.parameters()]
    for result, grad in zip(results[1:], wanted, strict=True):
        torch.testing.assert_close(result / dist.get_world_size(), grad, rtol=1e-5, atol=1e-7)
    return [results[0]]


@pytest.mark.parametrize("options", [AGAIN, KEEP, CHECKPOINT], ids=str)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_traced_graph_computes_on_real_ranks_what_the_module_does(
    two: Ranks, parallel: str, options: dict[str, Any]
) -> None:
    chosen = Options(parallel, **options)
    step = trace_step(lambda: build("llama", 2), Mesh({"dp": 2}), chosen)
    for node in step.graph_module.graph.nodes:  # gloo cannot average: the sum is divided later
        node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)
        node.meta.clear()
    step.graph_module.recompile()
    ports = [(port.role, port.path) for port in step.placeholders]
    two.run(run_graph, (pickle.dumps(step.graph_module), chosen, ports))
