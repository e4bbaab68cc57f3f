"""Fused gradients and cleaned sharded graphs on real gloo ranks compute what they did before."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.capture.gloo_ranks import Ranks, gloo_ranks
from tests.graph.remote import run_codes
from tests.graph.test_ddp import KIB, step
from tests.graph.test_exchange import sharded as scattering
from undertow.capture.mesh import fake_world
from undertow.graph.batches import batch_collectives
from undertow.graph.ddp import fuse_gradients
from undertow.graph.exchange import scatter_by_exchange
from undertow.graph.flat_gradients import flatten_gradients
from undertow.graph.fsdp import clean_fsdp

pytestmark = pytest.mark.slow
ops = torch.ops._c10d_functional


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with gloo_ranks(request.param) as found:
        yield found


def test_fused_gradients(ranks: Ranks) -> None:
    """Bit for bit on two ranks. Gloo adds up in an order that depends on the place in the tensor,
    so from three ranks on to a tolerance."""
    modules = [step()[0]]
    for form in ("concat", "coalesced"):
        modules.append(copy.deepcopy(modules[0]))
        fuse_gradients(modules[-1], cap_nbytes=9 * KIB, first_nbytes=4 * KIB, form=form)
    modules.append(copy.deepcopy(modules[0]))
    with fake_world(4):
        assert flatten_gradients(modules[-1].graph, ("fake",)) == 1
    modules[-1].recompile()
    job = [module.code for module in modules], [(64, 32), *[(32, 32)] * 6]
    for plain, *fused in ranks.run(run_codes, job):
        for other in fused:
            for a, b in zip(plain, other, strict=True):
                assert a.stride() == b.stride()
                if len(ranks.pipes) == 2:
                    assert torch.equal(a, b)
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def sharded(size: int) -> fx.GraphModule:
    """A gather into a buffer, and the same gradient scattered twice."""

    def function(x: Tensor, shard: Tensor, buffer: Tensor) -> list[Tensor]:
        buffer.copy_(ops.wait_tensor(ops.all_gather_into_tensor(shard, size, "0")))
        y = torch.relu(x @ buffer)
        scattered = [
            ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", size, "0")) for _ in range(2)
        ]
        return [scattered[0] + 1, scattered[1] * 2]

    with fake_world(size):
        inputs = torch.zeros(8, 8), torch.zeros(8 // size, 8), torch.zeros(8, 8)
        return make_fx(function, tracing_mode="fake")(*inputs)


def test_cleaned_sharded_graphs(ranks: Ranks) -> None:
    size = len(ranks.pipes)
    plain = sharded(size)
    cleaned = copy.deepcopy(plain)
    done = clean_fsdp(cleaned)
    assert (done.in_place, done.reductions) == (1, 1)
    job = [plain.code, cleaned.code], [(8, 8), (8 // size, 8), (8, 8)]
    for one, other in ranks.run(run_codes, job):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_exchanged_and_batched_sharded_graphs(ranks: Ranks) -> None:
    """Bit for bit on two ranks; on more the sum has another order."""
    size = len(ranks.pipes)
    plain = scattering(size)
    changed = copy.deepcopy(plain)
    with fake_world(size):
        assert scatter_by_exchange(changed.graph, ("fake",)) == 6
        assert batch_collectives(changed.graph, ("fake",)) > 0
    changed.recompile()
    shapes = [(4, 8), *[(64 // size,), (8 // size,)] * 3]
    for one, other in ranks.run(run_codes, ([plain.code, changed.code], shapes)):
        for a, b in zip(one, other, strict=True):
            if size == 2:
                assert torch.equal(a, b)
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
