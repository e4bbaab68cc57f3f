"""What `bench.schedule` asks of each schedule, and the table that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_GIB = 2**30
_LEAST_GIB = 0.01  # of memory that is said to buy something
_REACHES_BOUND = ("fsdp", "hsdp", "ddp")  # no collective lies in the path of activations

VERDICTS = (
    "not longer",
    "within 3 %",
    "peak kept",
    "not longer at captured peak",
    "tenth of time",
    "peak kept with splits",
    "not longer with splits",
)


def verdicts(row: dict[str, Any]) -> dict[str, bool | None]:
    """What the benchmark asks for; None where it does not apply."""
    best = row["reference_best"]
    theirs = row["reference"][best] if best is not None else None
    same, default, captured = row["ours_same_memory"], row["ours_default"], row["captured"]
    split = row["ours_split"]
    found: dict[str, bool | None] = dict.fromkeys(VERDICTS)
    found["peak kept"] = default["peak_nbytes"] <= captured["peak_nbytes"]
    found["peak kept with splits"] = split["peak_nbytes"] <= captured["peak_nbytes"]
    found["not longer with splits"] = split["total_ms"] <= default["total_ms"]
    if row["parallel"] in _REACHES_BOUND and row["fits"]:
        found["within 3 %"] = (same or default)["total_ms"] <= 1.03 * row["bound"]["ms"]
    if theirs is None:
        return found
    found["not longer"] = same["total_ms"] <= theirs["total_ms"]
    if theirs["peak_nbytes"] <= captured["peak_nbytes"]:
        longest = max(default["total_ms"], split["total_ms"])
        found["not longer at captured peak"] = longest <= theirs["total_ms"]
    if row["nodes"] >= 5000 and captured["collectives"]:  # else PyTorch's pass has nothing to do
        found["tenth of time"] = 10 * default["seconds"] <= theirs["seconds"]
    return found


HEADER = (
    "graph", "nodes",
    "captured ms", "exp", "GiB",
    "PyTorch ms", "exp", "GiB", "buckets",
    "ours(a) ms", "exp", "GiB",
    "ours(b) ms", "exp", "GiB",
    "ours(c) ms", "GiB", "pieces", "more GiB", "saves ms",
    "bound ms", "fits", "gap a", "gap b",
    "PyTorch s", "ours(b) s", "ours(c) s",
    "a<=P", "3%", "peak", "b,c<=P", "1/10", "peak c", "c<=b",
)  # fmt: skip


def table_row(row: dict[str, Any]) -> list[str]:
    best = row["reference_best"]
    bound = row["bound"]["ms"]
    failed = ",".join(sorted({run["failed"] for run in row["reference"].values() if best is None}))
    theirs = [*_cells(row["reference"][best]), best] if best is not None else [failed, "", "", ""]
    same, default, split = row["ours_same_memory"], row["ours_default"], row["ours_split"]
    return [
        f"{row['model']} {row['parallel']} x{row['ranks']} {row['part']}",
        str(row["nodes"]),
        *_cells(row["captured"]),
        *theirs,
        *(_cells(same) if same else ["", "", ""]),
        *_cells(default),
        f"{split['total_ms']:.2f}",
        f"{split['peak_nbytes'] / _GIB:.2f}",
        str(split["pieces"]),
        *(f"{value:.2f}" if value else "" for value in price_of_memory(row)),
        f"{bound:.1f}",
        "yes" if row["fits"] else "no",
        f"{same['total_ms'] / bound - 1:.1%}" if same else "",
        f"{default['total_ms'] / bound - 1:.1%}",
        f"{row['reference'][best]['seconds']:.1f}" if best is not None else "",
        f"{default['seconds']:.2f}",
        f"{split['seconds']:.2f}",
        *({True: "ok", False: "NOT", None: "-"}[found] for found in row["verdicts"].values()),
    ]


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['total_ms']:.2f}",
        f"{figures['exposed_ms']:.2f}",
        f"{figures['peak_nbytes'] / _GIB:.2f}",
    ]


def all_held(rows: Sequence[dict[str, Any]], failed: Sequence[str] = ()) -> bool:
    """Whether every case ended and no verdict is against us."""
    return not failed and all(found is not False for row in rows for found in _found(row))


def _found(row: dict[str, Any]) -> list[bool | None]:
    return [row["verdicts"][name] for name in VERDICTS]


def summary(rows: Sequence[dict[str, Any]], failed: Sequence[str] = ()) -> list[str]:
    """One line per verdict and for each case that failed, and one for the runs of PyTorch's pass
    that did not end well."""
    lines = []
    for name in VERDICTS if rows else ():
        asked = [row["verdicts"][name] for row in rows if row["verdicts"][name] is not None]
        state = "ok " if all(asked) else "NOT"
        lines.append(f"{state} {name}: {sum(asked)} of {len(asked)}")
    lines += [f"NOT {case}: failed" for case in failed]
    failures = [
        f"{row['model']} {row['parallel']} x{row['ranks']} {row['part']} {variant}: {run['failed']}"
        for row in rows
        for variant, run in row["reference"].items()
        if "failed" in run
    ]
    lines += [f"PyTorch's pass failed in {len(failures)} runs", *failures]
    for row in rows:
        more, saved = price_of_memory(row)
        if saved:
            name = f"{row['model']} {row['parallel']} x{row['ranks']} {row['part']}"
            how = f"{more:.2f} GiB more" if more else "looking on, with no more memory,"
            lines.append(f"{name}: {how} would save {saved:.2f} ms")
    return lines


def price_of_memory(row: dict[str, Any]) -> tuple[float, float]:
    """The GiB that would save some ms, up to those that PyTorch's result takes; zeros where more
    buys nothing. No GiB but some ms where it is not memory that buys them: who gives more than the
    captured order takes has the solver look on where it is near its bound already."""
    same, default = row["ours_same_memory"], row["ours_default"]
    if same is None or same["total_ms"] * 1.001 > default["total_ms"]:
        return 0.0, 0.0
    more = (same["peak_nbytes"] - default["peak_nbytes"]) / _GIB
    saved = default["total_ms"] - same["total_ms"]
    return (more if more >= _LEAST_GIB else 0.0), saved
