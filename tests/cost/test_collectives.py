"""The NCCL-like model: what must hold whatever its constants are, and which choices it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.cost.cluster import Cluster, Link
from undertow.cost.collectives import CollectiveEstimate, estimate_collective, shared_links
from undertow.errors import CostError
from undertow.program.model import Collective, CollectiveKind

MiB = 1 << 20
RINGS = [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE]
GROUPED = [*RINGS, CollectiveKind.ALL_TO_ALL, CollectiveKind.BROADCAST]
CLUSTERS = [
    Cluster.parse(text) for text in ("4xh100x8", "4xa100x8", "2xmi300xx8", "2xl40sx4", "4xcpux2")
]

kinds = st.sampled_from(GROUPED)
clusters = st.sampled_from(CLUSTERS)
sizes = st.integers(0, 1 << 32)


def cost(
    cluster: Cluster, ranks: Sequence[int], kind: CollectiveKind, nbytes: int
) -> CollectiveEstimate:
    return estimate_collective(cluster, ranks, Collective(kind, nbytes))


def one_nic(cluster: Cluster) -> Cluster:
    assert cluster.inter is not None
    return replace(cluster, inter=replace(cluster.inter, shared=True))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    cluster = draw(clusters)
    ranks = st.integers(0, cluster.world_size - 1)
    return cluster, draw(st.lists(ranks, min_size=1, max_size=cluster.world_size, unique=True))


@given(groups(), kinds, sizes, sizes)
def test_more_bytes_never_take_less_time(
    group: tuple[Cluster, list[int]], kind: CollectiveKind, a: int, b: int
) -> None:
    small, large = sorted((a, b))
    assert cost(*group, kind, small).ns <= cost(*group, kind, large).ns


@given(groups(), kinds, sizes, st.floats(1, 100), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(
    group: tuple[Cluster, list[int]], kind: CollectiveKind, nbytes: int, intra: float, inter: float
) -> None:
    cluster, ranks = group
    assert cluster.inter is not None
    faster = replace(
        cluster,
        intra=replace(cluster.intra, bandwidth=cluster.intra.bandwidth * intra),
        inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth * inter),
    )
    assert cost(faster, ranks, kind, nbytes).ns <= cost(cluster, ranks, kind, nbytes).ns


@given(groups(), kinds, sizes)
def test_estimates_are_consistent_and_do_not_depend_on_the_order_of_ranks(
    group: tuple[Cluster, list[int]], kind: CollectiveKind, nbytes: int
) -> None:
    cluster, ranks = group
    estimate = cost(cluster, ranks, kind, nbytes)
    assert isinstance(estimate.ns, int)
    assert estimate.ns == estimate.latency_ns + estimate.wire_ns >= 0
    assert 0 <= estimate.load_permille <= 1000
    assert list(estimate.alternatives) == sorted(estimate.alternatives, key=lambda a: a[2])
    assert cost(cluster, sorted(ranks), kind, nbytes) == estimate


@given(clusters, st.sampled_from([CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST]), sizes)
def test_more_nodes_never_take_less_time(
    cluster: Cluster, kind: CollectiveKind, nbytes: int
) -> None:
    per_node = cluster.devices_per_node
    times = [
        cost(cluster, range(n * per_node), kind, nbytes).ns for n in range(1, cluster.nodes + 1)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER])
def test_more_ranks_in_a_node_take_longer(kind: CollectiveKind) -> None:
    times = [cost(CLUSTERS[0], range(n), kind, 64 * MiB).ns for n in range(2, 9)]
    assert times == sorted(times)


@pytest.mark.parametrize("kind", RINGS)
def test_ll_wins_small_and_simple_wins_large(kind: CollectiveKind) -> None:
    rails = range(0, 32, 8)
    assert cost(CLUSTERS[0], rails, kind, 1024).protocol == "ll"
    assert cost(CLUSTERS[0], rails, kind, 1 << 30).protocol == "simple"


def test_ll128_is_not_used_on_a_pcie_bus() -> None:
    estimate = cost(Cluster.parse("l40sx4"), range(4), CollectiveKind.ALL_GATHER, MiB)
    assert "ll128" not in {protocol for _, protocol, _ in estimate.alternatives}


def test_tree_wins_small_all_reduces_on_many_nodes() -> None:
    estimate = cost(Cluster.parse("32xa100x8"), range(256), CollectiveKind.ALL_REDUCE, 64 << 10)
    assert estimate.algorithm == "tree"


def test_ring_wins_large_all_reduces_without_nvls() -> None:
    estimate = cost(Cluster.parse("a100x8"), range(8), CollectiveKind.ALL_REDUCE, 1 << 30)
    assert (estimate.algorithm, estimate.link) == ("ring", "nvlink3")


@pytest.mark.parametrize(("gpus", "measured"), [(5, 258e9), (6, 265e9), (7, 270e9), (8, 273e9)])
def test_nvls_reaches_the_algorithm_bandwidth_that_was_measured(gpus: int, measured: float) -> None:
    """nccl-tests on eight H100 at 2 to 4 GB with NCCL_ALGO=NVLS: NVIDIA/nccl#1455."""
    estimate = cost(Cluster.parse("h100x8"), range(gpus), CollectiveKind.ALL_REDUCE, 4 << 30)
    assert estimate.algorithm == "nvls"
    assert estimate.algorithm_bandwidth == pytest.approx(measured, rel=0.02)


def test_ring_runs_where_the_switch_does_not_reduce() -> None:
    h100 = Cluster.parse("h100x8")
    without = replace(h100, device=replace(h100.device, nvls=False))
    estimate = cost(without, range(8), CollectiveKind.ALL_REDUCE, 8 << 30)
    assert estimate.algorithm == "ring"
    assert estimate.bus_bandwidth == pytest.approx(367e9, rel=0.03)  # measured: NVIDIA/nccl#1455


def test_nvls_crosses_nodes_only_with_a_tree_and_needs_three_devices() -> None:
    across = cost(CLUSTERS[0], range(32), CollectiveKind.ALL_REDUCE, 64 * MiB)
    assert across.algorithm == "nvls_tree"
    pair = cost(CLUSTERS[0], range(2), CollectiveKind.ALL_REDUCE, 1 << 30)
    assert "nvls" not in {pair.algorithm, *(name for name, _, _ in pair.alternatives)}
    rails = cost(CLUSTERS[0], range(0, 32, 8), CollectiveKind.ALL_REDUCE, 1 << 30)
    assert "nvls_tree" not in {rails.algorithm, *(name for name, _, _ in rails.alternatives)}


def test_hierarchical_is_an_alternative_and_never_what_nccl_runs() -> None:
    small = cost(CLUSTERS[0], range(32), CollectiveKind.ALL_GATHER, 1024)
    assert small.algorithm == "ring"
    assert small.alternatives[0][0] == "hierarchical"
    assert "two smaller groups" in small.notes[0]


@pytest.mark.parametrize("kind", GROUPED)
def test_same_group_size_is_slower_across_nodes(kind: CollectiveKind) -> None:
    cluster = Cluster.parse("8xh100x8")
    inside = cost(cluster, range(8), kind, 64 * MiB)
    across = cost(cluster, range(0, 64, 8), kind, 64 * MiB)
    assert across.ns > 3 * inside.ns
    assert (inside.link, across.link) == ("nvlink4", "ndr")
    assert (inside.nodes, inside.ranks_per_node) == (1, 8)
    assert (across.nodes, across.ranks_per_node) == (8, 1)


def test_all_rails_of_a_node_carry_one_ring() -> None:
    one = cost(CLUSTERS[0], [0, 8, 16, 24], CollectiveKind.REDUCE_SCATTER, 1 << 30)
    ranks = [rank for rank in range(32) if rank % 8 < 4]
    four = cost(CLUSTERS[0], ranks, CollectiveKind.REDUCE_SCATTER, 1 << 30)
    assert four.bus_bandwidth == pytest.approx(4 * one.bus_bandwidth, rel=0.05)


@pytest.mark.parametrize("kind", GROUPED)
def test_shared_nic_is_slower_than_rails(kind: CollectiveKind) -> None:
    for ranks in (range(0, 32, 8), range(32)):
        rails = cost(CLUSTERS[0], ranks, kind, 64 * MiB)
        shared = cost(one_nic(CLUSTERS[0]), ranks, kind, 64 * MiB)
        assert shared.ns > 2 * rails.ns


def test_siblings_share_one_nic() -> None:
    cluster = one_nic(CLUSTERS[0])
    estimate = cost(cluster, range(0, 32, 8), CollectiveKind.ALL_GATHER, 64 * MiB)
    assert estimate.bus_bandwidth == pytest.approx(48e9 / 8, rel=0.05)
    assert estimate.notes == ("8 groups of each node share one ndr link",)
    whole = cost(cluster, range(32), CollectiveKind.ALL_GATHER, 64 * MiB)
    assert whole.bus_bandwidth == pytest.approx(48e9, rel=0.05)


def test_siblings_share_a_pcie_bus() -> None:
    cluster = Cluster.parse("l40sx4")
    pair = cost(cluster, [0, 1], CollectiveKind.REDUCE_SCATTER, 64 * MiB)
    assert pair.bus_bandwidth == pytest.approx(11e9, rel=0.05)
    assert pair.notes == ("2 groups of each node share the pcie4 bus",)


def test_uneven_group_is_as_slow_as_its_slowest_node() -> None:
    uneven = cost(CLUSTERS[0], [0, 1, 2, 3, 8], CollectiveKind.ALL_GATHER, 256 * MiB)
    assert uneven.bus_bandwidth == pytest.approx(48e9, rel=0.02)
    assert "uneven group: 1 to 4 ranks" in uneven.notes[0]


def test_mesh_gives_a_pair_only_its_own_link() -> None:
    cluster = Cluster.parse("mi300xx8")
    pair = cost(cluster, [0, 1], CollectiveKind.REDUCE_SCATTER, 1 << 30)
    whole = cost(cluster, range(8), CollectiveKind.REDUCE_SCATTER, 1 << 30)
    assert pair.bus_bandwidth == pytest.approx(45e9, rel=0.02)
    assert whole.bus_bandwidth == pytest.approx(315e9, rel=0.02)


def test_all_to_all_splits_its_traffic_by_where_the_peers_are() -> None:
    nbytes = 1 << 30
    inside = cost(CLUSTERS[0], range(8), CollectiveKind.ALL_TO_ALL, nbytes)
    assert inside.wire_ns == pytest.approx(nbytes * 7 / 8 / 360, rel=1e-6)
    across = cost(CLUSTERS[0], range(32), CollectiveKind.ALL_TO_ALL, nbytes)
    assert across.wire_ns == pytest.approx(nbytes * 24 / 32 / 48, rel=1e-6)


def test_peer_decides_the_link_of_a_send() -> None:
    def send(peer: int | None, ranks: Sequence[int], rank: int | None = None) -> CollectiveEstimate:
        work = Collective(CollectiveKind.SEND, 64 * MiB, peer=peer)
        return estimate_collective(CLUSTERS[0], ranks, work, rank=rank)

    assert send(1, [0, 1, 8]).link == "ndr"  # may be rank 8 that sends
    assert send(1, [0, 1, 8], rank=0).link == "nvlink4"
    assert send(None, [0, 8]).link == "ndr"
    for peer, rank in ((None, None), (5, None), (1, 1), (1, 5)):
        with pytest.raises(CostError, match="of the group"):
            send(peer, [0, 1, 8], rank)


def test_group_of_one_copies_or_does_nothing() -> None:
    reduced = cost(CLUSTERS[0], [3], CollectiveKind.ALL_REDUCE, MiB)
    assert (reduced.ns, reduced.notes) == (0, ("group of one rank: done in place, no time",))
    gathered = cost(CLUSTERS[0], [3], CollectiveKind.ALL_GATHER, 1 << 30)
    assert gathered.ns == pytest.approx(2e-6 * 1e9 + (2 << 30) / (3350 * 0.88), rel=0.01)
    assert gathered.notes == ("group of one rank: a copy on the device",)


def test_unknown_size_is_refused_and_never_free() -> None:
    with pytest.raises(CostError, match="size that cannot be known"):
        estimate_collective(CLUSTERS[0], range(8), Collective(CollectiveKind.ALL_GATHER, None))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([], "empty"), ([1, 2, 1], "rank 1 is in its group more than once"), ([0, 32], "rank 32")],
)
def test_group_that_makes_no_sense_is_refused(ranks: list[int], expected: str) -> None:
    with pytest.raises(CostError, match=expected):
        cost(CLUSTERS[0], ranks, CollectiveKind.ALL_GATHER, MiB)


def test_shared_links_name_what_the_group_loads() -> None:
    cluster = CLUSTERS[0]
    assert shared_links(cluster, [0]) == ()
    assert shared_links(cluster, range(8)) == ("intra",)
    assert shared_links(cluster, [0, 8, 16]) == ("inter",)
    assert shared_links(cluster, range(16)) == ("intra", "inter")


def test_faster_network_is_one_replace_away() -> None:
    xdr = replace(CLUSTERS[0], inter=Link("xdr", 96e9, 5e-6))
    rails = range(0, 32, 8)
    before = cost(CLUSTERS[0], rails, CollectiveKind.ALL_GATHER, 1 << 30)
    after = cost(xdr, rails, CollectiveKind.ALL_GATHER, 1 << 30)
    assert after.wire_ns == pytest.approx(before.wire_ns / 2, rel=1e-6)
