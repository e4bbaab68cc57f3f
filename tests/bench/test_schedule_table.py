"""The table of `bench.schedule`: all of our schedules are judged; what is not as asked shows."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench import schedule
from bench.schedule_table import HEADER, VERDICTS, all_held, summary, table_row, verdicts

GIB = 1 << 30


def figures(total_ms: float, peak: int = 10, **more: Any) -> dict[str, Any]:
    return {"total_ms": total_ms, "exposed_ms": 1.0, "peak_nbytes": peak * GIB} | more


def row(**change: Any) -> dict[str, Any]:
    """A row in which all is well, but for `change`."""
    made: dict[str, Any] = {
        "model": "llama3-8b",
        "parallel": "fsdp+tp",
        "ranks": 8,
        "part": "step",
        "nodes": 9000,
        "fits": True,
        "captured": figures(200, collectives=100),
        "bound": {"ms": 100.0},
        "reference": {"best": figures(180, seconds=5.0, buckets=1)},
        "reference_best": "best",
        "ours_same_memory": figures(150),
        "ours_default": figures(160, seconds=0.2, buckets=3),
        "ours_split": figures(150, seconds=0.8, pieces=4),
    }
    made |= change
    return made | {"verdicts": verdicts(made)}


def state(lines: list[str], name: str) -> str:
    (line,) = [line for line in lines if f" {name}:" in line]
    return line[:3]


def test_where_all_is_well_every_verdict_is_ok() -> None:
    rows = [row()]
    assert all_held(rows)
    assert not any(line.startswith("NOT") for line in summary(rows))
    cells = table_row(rows[0])
    assert len(cells) == len(HEADER)
    assert cells[HEADER.index("ours(b) s")] == "0.20"
    assert cells[HEADER.index("ours(c) s")] == "0.80"
    assert "NOT" not in cells


@pytest.mark.parametrize(
    ("change", "name", "column"),
    [
        ({"ours_split": figures(150, 11, seconds=1, pieces=2)}, "peak kept with splits", "peak c"),
        ({"ours_split": figures(161, seconds=1, pieces=2)}, "not longer with splits", "c<=b"),
        (
            {"ours_split": figures(181, seconds=1, pieces=2)},
            "not longer at captured peak",
            "b,c<=P",
        ),
        ({"ours_default": figures(160, 11, seconds=0.2)}, "peak kept", "peak"),
        ({"ours_default": figures(160, seconds=0.6)}, "tenth of time", "1/10"),
        ({"ours_same_memory": figures(181)}, "not longer", "a<=P"),
        ({"parallel": "fsdp"}, "within 3 %", "3%"),
    ],
)
def test_what_is_not_as_asked_is_told(change: dict[str, Any], name: str, column: str) -> None:
    rows = [row(), row(**change)]
    assert state(summary(rows), name) == "NOT"
    assert table_row(rows[1])[HEADER.index(column)] == "NOT"
    assert not all_held(rows)


def test_a_verdict_that_does_not_apply_is_not_against_us() -> None:
    made = row(reference={"best": {"failed": "time"}}, reference_best=None, ours_same_memory=None)
    assert [name for name in VERDICTS if made["verdicts"][name] is None] == [
        "not longer",
        "within 3 %",
        "not longer at captured peak",
        "tenth of time",
    ]
    assert all_held([made])
    assert len(table_row(made)) == len(HEADER)


def test_a_case_that_failed_shows_as_failed() -> None:
    lines = summary([row()], ["llama3-70b fsdp x256"])
    assert "NOT llama3-70b fsdp x256: failed" in lines
    assert not all_held([row()], ["llama3-70b fsdp x256"])
    assert summary([], ["llama3-70b fsdp x256"])[0] == "NOT llama3-70b fsdp x256: failed"


@pytest.mark.parametrize(
    ("found", "code"),
    [([row()], 0), (None, 1), ([row(ours_split=figures(161, seconds=1, pieces=2))], 1)],
)
def test_the_benchmark_exits_with_1_if_something_is_not_as_asked(
    found: list[dict[str, Any]] | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved: dict[str, Any] = {}
    monkeypatch.setattr(schedule, "_in_process", lambda *_: found)
    monkeypatch.setattr(schedule, "save_results", lambda _, data: saved.update(data))
    monkeypatch.setattr(sys, "argv", ["schedule", "--quick", "--only", "fsdp"])
    if code:
        with pytest.raises(SystemExit) as ended:
            schedule.main()
        assert ended.value.code == code
    else:
        schedule.main()
    assert "NOT" in capsys.readouterr().out if code else not saved["failed"]
    assert saved["failed"] == ([] if found else ["llama3-8b fsdp x64"])
