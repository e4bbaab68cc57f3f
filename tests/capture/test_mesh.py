"""Ranks in a grid and the process groups along its dimensions."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from undertow.capture.mesh import Mesh, MeshError, bind, fake_world
from undertow.capture.parallelize import COMBINATIONS, mesh_for


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_groups_along_a_dimension_partition_the_job(sizes: list[int], data: st.DataObject) -> None:
    mesh = Mesh({f"d{i}": size for i, size in enumerate(sizes)})
    dims = tuple(data.draw(st.sets(st.sampled_from(list(mesh.dims)))))
    groups = {mesh.ranks(dims, rank) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(rank in mesh.ranks(dims, rank) for rank in range(mesh.size))


def test_the_last_dimension_holds_neighbours() -> None:
    assert Mesh({"dp": 2, "tp": 4}).ranks(("tp",), 6) == (4, 5, 6, 7)


def test_bound_groups_have_the_ranks_of_their_process_group() -> None:
    with fake_world(16, rank=5):
        bound = bind(Mesh({"dp": 4, "tp": 4}))
        tp, dp, both = bound.group("tp"), bound.group("dp"), bound.group("dp", "tp")
        assert tp is not None
        assert dp is not None
        assert both is not None
        assert tp.ranks == (4, 5, 6, 7)
        assert dp.ranks == (1, 5, 9, 13)
        assert both.ranks == tuple(range(16))
        assert len({tp.name, dp.name, both.name}) == 3
        assert bound.index(dp) == 1


def test_a_group_of_one_is_none() -> None:
    with fake_world(4):
        assert bind(Mesh({"dp": 4, "tp": 1})).group("tp") is None


def test_a_device_mesh_lends_its_own_groups() -> None:
    with fake_world(8):
        device_mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        group = bind(device_mesh).group("tp")
        assert group is not None
        assert group.name == device_mesh.get_group("tp").group_name
        assert group.ranks == tuple(dist.get_process_group_ranks(device_mesh.get_group("tp")))


def test_a_mesh_of_another_size_than_the_job_is_refused() -> None:
    with fake_world(8), pytest.raises(MeshError, match="has 4 ranks and the job has 8"):
        bind(Mesh({"dp": 4}))


def test_without_a_job_there_is_nothing_to_bind_to() -> None:
    with pytest.raises(MeshError, match="init_process_group"):
        bind(Mesh({"dp": 4}))


@pytest.mark.parametrize("dims", [{}, {"dp": 0}])
def test_an_empty_mesh_is_refused(dims: dict[str, int]) -> None:
    with pytest.raises(MeshError):
        Mesh(dims)


def test_the_fake_world_is_gone_even_after_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt), fake_world(8):
        raise KeyboardInterrupt
    assert not dist.is_initialized()


def test_the_fake_world_leaves_the_way_errors_are_printed() -> None:
    before = sys.excepthook
    with fake_world(8):
        pass
    assert sys.excepthook is before


def test_a_second_world_inside_the_first_is_refused_and_leaves_it_alone() -> None:
    with fake_world(8):
        with pytest.raises(MeshError, match="already initialised"), fake_world(4):
            pass
        assert dist.get_world_size() == 8


@pytest.mark.parametrize("parallel", [name for name in COMBINATIONS if name != "hsdp+tp"])
def test_the_usual_mesh_has_all_ranks(parallel: str) -> None:
    assert mesh_for(parallel, 64).size == 64
