"""Copied and coalesced buckets on real gloo ranks compute what single collectives do.

Bit for bit where bytes only move and on two ranks; from three ranks on gloo adds numbers up in an
order that depends on their place in the tensor, so that merged reductions are held to a relative
tolerance of 1e-5 and an absolute one of 1e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.capture.gloo_ranks import Ranks, gloo_ranks
from undertow.capture.mesh import fake_world
from undertow.graph import as_inductor_pass, collective_call, convert, rewrite
from undertow.program import Order
from undertow.schedule.buckets import How, bucket_key, merge, propose
from undertow.schedule.limits import Limits

pytestmark = pytest.mark.slow
ops = torch.ops._c10d_functional
wait = ops.wait_tensor
HALF = torch.bfloat16
Step = Callable[[int, Tensor, Tensor], list[Tensor]]


def gathers(ranks: int, x: Tensor, y: Tensor) -> list[Tensor]:
    """Different shapes, dtypes and casts, coalesced and `out=` forms."""
    out = torch.empty(ranks * 8, 3)
    made = [ops.all_gather_into_tensor(z, ranks, "0") for z in (x, y.t(), x.to(HALF), y[:1])]
    made += ops.all_gather_into_tensor_coalesced([x + 1, y * 2], ranks, "0")
    made.append(ops.all_gather_into_tensor_out(x - 1, ranks, "0", out=out))
    return [*(wait(z) for z in made), out + 1]


def exchanges(ranks: int, x: Tensor, y: Tensor) -> list[Tensor]:
    even = [8 // ranks] * ranks
    inputs = x, x.to(HALF), y.view(-1)[:8].double(), (y.view(8, -1) * 9).to(torch.int32)
    return [wait(ops.all_to_all_single(z, even, even, "0")) for z in inputs]


def uneven_exchanges(ranks: int, x: Tensor, y: Tensor) -> list[Tensor]:
    """Each rank sends other amounts, which the others know."""
    sizes = [1, 7] if ranks == 2 else [1, 2, 2, 3]
    rank = int(torch.distributed.get_rank())
    sent = sizes[rank:] + sizes[:rank]
    received = [(sizes[r:] + sizes[:r])[rank] for r in range(ranks)]
    more = [2 * n for n in sent], [2 * n for n in received]
    return [
        wait(ops.all_to_all_single(x, received, sent, "0")),
        wait(ops.all_to_all_single(torch.cat([x, x]).to(HALF), more[1], more[0], "0")),
    ]


def reductions(ranks: int, x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = x * 2, y * 3
    one = [wait(ops.all_reduce(z, "sum", "0")) for z in (x, y.t(), x.sum())]
    two = [wait(ops.all_reduce_(z, "sum", "0")) for z in (a, b)]
    three = [wait(z) for z in ops.all_reduce_coalesced([x + 1, y + 1], "sum", "0")]
    return [*one, *two, *three, a + 1, b + 1]


def scatters(ranks: int, x: Tensor, y: Tensor) -> list[Tensor]:
    out = torch.empty(8 // ranks, 3)
    inputs = x, x.to(HALF).float(), y, y.view(8, -1)
    made = [ops.reduce_scatter_tensor(z, "sum", ranks, "0") for z in inputs]
    made += ops.reduce_scatter_tensor_coalesced([x + 1, y * 2], "sum", ranks, "0")
    made.append(ops.reduce_scatter_tensor_out(x - 1, "sum", ranks, "0", out=out))
    return [*(wait(z) for z in made), out * 2]


STEPS: dict[str, Step] = {
    step.__name__: step for step in (gathers, exchanges, uneven_exchanges, reductions, scatters)
}


def traced(name: str, ranks: int, rank: int = 0) -> fx.GraphModule:
    def step(x: Tensor, y: Tensor):  # type: ignore[no-untyped-def]  # that would come into the code
        return tuple(STEPS[name](ranks, x, y))

    with fake_world(ranks, rank):
        return make_fx(step, tracing_mode="fake")(*inputs(0))


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    return torch.rand(8, 3), torch.rand(4, 6)


def merged(module: fx.GraphModule, ranks: int, how: How) -> fx.GraphModule:
    made = copy.deepcopy(module)
    converted = convert(made.graph, {"0": ("dp", tuple(range(ranks)))})
    program = converted.program
    keys = {s: bucket_key(program, s, how, mixed=True) for s in program.starts}
    buckets = propose(program, {key: 1 << 30 for key in keys.values() if key}, keys)
    assert buckets
    whole = merge(program, buckets, lambda task, _: task)
    rewrite(converted, whole, Order.captured(whole.program))
    made.graph.lint()
    made.recompile()
    return made


def run(job: list[list[str]]) -> list[list[Tensor]]:
    """On one rank: what each of its programs returns."""
    import torch.distributed as dist

    rank = dist.get_rank()
    found = []
    for code in job[rank]:
        names: dict[str, Any] = {"torch": torch, "device": torch.device}
        exec(code, names)
        found.append(list(names["forward"](None, *inputs(rank))))
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with gloo_ranks(request.param) as found:
        yield found


@pytest.mark.parametrize("name", STEPS)
def test_merged_collectives_compute_the_same(ranks: Ranks, name: str) -> None:
    count = len(ranks.pipes)
    hows: list[How] = ["copied"] if "exchanges" in name else ["copied", "coalesced"]
    job = []
    for rank in range(count):  # sizes may differ from rank to rank
        plain = traced(name, count, rank)
        modules = [plain, *(merged(plain, count, how) for how in hows)]
        assert len(calls(modules[1])) < len(calls(plain))
        job.append([module.code for module in modules])
    is_exact = count == 2 or name not in ("reductions", "scatters")
    for plain_results, *others in ranks.run(run, job):
        for found in others:
            for a, b in zip(plain_results, found, strict=True):
                assert a.dtype == b.dtype
                if is_exact:
                    assert torch.equal(a, b)
                else:
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if collective_call(node)]


# -- inside Inductor ------------------------------------------------------------------------------


def mixed_step(x: Tensor, y: Tensor) -> list[Tensor]:
    """Gathers of casts, reductions whose casts can be saved, and all-to-alls, on one rank."""
    first, second = (wait(ops.all_gather_into_tensor(z.to(HALF), 1, "0")) for z in (x, y))
    made = x.t() @ first.float()
    reduced = [wait(ops.all_reduce(z.to(HALF), "sum", "0")) for z in (made, made.sum(0) + 1)]
    arrived = [wait(ops.all_to_all_single(z, [8], [8], "0")) for z in (x, x + 1)]
    return [second * 2, *reduced, *arrived]


def slow_network(node: fx.Node, nbytes: int | None = None) -> float | None:
    return 1e-3 if collective_call(node) else None


def test_inductor_compiles_copied_buckets() -> None:
    """A group of one rank is enough to see that Inductor can lower what is written."""
    import torch._inductor.config as config
    import torch.distributed as dist

    free = Limits(peak_ratio=None, steps=50)
    scheduler = as_inductor_pass("h100x1", estimate=slow_network, limits=free, merge="copied")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        x, y = inputs(0)
        with config.patch(post_grad_custom_post_pass=scheduler, compile_threads=1):
            got = torch.compile(mixed_step)(x, y)
        wanted = mixed_step(x, y)
    finally:
        dist.destroy_process_group()
    assert [bucket.how for bucket in scheduler.plans[0].buckets] == ["copied"] * 3
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
