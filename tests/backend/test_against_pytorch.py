"""`parallelize` and the backend against PyTorch's own eager implementations: losses, gradients and
the parameters after two steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import share_of_data
from undertow.backend import undertow
from undertow.capture.full_state import full_state_dict
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import Options, parallelize
from undertow.capture.parallelize_tensor import Region, TensorPlan
from undertow.notices import counts

pytestmark = pytest.mark.slow

Full = dict[str, Tensor]
COMPILING = 280  # seconds for a case: most of it is Dynamo's
ROWS = 4  # of a rank's batch
PLAN = TensorPlan("of the test", (Region("mlp", ("up",), ("down",)),))
TWO = {"ddp": {"dp": 2}, "fsdp": {"dp": 2}, "tp": {"tp": 2}}
FOUR = {"hsdp": {"replicate": 2, "shard": 2}, "fsdp+tp": {"dp": 2, "tp": 2}}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(16, 32))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("down", nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def by_pytorch(net: Net, how: str, mesh: DeviceMesh) -> nn.Module:
    """The same network, made parallel by PyTorch."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if "tp" in how:
        for layer in net.layers:
            styles = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], styles)
    if "fsdp" in how or how == "hsdp":
        sharded = mesh if how == "hsdp" else mesh["dp"]  # of two dimensions: replicate, shard
        for layer in net.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(net, mesh=sharded)
    return net


def pytorchs(model: nn.Module) -> tuple[Full, Full]:
    """Whole gradients and parameters of a model that PyTorch made parallel."""
    found: tuple[Full, Full] = {}, {}
    for name, parameter in model.named_parameters():
        for whole, tensor in zip(found, (parameter.grad, parameter.detach()), strict=True):
            assert tensor is not None, name
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[name.removeprefix("module.")] = full.clone()
    return found


def ours(model: nn.Module) -> tuple[Full, Full]:
    """Those of a model that `parallelize` did: gradients are gathered as parameters are."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for held, parameter in zip(holder.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            held.copy_(parameter.grad)
    return full_state_dict(holder), full_state_dict(model)


def both(asked: tuple[str, dict[str, int]]) -> tuple[int, dict[str, int]]:
    """On one rank: two compiled steps beside two of PyTorch's; how many tensors were compared, and
    what was said."""
    how, dims = asked
    torch._dynamo.reset()
    counts.clear()
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    options = Options(how, tensor_plan=PLAN if "tp" in how else None)
    eager = by_pytorch(copy.deepcopy(net), how, mesh)
    model = parallelize(net, Mesh(dims), options)
    run = torch.compile(model, backend=undertow, fullgraph=True, options={"codegen": "aten"})
    ways, place = share_of_data(Mesh(dims), options)
    compared = 0
    for _ in range(2):
        x = torch.randn(ways * ROWS, 16)[place * ROWS : (place + 1) * ROWS]
        expected, loss = (each(x).square().mean() for each in (eager, run))
        torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-6)
        expected.backward()
        loss.backward()
        for each in (eager, model):
            torch.optim.SGD(each.parameters(), lr=0.5).step()
        for mine, wanted in zip(ours(model), pytorchs(eager), strict=True):
            assert mine.keys() == wanted.keys()
            for name, tensor in wanted.items():
                torch.testing.assert_close(
                    mine[name], tensor, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
            compared += len(wanted)
        for each in (eager, model):
            each.zero_grad()
    return compared, dict(counts)


def check(answers: list[tuple[int, dict[str, int]]]) -> None:
    for compared, said in answers:
        assert compared == 2 * 2 * 14  # gradients and parameters of two steps
        assert said["graphs"] == 2  # forward and backward, each in one piece


@pytest.mark.parametrize("how", TWO)
def test_two_compiled_ranks_train_as_pytorchs_own(two: Ranks, how: str) -> None:
    check(two.run(both, (how, TWO[how]), COMPILING))


@pytest.mark.parametrize("how", FOUR)
def test_four_compiled_ranks_train_as_pytorchs_own(four: Ranks, how: str) -> None:
    check(four.run(both, (how, FOUR[how]), COMPILING))
