"""Gathers from rank to rank give what gloo's own give, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from tests.capture.gloo_ranks import Ranks, gloo_ranks
from undertow.capture.mesh import fake_world
from undertow.runtime.direct import Exchanges, stand_in

ops = torch.ops._c10d_functional


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with gloo_ranks(request.param) as started:
        yield started


def gathered_both_ways(world: int) -> list[bool]:
    """On one rank: whether each result is the same, bit for bit."""
    import torch.distributed as dist

    from undertow.runtime import direct, issue

    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    torch.manual_seed(dist.get_rank())
    turned = torch.randn(6, 4).t()  # not contiguous
    xs = [torch.randn(5, 3), turned, torch.randn(0, 2), torch.randn(7).bfloat16()]
    xs += [torch.randint(0, 9, (3,)), torch.tensor([True, False]), torch.randn(2) + 1j]
    usual = [ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), world, name)) for x in xs]
    alone = [ops.wait_tensor(direct.all_gather_into_tensor(x, world, name)) for x in xs]
    started = direct.all_gather_into_tensor_coalesced(xs, world, name)
    together = [ops.wait_tensor(out) for out in reversed(started)][::-1]
    issued = issue.issue(direct.all_gather_into_tensor_coalesced, xs, world, name)
    assert issued is not None
    outs, work = issued
    work.wait()
    assert work.is_completed()
    same = torch.equal
    return [
        same(a, b) and same(a, c) and same(a, d) and a.dtype == b.dtype and a.shape == b.shape
        for a, b, c, d in zip(usual, alone, together, outs, strict=True)
    ]


@pytest.mark.slow
def test_results_are_those_of_gloo(ranks: Ranks) -> None:
    for same in ranks.run(gathered_both_ways, len(ranks.pipes)):
        assert same == [True] * 7


def gathered_from_a_rank_that_is_gone(_: None) -> str:
    """On the first rank: what its wait says."""
    import os

    import torch.distributed as dist

    from undertow.runtime import direct

    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = torch.ones(1 << 20)
    ops.wait_tensor(direct.all_gather_into_tensor(x, 2, name))
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        ops.wait_tensor(direct.all_gather_into_tensor(x, 2, name))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_wait_of_the_others() -> None:
    with gloo_ranks(2) as started:
        for pipe in started.pipes:
            pipe.send((gathered_from_a_rank_that_is_gone, None))
        first = started.pipes[0]
        assert first.poll(90)
        is_right, said = first.recv()
    assert is_right
    assert "onnection" in said  # closed by its peer, or reset


def test_a_gather_is_done_when_all_its_exchanges_are() -> None:
    class Work:
        def __init__(self, done: bool) -> None:
            self.done, self.waited = done, False

        def is_completed(self) -> bool:
            return self.done

        def wait(self) -> None:
            self.waited = True

    first, second = Work(True), Work(False)
    both = Exchanges([first, second])
    assert not both.is_completed()
    both.wait()
    assert first.waited
    assert second.waited
    assert Exchanges([first]).is_completed()


def test_other_backends_keep_their_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gather = graph.call_function(ops.all_gather_into_tensor.default, (x, 2, "0"))
    assert stand_in(gather) is None  # no job
    with fake_world(2):
        assert stand_in(gather) is None
