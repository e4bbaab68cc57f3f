"""Parameters that stay gathered where the memory limit has room: on real gloo ranks, as many on
each, within the limit, and training goes as it did."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import undertow.backend as backend
from tests.backend.test_ranks import COMPILING, Net, distance, parallelized, train_both
from tests.capture.gloo_ranks import Ranks
from tests.capture.test_gloo_parity import Case
from undertow.backend import kept
from undertow.backend.kept import Halves, count_that_fits, partition_within
from undertow.capture.mesh import Mesh
from undertow.capture.parallelize import parallelize
from undertow.errors import ProgramError
from undertow.graph.collectives import collective_call
from undertow.graph.convert import convert
from undertow.notices import counts
from undertow.program import profile_memory
from undertow.program.model import CollectiveKind

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Cut:
    """What a joint graph was cut into: gathers and peak memory of each half, and its limit."""

    gathers: tuple[int, int]
    peaks: tuple[int, int]
    limits: tuple[int | None, int | None]


def measured(halves: Halves) -> Cut:
    graphs = halves.forward.graph, halves.backward.graph
    names = ((), halves.split.donated)
    programs = [convert(g, donated=d).program for g, d in zip(graphs, names, strict=True)]
    gathers = [
        sum(
            call.work.kind is CollectiveKind.ALL_GATHER
            for call in map(collective_call, graph.nodes)
            if call is not None
        )
        for graph in graphs
    ]
    peaks = [profile_memory(program).peak_nbytes for program in programs]
    limits = halves.forward_nbytes, halves.backward_nbytes
    return Cut((gathers[0], gathers[1]), (peaks[0], peaks[1]), limits)


def trained(asked: tuple[Case, str]) -> Cut:
    """On one rank: two compiled steps as one process makes them, under a limit; how it was cut."""
    case, memory = asked
    found: list[Cut] = []

    def spy(*args: Any, **settings: Any) -> Halves:
        halves = partition_within(*args, **settings)
        found.append(measured(halves))
        return halves

    with mock.patch.object(backend, "partition_within", spy):
        assert parallelized(case, memory=memory) > 0
    (cut,) = found
    return cut


def test_more_memory_keeps_more_of_what_is_gathered(two: Ranks) -> None:
    cuts = []
    for memory in ("+0%", "+40%", "none"):
        first, second = two.run(trained, (Case("llama", {"dp": 2}, "fsdp"), memory), COMPILING)
        assert first == second
        cuts.append(first)
    usual, some, all_ = cuts
    assert usual.limits == (None, None)
    assert usual.gathers[1] > some.gathers[1] > all_.gathers[1] == 0
    assert usual.gathers[0] == some.gathers[0] == all_.gathers[0]
    for before, peak, limit in zip(usual.peaks, some.peaks, some.limits, strict=True):
        assert limit == int(before * 1.4)
        assert peak <= limit


def with_other_room(memory: str) -> tuple[float, int, int]:
    """On one rank: steps on a batch of its own length under one absolute limit. How far its
    parameters are from those of one process, how many gathers it has room for, and keeps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    world = dist.get_world_size()
    whole, own = Net(), []
    model = parallelize(copy.deepcopy(whole), Mesh({"dp": world}), "fsdp")
    options = {"memory": memory}
    run = torch.compile(model, backend=backend.undertow, dynamic=False, options=options)

    def spy(*args: Any) -> int:
        own.append(count_that_fits(*args))
        return own[-1]

    with mock.patch.object(kept, "count_that_fits", spy):
        for _ in range(2):
            batches = [torch.randn(3 + 20 * other, 16) for other in range(world)]
            train_both(whole, model, run, batches)
    return distance(whole, model), own[0], counts["kept gathers"]


def test_ranks_keep_as_many_as_the_one_with_the_least_room(two: Ranks) -> None:
    (near, most, first), (far, least, second) = two.run(with_other_room, "50KiB", COMPILING)
    assert max(near, far) < 1e-5
    assert most > least > 0
    assert first == second == least


def test_what_a_checkpoint_computes_again_is_gathered_again(two: Ranks) -> None:
    case = Case("llama", {"dp": 2}, "fsdp", {"checkpoint": True})
    first, second = two.run(trained, (case, "none"), COMPILING)
    assert first == second
    assert first.gathers[1] > 0


def work_done(memory: str) -> tuple[int, int, int]:
    """On one rank: how often a graph is cut, and made a Program of, to find how many gathers are
    kept; how many are."""
    counts.clear()
    with (
        mock.patch.object(kept, "partition", wraps=kept.partition) as cut,
        mock.patch.object(kept, "convert", wraps=kept.convert) as converted,
    ):
        assert parallelized(Case("odd", {"dp": 2}, "fsdp"), memory=memory) > 0
    return cut.call_count, converted.call_count, counts["kept gathers"]


def test_without_a_limit_a_graph_is_cut_once_and_nothing_is_counted(two: Ranks) -> None:
    for cuts, programs, count in two.run(work_done, "none", COMPILING):
        assert (cuts, programs) == (1, 0)
        assert count > 0
    for found in two.run(work_done, "+300%", COMPILING):
        assert found == (2, 2, count)


def with_a_graph_that_no_program_is_made_of(asked: tuple[str, int]) -> tuple[float, int, float]:
    """On one rank: steps on batches that grow, where the second rank cannot tell from one of them
    on what memory it has room for. How far parameters are from those of one process, how many
    gathers are kept, and how long ranks waited for each other at most."""
    memory, first = asked
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, waits = Net(), [0.0]
    model = parallelize(copy.deepcopy(whole), Mesh({"dp": world}), "fsdp")
    options = {"memory": memory, "timeout": 40}
    run = torch.compile(model, backend=backend.undertow, dynamic=False, options=options)

    def refuse(*args: Any, **settings: Any) -> Any:
        raise ProgramError("a size is not known")

    def timed(*args: Any, **settings: Any) -> Any:
        began = time.monotonic()
        try:
            return agree(*args, **settings)
        finally:
            waits.append(time.monotonic() - began)

    agree = kept.agreement.agree_on_numbers
    for step in range(2):
        fails = rank == 1 and step >= first
        convert = mock.patch.object(kept, "convert", refuse if fails else kept.convert)
        with convert, mock.patch.object(kept.agreement, "agree_on_numbers", timed):
            # The second rank alone compiles again, for its second batch.
            batches = [torch.randn(3 + other * (1 + step), 16) for other in range(world)]
            train_both(whole, model, run, batches)
    return distance(whole, model), counts["kept gathers"], max(waits)


@pytest.mark.parametrize(("memory", "first"), [("+290%", 0), ("+291%", 1)])
def test_a_rank_that_cannot_tell_what_it_has_room_for_keeps_what_the_others_do(
    two: Ranks, memory: str, first: int
) -> None:
    found = two.run(with_a_graph_that_no_program_is_made_of, (memory, first), COMPILING)
    (near, kept_once, _), (far, kept_twice, _) = found
    assert max(near, far) < 1e-5
    if first == 0:  # from the beginning: it says that it has room for none
        assert kept_once == kept_twice == 0
    else:  # ranks have agreed, and the first one runs on with what it has compiled
        assert kept_twice == 2 * kept_once > 0
    assert max(waited for _, _, waited in found) < 30  # none until the time was over
