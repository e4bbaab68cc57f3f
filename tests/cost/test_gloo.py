"""The gloo model: the algorithms that ProcessGroupGloo runs, and how their costs compare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from undertow.cost.cluster import Cluster
from undertow.cost.collectives import CollectiveEstimate, estimate_collective
from undertow.program.model import Collective, CollectiveKind

MiB = 1 << 20


def cost(text: str, kind: CollectiveKind, nbytes: int, size: int = 0) -> CollectiveEstimate:
    cluster = Cluster.parse(text)
    return estimate_collective(cluster, range(size or cluster.world_size), Collective(kind, nbytes))


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        (CollectiveKind.ALL_REDUCE, "ring"),
        (CollectiveKind.ALL_GATHER, "pairwise"),
        (CollectiveKind.REDUCE_SCATTER, "ring_all_reduce"),
        (CollectiveKind.ALL_TO_ALL, "pairwise"),
        (CollectiveKind.BROADCAST, "binomial_tree"),
    ],
)
def test_each_kind_runs_as_gloo_runs_it(kind: CollectiveKind, algorithm: str) -> None:
    estimate = cost("cpux4", kind, MiB)
    assert (estimate.algorithm, estimate.protocol) == (algorithm, "tcp")
    assert estimate.link == "loopback"
    assert cost("4xcpu", kind, MiB).link == "ethernet25"


def test_reduce_scatter_costs_more_than_the_all_reduce_it_is() -> None:
    scattered = cost("cpux4", CollectiveKind.REDUCE_SCATTER, 64 * MiB)
    assert scattered.ns > cost("cpux4", CollectiveKind.ALL_REDUCE, 64 * MiB).ns


def test_broadcast_sends_the_whole_message_once_per_level() -> None:
    two, eight = (cost(f"cpux{n}", CollectiveKind.BROADCAST, 64 * MiB) for n in (2, 8))
    assert eight.wire_ns == pytest.approx(3 * two.wire_ns, rel=1e-6)


def test_send_in_a_host_has_the_loopback_to_itself() -> None:
    sent = cost("cpux2", CollectiveKind.SEND, 64 * MiB)
    assert sent.wire_ns == pytest.approx(64 * MiB / 2.5, rel=1e-6)


def test_more_ranks_take_longer() -> None:
    for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST):
        times = [cost("cpux8", kind, 16 * MiB, size).ns for size in range(2, 9)]
        assert times == sorted(times)


def test_small_collectives_are_bound_by_messages_not_bytes() -> None:
    estimate = cost("cpux4", CollectiveKind.ALL_REDUCE, 64)
    assert estimate.latency_ns > 0.99 * estimate.ns


def test_one_ring_leaves_a_node_on_one_rail() -> None:
    cluster = Cluster.parse("2xcpux4")
    assert cluster.inter is not None
    railed = replace(cluster, inter=replace(cluster.inter, bandwidth=0.5e9, shared=False))
    work = Collective(CollectiveKind.ALL_GATHER, 64 * MiB)
    few = estimate_collective(railed, [0, 4], work)
    many = estimate_collective(railed, range(8), work)
    assert many.wire_ns > 6 * few.wire_ns
