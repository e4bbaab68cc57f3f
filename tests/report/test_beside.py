"""Measured Timelines beside the predicted one: by class, by task, by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import GATHER_STEP
from undertow.errors import ProgramError
from undertow.program import Order, Timeline, parse_program, simulate
from undertow.program.memory import profile_memory
from undertow.program.serialize import timeline_to_json
from undertow.report.beside import (
    Beside,
    beside_json,
    beside_tracks,
    class_rows,
    headline,
    merge_timelines,
    op_rows,
    own_spans,
    read_beside,
)

PROGRAM = parse_program(GATHER_STEP)


def measured(ready: list[int], wire: tuple[int, int], total: int) -> Timeline:
    """A run that reached its tasks at these microseconds."""
    times = np.array([*ready, total], dtype=np.int64) * 1000
    begin, end = times[:-1].copy(), times[1:].copy()
    begin[1], end[1] = wire[0] * 1000, wire[1] * 1000
    exposed = np.zeros(len(PROGRAM), dtype=np.int64)
    exposed[1] = end[3] - begin[3]
    order = Order.captured(PROGRAM)
    memory = profile_memory(PROGRAM)
    return Timeline(PROGRAM, order, times[:-1], begin, end, exposed, memory, total * 1000)


FIRST = measured([0, 1, 3, 33, 61], (3, 60), 161)
SECOND = measured([0, 1, 3, 53, 61], (20, 60), 171)  # it computes longer, and comes last


def files(*timelines: tuple[str, Timeline]) -> list[tuple[Path, Any]]:
    return [(Path("out") / name, timeline_to_json(timeline)) for name, timeline in timelines]


def both() -> Beside:
    (graph,) = read_beside(
        files(
            ("graph0.forward.rank1.measured.json", SECOND),
            ("graph0.forward.rank0.measured.json", FIRST),
            ("graph0.forward.rank0.predicted.json", simulate(PROGRAM)),
        )
    )
    return graph


def test_files_of_one_graph_are_laid_side_by_side() -> None:
    graph = both()
    assert graph.label == "graph0.forward"
    assert [m.rank for m in graph.ranks] == [0, 1]
    assert graph.merged.total_ns == 161_000
    assert graph.slowest == 1
    assert headline(graph).endswith("predicted 140 us, -13.0%")
    names = [track.name for track in beside_tracks(graph, 8)]
    assert len(names) == 4
    assert names[0] == "graph0.forward, predicted"
    assert len(beside_tracks(graph, 3)) == 3


def test_views_and_issuing_count_in_the_task_before_or_after_them() -> None:
    assert own_spans(FIRST) == [0, 0, 33_000, 0, 100_000]
    assert own_spans(simulate(PROGRAM)) == [0, 0, 20_000, 0, 90_000]


def test_errors_are_told_per_class_and_per_task() -> None:
    rows = {row.name: row for row in op_rows(both())}
    assert rows["matmul"].predicted_ns == 90_000
    assert rows["matmul"].measured_ns == 100_000
    assert rows["gather"].predicted_ns == 50_000
    totals = {row.name: row for row in class_rows(both())}
    assert totals["step"].error == pytest.approx(140 / 161 - 1)
    assert totals["exposed"].predicted_ns == 30_000
    assert totals["all compute"].predicted_ns == 110_000


def test_json_has_every_task_and_who_made_the_others_wait() -> None:
    data = beside_json(both())
    assert [task["name"] for task in data["tasks"]] == ["gather", "other", "matmul"]
    assert data["comparison"]["stragglers"] == [1]
    assert data["slowest_rank"] == 1


def test_merging_takes_the_median_over_the_ranks() -> None:
    third = measured([0, 2, 4, 60, 70], (4, 65), 200)
    merged = merge_timelines([FIRST, SECOND, third])
    assert merged.total_ns == 171_000
    assert merged.ready.tolist() == [0, 1000, 3000, 53_000, 61_000]


def test_what_does_not_belong_together_gets_a_sentence() -> None:
    strange = simulate(parse_program("input a 1MiB\nbuffer b 1MiB\nx compute 5us reads a writes b"))
    with pytest.raises(ProgramError, match="different programs"):
        read_beside(
            files(("g.rank0.measured.json", FIRST), ("g.rank1.measured.json", strange)),
        )
    with pytest.raises(ProgramError, match="predicted timelines alone"):
        read_beside(files(("g.rank0.predicted.json", FIRST)))
    with pytest.raises(ProgramError, match=r"g\.rank0\.measured\.json"):
        read_beside([(Path("g.rank0.measured.json"), {"format": "something"})])
