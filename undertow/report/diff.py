"""What differs between two Plans, two Programs, or one of each: by task, by bucket, in figures.

Tasks are matched by name. What moved is decided by the longest part of the common tasks that both
sides run in the same order: everything outside of it had to be taken out and put elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from undertow.program import Collective, Kind, Order, Program, Timeline, simulate
from undertow.report.text import table
from undertow.schedule.plan import Figures, Plan
from undertow.units import format_nbytes, format_ns

MOST_SHOWN = 10
"""How many entries of each list the text shows; JSON has all."""


@dataclass(frozen=True)
class Side:
    """One of the two: the names of its tasks in order, its buckets, and what it comes to.

    A Program has facts of its tasks and when they run; a Plan alone has neither.
    """

    name: str
    kind: str  # "plan" or "program"
    order: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...]
    figures: Figures
    digest: str = ""  # of the step that a Plan was made for
    facts: dict[str, tuple[Any, ...]] | None = None
    begins: dict[str, int] | None = None


def plan_side(name: str, plan: Plan) -> Side:
    buckets = tuple(bucket.members for bucket in plan.buckets)
    return Side(name, "plan", plan.order, buckets, plan.planned, plan.program)


def program_side(name: str, program: Program, order: Order | None = None) -> Side:
    """A Program in an order (default: as captured), simulated."""
    timeline = simulate(program, order)
    names = tuple(program.tasks[i].name for i in timeline.order.tasks)
    begins = {task.name: int(timeline.begin[i]) for i, task in enumerate(program.tasks)}
    return Side(name, "program", names, (), _figures(timeline), "", _facts(program), begins)


def _figures(timeline: Timeline) -> Figures:
    return Figures(timeline.total_ns, timeline.exposed_ns, timeline.peak_nbytes)


def _facts(program: Program) -> dict[str, tuple[Any, ...]]:
    """Per task what a reader would call another task of the same name: kind, time, bytes."""
    facts = {}
    for task in program.tasks:
        nbytes = task.work.nbytes if isinstance(task.work, Collective) else None
        written = sum(program.buffers[buffer].nbytes for buffer in task.writes)
        facts[task.name] = (task.kind, task.ns, nbytes, written)
    return facts


@dataclass(frozen=True, slots=True)
class Move:
    """A task that runs elsewhere among those that both sides have."""

    name: str
    places: int  # how many of them it went down (negative: up)
    ns: int | None  # how much later it begins, where both sides are simulated


@dataclass(frozen=True, slots=True)
class Change:
    """A task of the same name that is not the same."""

    name: str
    what: str  # "time", "bytes" or "kind"
    before: Any
    after: Any


@dataclass(frozen=True)
class Difference:
    """What B has that A has not, and the reverse; lists are in B's order, lost ones in A's."""

    a: Side
    b: Side
    appeared: tuple[str, ...]
    vanished: tuple[str, ...]
    moved: tuple[Move, ...]  # the farthest first
    changed: tuple[Change, ...]
    merged: tuple[tuple[str, ...], ...]  # buckets of B that A has not
    unmerged: tuple[tuple[str, ...], ...]  # buckets of A that B has not
    same_step: bool | None  # None where that cannot be told

    @property
    def is_empty(self) -> bool:
        lists = (self.appeared, self.vanished, self.moved, self.changed, self.merged)
        return not any(lists) and not self.unmerged and self.a.figures == self.b.figures

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, sizes in bytes."""
        return {
            "a": _side_json(self.a),
            "b": _side_json(self.b),
            "same_step": self.same_step,
            "equal": self.is_empty,
            "step_seconds": (self.b.figures.total_ns - self.a.figures.total_ns) / 1e9,
            "exposed_seconds": (self.b.figures.exposed_ns - self.a.figures.exposed_ns) / 1e9,
            "peak_bytes": self.b.figures.peak_nbytes - self.a.figures.peak_nbytes,
            "appeared": list(self.appeared),
            "vanished": list(self.vanished),
            "moved": [
                {
                    "name": move.name,
                    "places": move.places,
                    "begins_later_seconds": None if move.ns is None else move.ns / 1e9,
                }
                for move in self.moved
            ],
            "changed": [asdict(change) for change in self.changed],
            "merged": [list(bucket) for bucket in self.merged],
            "unmerged": [list(bucket) for bucket in self.unmerged],
        }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "kind": side.kind,
        "tasks": len(side.order),
        "buckets": len(side.buckets),
        "step_seconds": side.figures.total_ns / 1e9,
        "exposed_seconds": side.figures.exposed_ns / 1e9,
        "peak_bytes": side.figures.peak_nbytes,
    }


def diff(a: Side, b: Side) -> Difference:
    """What it takes to get from `a` to `b`."""
    of_a, of_b = set(a.order), set(b.order)
    hidden_a, hidden_b = _followers(a), _followers(b)
    merged = set(a.buckets), set(b.buckets)
    return Difference(
        a,
        b,
        # A member that goes along in a bucket has not vanished: it has no start of its own.
        tuple(name for name in b.order if name not in of_a and name not in hidden_a),
        tuple(name for name in a.order if name not in of_b and name not in hidden_b),
        tuple(_moves(a, b)),
        tuple(_changes(a, b)),
        tuple(bucket for bucket in b.buckets if bucket not in merged[0]),
        tuple(bucket for bucket in a.buckets if bucket not in merged[1]),
        a.digest == b.digest if a.digest and b.digest else None,
    )


def _followers(side: Side) -> set[str]:
    return {name for bucket in side.buckets for name in bucket[1:]}


def _moves(a: Side, b: Side) -> list[Move]:
    """Common tasks outside the longest sequence that both keep, the farthest first."""
    of_b = set(b.order)
    place = {name: k for k, name in enumerate(name for name in a.order if name in of_b)}
    common = [name for name in b.order if name in place]
    kept = set(_longest_rising([place[name] for name in common]))
    moves = []
    for now, name in enumerate(common):
        if now in kept:
            continue
        later = None
        if a.begins is not None and b.begins is not None:
            later = b.begins[name] - a.begins[name]
        moves.append(Move(name, now - place[name], later))
    return sorted(moves, key=lambda move: (-abs(move.places), place[move.name]))


def _longest_rising(numbers: Sequence[int]) -> list[int]:
    """Indices of a longest rising subsequence, in O(n log n)."""
    tails: list[int] = []  # the smallest last number of a sequence of each length
    ends: list[int] = []  # and its index
    before = [-1] * len(numbers)
    for i, number in enumerate(numbers):
        length = bisect_left(tails, number)
        before[i] = ends[length - 1] if length else -1
        if length == len(tails):
            tails.append(number)
            ends.append(i)
        else:
            tails[length], ends[length] = number, i
    found = []
    i = ends[-1] if ends else -1
    while i >= 0:
        found.append(i)
        i = before[i]
    return found


def _changes(a: Side, b: Side) -> list[Change]:
    """Tasks that are not what they were; what changed most in time first."""
    changes = list(_all_changes(a, b))
    return sorted(
        changes, key=lambda change: -abs(change.after - change.before) if change.what == "ns" else 0
    )


def _all_changes(a: Side, b: Side) -> Iterator[Change]:
    if a.facts is None or b.facts is None:
        return
    for name in b.order:
        if name not in a.facts or a.facts[name] == b.facts[name]:
            continue
        labels = ("kind", "ns", "bytes", "bytes written")
        for what, before, after in zip(labels, a.facts[name], b.facts[name], strict=True):
            if before != after:
                yield Change(name, what, before, after)


# -- for readers ----------------------------------------------------------------------------------


def diff_report(found: Difference) -> Iterator[RenderableType]:
    yield _figures_table(found)
    if found.same_step is False:
        yield "The two plans were made for different steps."
    if found.is_empty:
        yield Text("They are the same.", style="green")
        return
    yield from _list("appeared", found.appeared)
    yield from _list("vanished", found.vanished)
    yield from _list("merged", [_bucket(bucket) for bucket in found.merged])
    yield from _list("no longer merged", [_bucket(bucket) for bucket in found.unmerged])
    yield from _list("changed", [_changed(change) for change in found.changed])
    yield from _list("moved", [_moved(move) for move in found.moved])


def _figures_table(found: Difference) -> RenderableType:
    rows = table("", ">step", ">exposed", ">peak memory", ">tasks", ">buckets")
    for side in (found.a, found.b):
        figures = side.figures
        rows.add_row(
            Text(side.name),
            format_ns(figures.total_ns),
            format_ns(figures.exposed_ns),
            format_nbytes(figures.peak_nbytes),
            str(len(side.order)),
            str(len(side.buckets)),
        )
    a, b = found.a.figures, found.b.figures
    rows.add_row(
        "difference",
        _signed(b.total_ns - a.total_ns, format_ns),
        _signed(b.exposed_ns - a.exposed_ns, format_ns),
        _signed(b.peak_nbytes - a.peak_nbytes, format_nbytes),
        f"{len(found.b.order) - len(found.a.order):+}",
        f"{len(found.b.buckets) - len(found.a.buckets):+}",
        style="bold",
    )
    return rows


def _signed(value: int, form: Any) -> Text:
    """More is worse: time or memory."""
    style = "red" if value > 0 else "green" if value < 0 else ""
    return Text(f"{'+' if value > 0 else ''}{form(value)}", style=style)


def _list(title: str, entries: Sequence[str]) -> Iterator[RenderableType]:
    if not entries:
        return
    rest = len(entries) - MOST_SHOWN
    yield f"{title}: {len(entries)}"
    for entry in entries[:MOST_SHOWN]:
        yield f"  {entry}"
    if rest > 0:
        yield f"  and {rest} more"


def _bucket(members: Sequence[str]) -> str:
    shown = ", ".join(members[:3])
    return f"{shown} and {len(members) - 3} more" if len(members) > 3 else shown


def _moved(move: Move) -> str:
    way = "down" if move.places > 0 else "up"
    places = abs(move.places)
    text = f"{move.name} {way} by {places} task{'s' * (places != 1)}"
    if move.ns is None:
        return text
    when = "later" if move.ns > 0 else "earlier"
    return f"{text}, {format_ns(abs(move.ns))} {when}"


def _changed(change: Change) -> str:
    forms = {"ns": format_ns, "bytes": format_nbytes, "bytes written": format_nbytes}
    form = forms.get(change.what, str)
    before, after = (
        str(value.value if isinstance(value, Kind) else "nothing" if value is None else form(value))
        for value in (change.before, change.after)
    )
    what = "time" if change.what == "ns" else change.what
    return f"{change.name}: {what} {before} -> {after}"
