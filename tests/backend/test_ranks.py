"""Compiled training on real gloo ranks: losses and gradients are those of one process, and of
PyTorch's own eager implementation."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import (
    Case,
    build,
    on_own_data,
    one_step,
    share_of_data,
)
from undertow.backend import compiled_backward, undertow
from undertow.capture.full_state import full_state_dict
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import Options, parallelize
from undertow.notices import counts

pytestmark = pytest.mark.slow

COMPILING = 280  # seconds for a case: most of it is Dynamo's
TWO = [
    Case("llama", {"dp": 2}, "ddp"),
    Case("llama", {"dp": 2}, "fsdp", {"checkpoint": True}),
    Case("llama", {"tp": 2}, "tp"),
    Case("deepseek_moe", {"ep": 2}, "fsdp+ep"),
    Case("odd", {"dp": 2}, "fsdp"),
    Case("odd", {"dp": 2}, "fsdp", {"reshard_after_forward": False}),
]
FOUR = [
    Case("odd", {"replicate": 2, "shard": 2}, "hsdp"),
    Case("llama", {"dp": 2, "tp": 2}, "fsdp+tp"),
]


def parallelized(case: Case, **settings: Any) -> int:
    """On one rank: two compiled steps against one process on the whole batch."""
    torch._dynamo.reset()
    mesh, options = Mesh(case.mesh), Options(case.parallel, **case.options)
    ways, place = share_of_data(mesh, options)
    whole = build(case.model, 2 * ways)
    model = parallelize(copy.deepcopy(whole.model), mesh, options)
    run = torch.compile(model, backend=undertow, fullgraph=True, options=settings or None)
    mine = on_own_data(whole, Renamed(model, run), place)
    return sum(one_step(whole, mine, mesh, options, ways) for _ in range(2))


class Renamed(nn.Module):
    """Calls the compiled module, and has the parameters of the plain one by their own names."""

    def __init__(self, model: nn.Module, run: Any) -> None:
        super().__init__()
        self.__dict__["model"], self.__dict__["run"] = model, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_compiled_ranks_train_as_one_process(two: Ranks, case: Case) -> None:
    assert min(two.run(parallelized, case, COMPILING)) > 0


def with_aten_calls(case: Case) -> int:
    return parallelized(case, codegen="aten")


def test_compiled_experts_alone_train_as_one_process(two: Ranks) -> None:
    assert min(two.run(with_aten_calls, Case("deepseek_moe", {"ep": 2}, "ep"), COMPILING)) > 0


def with_other_sizes(how: str) -> tuple[float, dict[str, int]]:
    """On one rank: steps on batches of its own length, against one process on all of them. With
    "one rank" only the second rank's change, and it alone compiles again."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    world = dist.get_world_size()
    whole = Net()
    model = parallelize(copy.deepcopy(whole), Mesh({"dp": world}), "fsdp")
    # Unmerged, so that there is a sequence to differ in.
    run = torch.compile(model, backend=undertow, dynamic=False, options={"merge": False})
    for step in range(3):
        more = [step if how == "all ranks" or other == 1 else 0 for other in range(world)]
        batches = [torch.randn(3 + 8 * other + more[other], 16) for other in range(world)]
        train_both(whole, model, run, batches)
    return distance(whole, model), dict(counts)


def train_both(whole: nn.Module, model: nn.Module, run: Any, batches: list[Tensor]) -> None:
    """One step of one process on all batches, and one of this rank on its own."""
    losses = [whole(batch).square().mean() for batch in batches]
    (sum(losses) / len(batches)).backward()
    run(batches[dist.get_rank()]).square().mean().backward()
    for each in (whole, model):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        each.zero_grad()


def distance(whole: nn.Module, model: nn.Module) -> float:
    """How far the parameters of one process and of the ranks are from each other at most."""
    state, wanted = full_state_dict(model), whole.state_dict()
    return max(float((state[key] - wanted[key]).abs().max()) for key in wanted)


@pytest.mark.parametrize("how", ["all ranks", "one rank"])
def test_ranks_with_batches_of_other_sizes_train_together(two: Ranks, how: str) -> None:
    for rank, (far, said) in enumerate(two.run(with_other_sizes, how, COMPILING)):
        assert far < 1e-5
        assert said["graphs"] == (2 if how == "one rank" and rank == 0 else 6)
        assert said.get("followed", 0) >= said["graphs"] - 2  # all, if an earlier case decided


def through_inductor(asked: tuple[Case, Path]) -> int:
    """Solved, and then with the Plans that were saved."""
    case, plans = asked
    found = parallelized(case, codegen="inductor", save=plans)
    dist.barrier()
    assert list(plans.glob("*.plan.json"))
    assert parallelized(case, codegen="inductor", plan=plans) == found
    with pytest.raises(Exception, match="has no plan for"):
        parallelized(replace(case, parallel="ddp"), codegen="inductor", plan=plans)
    assert counts["inductor regions"] > 0
    assert not counts["inductor fallback"]
    return found


def test_the_kernels_of_inductor_run_in_our_order_or_in_that_of_a_plan(
    two: Ranks, tmp_path: Path
) -> None:
    case = Case("odd", {"dp": 2}, "fsdp")
    assert min(two.run(through_inductor, (case, tmp_path), COMPILING)) > 0


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_compiled_ranks_train_as_one_process(four: Ranks, case: Case) -> None:
    assert min(four.run(parallelized, case, COMPILING)) > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def wrapped(how: str) -> nn.Module:
    """The same network, made parallel by PyTorch."""
    torch.manual_seed(0)
    net = Net()
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in net.layers:
            fully_shard(layer)
        return fully_shard(net)
    if how == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net.layers:
            parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return net
    return Gathered(net)


class Gathered(nn.Module):
    """Functional collectives, as a user may write them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional_autograd
        world = dist.get_world_size()
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        started = ops.all_gather_into_tensor(x, world, group)
        y = self.net(torch.ops._c10d_functional.wait_tensor(started))
        started = ops.reduce_scatter_tensor(y, "sum", world, group)
        out: Tensor = torch.ops._c10d_functional.wait_tensor(started)
        return out


def as_pytorch(argument: tuple[str, str]) -> tuple[float, dict[str, int], int]:
    """On one rank: how far three compiled steps are from eager ones; what was said; and how many
    generated modules have collectives."""
    how, show = argument
    torch._dynamo.reset()
    counts.clear()
    python = how == "ddp python reducer"
    kind = how.split()[0]
    eager = wrapped(kind)
    settings = torch._dynamo.config.patch(optimize_ddp="python_reducer") if python else None
    within = compiled_backward(show=show) if python else contextlib.nullcontext()
    far = 0.0
    with settings or contextlib.nullcontext():
        plain = wrapped(kind)
        run = torch.compile(plain, backend=undertow, options={"show": show})
        torch.manual_seed(0 if kind == "dtensor" else dist.get_rank())
        for _ in range(3):
            x = torch.randn(4, 16)
            expected = eager(x).square().mean()
            expected.backward()
            with within if python else contextlib.nullcontext():
                loss = run(x).square().mean()
                loss.backward()
            within = compiled_backward(show=show) if python else within
            far = max(far, float((loss - expected).abs()))
            for mine, theirs in zip(plain.parameters(), eager.parameters(), strict=True):
                far = max(far, float((_local(mine.grad) - _local(theirs.grad)).abs().max()))
            for model in (plain, eager):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()
    starts = re.compile(r"(c10d_functional|direct)_(all_gather|all_reduce|reduce_scatter)\w*\(")
    written = [path for path in Path(show).glob("*.rank0.py") if starts.search(path.read_text())]
    return far, dict(counts), len(written)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@pytest.mark.parametrize("how", ["ddp python reducer", "dtensor", "functional"])
def test_parallelism_of_pytorch_is_scheduled_in_the_graph(
    two: Ranks, tmp_path: Path, how: str
) -> None:
    for far, said, scheduled in two.run(as_pytorch, (how, str(tmp_path)), COMPILING):
        assert far < 1e-6
        assert scheduled > 0
        assert set(said) - {"retimed", "kept times", "yielding threads"} == {
            "graphs"
        }  # nothing fell back


@pytest.mark.parametrize(
    ("how", "name"),
    [("ddp", "ddp outside the graph"), ("fsdp2", "fully_shard outside the graph")],
)
def test_what_is_outside_the_graph_trains_and_is_told(
    two: Ranks, tmp_path: Path, how: str, name: str
) -> None:
    for far, said, scheduled in two.run(as_pytorch, (how, str(tmp_path)), COMPILING):
        assert far < 1e-6
        assert scheduled == 0
        assert said.get(name, 0) > 0


SHARDED = """
import logging, sys, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

logging.basicConfig(level=logging.WARNING)
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
before = [] if sys.argv[1] == "by itself" else sys.argv[1].split(", ")
if "loaded" in before:
    torch.compile(lambda x: x + 1, backend="undertow")(torch.ones(2))
if "reset" in before:
    torch._dynamo.reset()
model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
run = torch.compile(model, backend="undertow") if "compiled" in before else None
for layer in (model[0], model[2], model):
    fully_shard(layer)
run = run or torch.compile(model, backend="undertow")
for _ in range(2):
    run(torch.ones(2, 4)).sum().backward()
from undertow.notices import counts
assert counts["fully_shard outside the graph"] > 0
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", ["by itself", "loaded", "compiled", "loaded, reset"])
def test_fully_shard_is_told_of_whenever_the_backend_was_loaded(
    tmp_path: Path, before: str
) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "UNDERTOW_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", SHARDED, before]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("use undertow.parallelize") == 1
