"""Gathers and exchanges from rank to rank give what gloo's own give, on real ranks."""

from __future__ import annotations

import threading
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


def exchanged_both_ways(world: int) -> list[bool]:
    """On one rank: whether each result is the same, bit for bit; parts of different sizes, some of
    them empty, many at once."""
    import torch.distributed as dist

    from undertow.runtime import direct, issue

    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    rank = dist.get_rank()
    torch.manual_seed(rank)
    found = []
    for dtype, times in ((torch.float32, 1), (torch.bfloat16, 3), (torch.int64, 100_000)):
        sent = [(rank + 2 * to) % 3 * times for to in range(world)]
        received = [(source + 2 * rank) % 3 * times for source in range(world)]
        x = torch.randint(0, 99, (sum(sent), 2)).to(dtype)
        usual = ops.wait_tensor(ops.all_to_all_single(x, received, sent, name))
        started = [direct.all_to_all_single(x + k, received, sent, name) for k in range(3)]
        issued = issue.issue(direct.all_to_all_single, x, received, sent, name)
        assert issued is not None
        issued[1].wait()
        found.append(torch.equal(usual, issued[0]))
        for k in (2, 0, 1):
            found.append(torch.equal(usual + k, ops.wait_tensor(started[k])))
    return found


@pytest.mark.slow
def test_exchanges_are_those_of_gloo(ranks: Ranks) -> None:
    for same in ranks.run(exchanged_both_ways, len(ranks.pipes)):
        assert same == [True] * 12


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


class Message:
    """A work that is done when it is told so, and may be waited for once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end, self.waits, self.error = threading.Event(), 0, error

    def wait(self) -> None:
        self.waits += 1
        assert self.may_end.wait(30)
        if self.error is not None:
            raise self.error


def test_a_gather_is_done_when_all_its_messages_are() -> None:
    first, second = Message(), Message()
    both = Exchanges([first, second])
    first.may_end.set()
    assert not both.is_completed()
    second.may_end.set()
    both.wait()
    both.wait()
    assert both.is_completed()
    assert (first.waits, second.waits) == (1, 1)


def test_what_goes_wrong_is_told_to_who_waits() -> None:
    broken, good = Message(RuntimeError("Connection closed by peer")), Message()
    broken.may_end.set()
    good.may_end.set()
    failed, after = Exchanges([broken, good]), Exchanges([Message()])
    with pytest.raises(RuntimeError, match="closed by peer"):
        failed.wait()
    assert failed.is_completed()
    assert not after.is_completed()  # its thread goes on
    after._works[0].may_end.set()
    after.wait()


def test_other_backends_keep_their_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gather = graph.call_function(ops.all_gather_into_tensor.default, (x, 2, "0"))
    exchange = graph.call_function(ops.all_to_all_single.default, (x, [1, 1], [1, 1], "0"))
    for node in (gather, exchange):
        assert stand_in(node) is None  # no job
        with fake_world(2):
            assert stand_in(node) is None
