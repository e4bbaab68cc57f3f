"""Scheduled graphs on real gloo ranks compute what they computed before, bit for bit.

One exception is gloo's own: it flattens the tensors of a coalesced all-reduce into one, and from
three ranks on the place of a number in that one decides in which order it is added up.
"""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import build
from undertow.capture.mesh import Mesh, bind
from undertow.capture.parallelize import Options
from undertow.capture.trace import CapturedStep, trace_step
from undertow.graph import collective_call
from undertow.graph.nodes import tensor_nbytes, tensors_of
from undertow.graph.schedule_graph import schedule_graph
from undertow.program import CollectiveKind
from undertow.schedule.limits import Limits

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A step to be traced, scheduled and run on real ranks."""

    model: str
    mesh: dict[str, int]
    parallel: str
    optimizer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [str(value) for value in (self.optimizer, *self.options) if value]
        return "-".join([self.model, self.parallel, str(Mesh(self.mesh)), *more])


TWO = [
    Case("llama", {"dp": 2}, "ddp"),
    Case("llama", {"dp": 2}, "fsdp"),
    Case("llama", {"dp": 2}, "fsdp", "adamw", {"checkpoint": True}),
    Case("llama", {"tp": 2}, "tp"),
    Case("deepseek_moe", {"ep": 2}, "ep"),
]
FOUR = [
    Case("llama", {"dp": 4}, "ddp", "adamw"),
    Case("llama", {"dp": 4}, "fsdp"),
    Case("llama", {"replicate": 2, "shard": 2}, "hsdp"),
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
    Case("deepseek_moe", {"dp": 2, "ep": 2}, "fsdp+ep"),
]


@dataclass(frozen=True)
class Job:
    """What a rank is sent: the modules to compare, what goes in, and which groups they use."""

    modules: list[bytes]
    inputs: list[tuple[torch.Size, torch.dtype]]
    mesh: dict[str, int]
    groups: dict[str, tuple[str, ...]]  # name in the graph -> dimensions of the mesh


def estimate(node: fx.Node, nbytes: int | None = None) -> float:
    """A slow network, so that there is much to hide and to merge."""
    call = collective_call(node)
    if call is None:
        return 20e-6 + 1e-9 * sum(map(tensor_nbytes, tensors_of(node)))
    return 1e-3 + 1e-9 * (nbytes or call.work.nbytes or 0)


def captured(case: Case) -> CapturedStep:
    step = trace_step(
        lambda: build(case.model, 2),
        Mesh(case.mesh),
        Options(case.parallel, **case.options),
        optimizer=case.optimizer,
    )
    for node in step.graph_module.graph.nodes:  # gloo cannot average
        node.args = tuple("sum" if arg == "avg" else arg for arg in node.args)
    return step


def sent(module: fx.GraphModule) -> bytes:
    """A module without its fake values, which cannot be pickled."""
    bare = copy.deepcopy(module)
    for node in bare.graph.nodes:
        node.meta.clear()
    bare.recompile()
    return pickle.dumps(bare)


def run_job(job: Job) -> list[list[Tensor]]:
    """On one rank: what each module returns, and its inputs afterwards."""
    import torch.distributed as dist

    bound = bind(Mesh(job.mesh))
    names = {}
    for name, dims in job.groups.items():
        group = bound.group(*dims)
        assert group is not None
        names[name] = group.name
    found = []
    for code in job.modules:
        module = pickle.loads(code)
        for node in module.graph.nodes:
            if is_functional_collective(node):
                node.args = tuple(names.get(a, a) if isinstance(a, str) else a for a in node.args)
        module.recompile()
        torch.manual_seed(dist.get_rank())
        inputs = [made(shape, dtype) for shape, dtype in job.inputs]
        results = torch.utils._pytree.tree_leaves(module(*inputs))
        found.append([x for x in results if isinstance(x, Tensor)] + inputs)
    return found


def is_functional_collective(node: fx.Node) -> bool:
    return str(getattr(node.target, "namespace", "")) == "_c10d_functional"


def made(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype) * 0.1
    return torch.randint(4, shape).to(dtype)


def reductions_merged(module: fx.GraphModule) -> bool:
    calls = [collective_call(node) for node in module.graph.nodes]
    return any(
        call.work.kind is CollectiveKind.ALL_REDUCE and len(call.read) > 1 for call in calls if call
    )


def compare(ranks: Ranks, case: Case) -> None:
    step = captured(case)
    groups = {g.name: ("-".join(g.dims), g.ranks) for g in step.groups.values()}
    modules, plans = [step.graph_module], []
    for merge in (False, True):
        module, plan = schedule_graph(
            copy.deepcopy(step.graph_module),
            cluster="h100x4",
            estimate=estimate,
            limits=Limits(peak_ratio=None, steps=2000),
            merge=merge,
            split=False,  # that changes how sums are added up: see test_split_gloo.py
            groups=groups,
        )
        modules.append(module)
        plans.append(plan)
    assert plans[0].planned.total_ns < plans[0].captured.total_ns
    places = [node for node in step.graph_module.graph.nodes if node.op == "placeholder"]
    job = Job(
        [sent(module) for module in modules],
        [(node.meta["val"].shape, node.meta["val"].dtype) for node in places],
        case.mesh,
        {group.name: group.dims for group in step.groups.values()},
    )
    is_exact = len(ranks.pipes) == 2 or not reductions_merged(modules[2])
    for plain, ordered, merged in ranks.run(run_job, job):
        assert all(x.isfinite().all() for x in plain)
        assert all(torch.equal(a, b) for a, b in zip(plain, ordered, strict=True))
        for a, b in zip(plain, merged, strict=True):
            if is_exact:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if case.parallel in ("ddp", "fsdp", "hsdp"):
        assert plans[1].buckets


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_compute_the_same_scheduled_and_not(two: Ranks, case: Case) -> None:
    compare(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_compute_the_same_scheduled_and_not(four: Ranks, case: Case) -> None:
    compare(four, case)


def coalesced_and_alone(_: None) -> list[tuple[str, bool]]:
    """On one rank: whether coalesced collectives give what single ones do, bit for bit."""
    import torch.distributed as dist

    ops, size = torch.ops._c10d_functional, dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(16, 8), torch.randn(8, 16).t(), torch.randn(400, 4)]
    kinds = {
        "all_gather_into_tensor": (size, "0"),
        "reduce_scatter_tensor": ("sum", size, "0"),
        "all_reduce": ("sum", "0"),
    }
    found = []
    for name, more in kinds.items():
        alone = [ops.wait_tensor(getattr(ops, name)(x, *more)) for x in inputs]
        together = [ops.wait_tensor(x) for x in getattr(ops, name + "_coalesced")(inputs, *more)]
        same = all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a, b)
        found.append((name, same))
    return found


def test_gloo_coalesces_bit_for_bit(two: Ranks, four: Ranks) -> None:
    exact = [("all_gather_into_tensor", True), ("reduce_scatter_tensor", True)]
    for ranks in (two, four):
        for found in ranks.run(coalesced_and_alone, None):
            assert found[:2] == exact
            if ranks is two:
                assert found[2] == ("all_reduce", True)


# -- inside Inductor ------------------------------------------------------------------------------


def layers(x: Tensor, weights: list[Tensor], ranks: int) -> Tensor:
    """Local work, then layers whose weight is gathered before its use, then a reduction."""
    ops = torch.ops._c10d_functional
    for _ in range(3):
        x = torch.tanh(x @ x.t() @ x)
    for weight in weights:
        whole = ops.wait_tensor(ops.all_gather_into_tensor(weight, ranks, "0"))
        x = torch.relu(x @ whole) + x
    return ops.wait_tensor(ops.all_reduce(x.square().mean(0), "sum", "0"))


def balanced(node: fx.Node, nbytes: int | None = None) -> float:
    """A collective takes a little longer than a layer's matmul, and merging gains nothing."""
    call = collective_call(node)
    if call is None:
        return 100e-6 if node.target is torch.ops.aten.mm.default else 1e-6
    return 120e-6 * (nbytes or 1) / (call.work.nbytes or 1) if nbytes else 120e-6


def compile_with_inductor(argument: tuple[Any, bool]) -> dict[str, Any]:
    """On one rank: the same step eager and compiled with our pass; what was planned and made."""
    import torch.distributed as dist
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    from undertow.graph import as_inductor_pass

    cost, pinned = argument
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    weights = [torch.randn(32 // ranks, 32) / 8 for _ in range(6)]
    x = torch.randn(64, 32)
    limits = Limits(peak_ratio=None)
    scheduler = as_inductor_pass(f"h100x{ranks}", estimate=cost, limits=limits, pin=pinned)
    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=scheduler):
        got, code = run_and_get_code(torch.compile(layers, fullgraph=True), x, weights, ranks)
    torch.testing.assert_close(got, layers(x, weights, ranks))
    (plan,) = scheduler.plans
    return {"plan": plan.to_json(), "calls": [m[1] for m in _CALLS.finditer(code[0])]}


_CALLS = re.compile(
    r"(?:_c10d_functional|extern_kernels)\.(\w+?)(?:_into_tensor)?(?:_coalesced)?(?:_)?"
    r"(?:\.default|\.out)?\("
)


def planned_calls(plan: dict[str, Any]) -> list[str]:
    """The collectives, waits and matmuls of a plan, in its order."""
    kinds = ("all_gather", "all_reduce", "wait_tensor", "mm")
    return [kind for name in plan["order"] for kind in kinds if name.startswith(kind)]


@pytest.mark.parametrize("cost", [estimate, balanced])
def test_inductor_compiles_our_schedule_and_keeps_it(two: Ranks, cost: Any) -> None:
    results = two.run(compile_with_inductor, (cost, True))
    assert results[0] == results[1]  # every rank decided the same
    plan, calls = results[0]["plan"], results[0]["calls"]
    assert plan["planned"]["total_ns"] < plan["captured"]["total_ns"]
    assert bool(plan["buckets"]) == (cost is estimate)
    assert calls == planned_calls(plan)
    first = calls.index("wait_tensor")
    assert "mm" in calls[calls.index("all_gather") : first]


def test_inductor_compiles_our_schedule_without_pins(two: Ranks) -> None:
    results = two.run(compile_with_inductor, (balanced, False))
    assert sorted(results[0]["calls"]) == sorted(planned_calls(results[0]["plan"]))
