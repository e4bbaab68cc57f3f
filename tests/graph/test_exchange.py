"""Reduce-scatters as exchanges: half the bytes, the same sums; and fewer calls for small ones."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.capture.mesh import fake_world
from undertow.graph import collective_call, convert
from undertow.graph.batches import batch_collectives
from undertow.graph.exchange import scatter_by_exchange
from undertow.program import CollectiveKind, Order, verify

ops = torch.ops._c10d_functional
FAKE = ("fake",)


def sharded(size: int, layers: int = 3, width: int = 8) -> fx.GraphModule:
    """Weights and small offsets are gathered layer by layer; what comes of them is scattered."""

    def function(x: Tensor, *shards: Tensor) -> list[Tensor]:
        scattered = []
        for weight, offset in zip(shards[::2], shards[1::2], strict=True):
            whole = ops.wait_tensor(ops.all_gather_into_tensor(weight, size, "0"))
            more = ops.wait_tensor(ops.all_gather_into_tensor(offset, size, "0"))
            x = torch.relu(x @ whole.view(width, width) + more)
            for grad in (x.t() @ x, x.sum(0)):
                part = ops.reduce_scatter_tensor(grad.reshape(-1), "sum", size, "0")
                scattered.append(ops.wait_tensor(part) / size)
        return scattered

    shapes = [(4, width), *[(width * width // size,), (width // size,)] * layers]
    with fake_world(size):
        inputs = [torch.zeros(shape) for shape in shapes]
        return make_fx(function, tracing_mode="fake")(*inputs)


def kinds(module: fx.GraphModule) -> list[CollectiveKind]:
    found = (collective_call(node) for node in module.graph.nodes)
    return [call.work.kind for call in found if call is not None]


def check(module: fx.GraphModule) -> None:
    module.graph.lint()
    module.recompile()
    program = convert(module.graph).program
    assert not verify(program, Order.captured(program))


def test_every_scatter_becomes_an_exchange_and_a_sum() -> None:
    for size in (2, 4):
        module = sharded(size)
        with fake_world(size):
            assert scatter_by_exchange(module.graph, FAKE) == 6
        check(module)
        assert CollectiveKind.REDUCE_SCATTER not in kinds(module)
        assert kinds(module).count(CollectiveKind.ALL_TO_ALL) == 6
        adds = [
            n for n in module.graph.nodes if "add" in str(n.target) and "undertow" not in n.name
        ]
        assert len(adds) == 3 + 6 * (size - 1)


def test_other_backends_and_other_reductions_keep_theirs() -> None:
    module = sharded(2)
    with fake_world(2):
        assert scatter_by_exchange(module.graph) == 0

    def function(x: Tensor) -> Tensor:
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, "max", 2, "0"))

    with fake_world(2):
        module = make_fx(function, tracing_mode="fake")(torch.zeros(8))
        assert scatter_by_exchange(module.graph, FAKE) == 0


def test_gathers_and_small_exchanges_are_batched() -> None:
    module = sharded(2)
    with fake_world(2):
        scatter_by_exchange(module.graph, FAKE)
        assert batch_collectives(module.graph, FAKE) > 0
    check(module)
    assert kinds(module).count(CollectiveKind.ALL_GATHER) == 1
    assert kinds(module).count(CollectiveKind.ALL_TO_ALL) == 1


def test_where_ranks_gather_directly_only_small_gathers_are_batched() -> None:
    module = sharded(2, width=256)
    with fake_world(2):
        assert batch_collectives(module.graph, FAKE, direct=True) == 2
    check(module)
    assert kinds(module).count(CollectiveKind.ALL_GATHER) == 3 + 1
    names = [str(node.target) for node in module.graph.nodes]
    assert not any("coalesced" in name for name in names)
