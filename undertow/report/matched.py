"""A measured Timeline of a given Program, from a torch.profiler trace of a run of it.

A trace has no tasks, but the calls that the generated module made: operators, collectives and
waits, one after another. Those of one call of a graph are found by its sequence of collectives and
waits, which must agree from first to last; between two of these, compute tasks are matched with
operators by name, in order. Tasks without an operator (fused ones) are counted, and what ran in
their place is the time of the first of them.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from undertow.cost.kineto import Event, SortedTrace, arguments_of, tensors_of
from undertow.cost.names import collective_kind, dtype_of
from undertow.errors import ProgramError, unknown_name
from undertow.program import Timeline
from undertow.program.memory import profile_memory
from undertow.program.model import Collective, CollectiveKind, Kind, OpClass, Order, Program, Work
from undertow.report.measured import Measured, measured_of
from undertow.report.runs import Run, find_runs, outermost_ops, span_of, thread_of
from undertow.units import format_nbytes

FUSED = "tasks without an operator of their own: fused, or run in another way"
UNSEEN = "collectives whose end the trace does not show: they count until they are waited for"
_LEAST_MATCHED = 0.5  # of the compute tasks, where no collectives tell which graph it is
_EXCHANGED = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)  # sent from rank to rank
_MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECV)
_WAIT = "wait"
_EXCHANGE = "exchange"  # messages to and from each other rank, in place of one collective


@dataclass(frozen=True, slots=True)
class _Call:
    """What a thread called: `what` is an operator, a kind of collective, an exchange or a wait."""

    what: str
    begin: int
    end: int
    shapes: tuple[tuple[int, ...], ...] = ()
    nbytes: int = 0  # that a collective is given; 0 where the trace does not tell

    @property
    def is_anchor(self) -> bool:
        return "." not in self.what


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What one thread called for a while: in a compiled function, or in all of the trace."""

    calls: list[_Call]
    begin: int
    end: int
    is_function: bool


@dataclass(frozen=True, slots=True)
class _Match:
    """Tasks of one call of a graph with what they called, and the span of all of it."""

    calls: dict[int, list[_Call]]
    begin: int
    end: int
    is_all: bool  # of a compiled function


@dataclass(frozen=True, slots=True)
class _Refusal:
    """How far a stretch of calls agreed, and what did not first."""

    agreed: int
    why: str


def match_trace(
    name: str, found: SortedTrace, predicted: Timeline, label: str, step: str | None = None
) -> Measured:
    """What a trace measured of the Program of a prediction; the typical call of several."""
    program, order = predicted.program, predicted.order
    found_at: dict[int, _Match] = {}  # by its first call: functions may be inside each other
    refusals: list[_Refusal] = []
    for stretches in _stretches(found, step, name):
        for outcome in _matches(program, order, stretches):
            if isinstance(outcome, _Refusal):
                refusals.append(outcome)
                continue
            first = min(call.begin for calls in outcome.calls.values() for call in calls)
            known = found_at.setdefault(first, outcome)
            if _rank(outcome) < _rank(known):
                found_at[first] = outcome
        if found_at:
            break
    best = [match for match in found_at.values() if match.is_all] or [*found_at.values()]
    most = max((len(match.calls) for match in best), default=0)
    best = sorted((m for m in best if len(m.calls) == most), key=lambda m: m.end - m.begin)
    if not best:
        far = max(refusals, key=lambda refusal: refusal.agreed, default=None)
        why = far.why if far else "it has no operators and no collectives"
        raise ProgramError(f"{name} is no trace of {label}: {why}")
    return _measured(name, found, program, order, best[(len(best) - 1) // 2])


def _rank(match: _Match) -> tuple[bool, int]:
    return not match.is_all, match.end - match.begin


# -- what was called ------------------------------------------------------------------------------


def _stretches(found: SortedTrace, step: str | None, name: str) -> Iterator[list[_Stretch]]:
    """Those of compiled functions, then those of whole threads."""
    calls = _calls(found)
    span = None
    if step is not None:
        names = [str(event["name"]).removeprefix("ProfilerStep#") for event in found.steps]
        if step not in names:
            raise ProgramError(f"{name}: {unknown_name('step', step, names)}")
        span = span_of(found.steps[names.index(step)])
    functions = []
    for event in sorted(found.compiled, key=lambda event: event["ts"]):
        begin, end = span_of(event)
        if span is None or span[0] <= begin < span[1]:
            own = _within(calls.get(thread_of(event), []), begin, end)
            functions.append(_Stretch(own, begin, end, is_function=True))
    yield [function for function in functions if function.calls]
    threads = [_within(own, *span) if span else own for own in calls.values()]
    yield [_Stretch(own, own[0].begin, own[-1].end, is_function=False) for own in threads if own]


def _within(calls: list[_Call], begin: int, end: int) -> list[_Call]:
    first = bisect_left(calls, begin, key=lambda call: call.begin)
    return calls[first : bisect_left(calls, end, key=lambda call: call.begin)]


def _calls(found: SortedTrace) -> dict[Any, list[_Call]]:
    """What each thread called, in order: operators inside no other, collectives and waits."""
    threads: dict[Any, list[_Call]] = {}
    for event in outermost_ops(found):
        shapes = tensors_of(arguments_of(event))[0]
        op = str(event["name"]).replace("::", ".")
        threads.setdefault(thread_of(event), []).append(_Call(op, *span_of(event), shapes))
    for event in _outer_calls(found):
        kind = collective_kind(str(event["name"]))
        if kind is None and not str(event["name"]).endswith("::wait_tensor"):
            continue
        what = _WAIT if kind is None else kind.value
        call = _Call(what, *span_of(event), nbytes=_nbytes(event))
        threads.setdefault(thread_of(event), []).append(call)
    for calls in threads.values():
        calls.sort(key=lambda call: (call.begin, call.end))
    return threads


def _nbytes(event: Event) -> int:
    """What a collective is given; 0 if there are no shapes, or several tensors."""
    shapes, dtypes = tensors_of(arguments_of(event))
    known = [dtype for dtype in map(dtype_of, dtypes) if dtype]
    return math.prod(shapes[0]) * known[0][1] if len(shapes) == len(known) == 1 else 0


def _outer_calls(found: SortedTrace) -> Iterator[Event]:
    """Calls of collectives that are not made by another one: a functional one holds that of
    c10d."""
    ends: dict[Any, float] = {}
    calls = [*found.functional_calls, *found.c10d_calls]
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= ends.get(thread_of(event), 0.0):
            ends[thread_of(event)] = event["ts"] + event["dur"]
            yield event


def _with_exchanges(calls: Sequence[_Call]) -> list[_Call]:
    """Messages as what they are parts of: those asked for, and those sent after them."""
    joined: list[_Call] = []
    last = ""  # the message before, if it was one
    for call in calls:
        if call.what not in _MESSAGES:
            joined.append(call)
            last = "" if call.is_anchor else last
        elif last and not (last == CollectiveKind.SEND and call.what == CollectiveKind.RECV):
            at = next(i for i in reversed(range(len(joined))) if joined[i].what == _EXCHANGE)
            joined[at] = _Call(_EXCHANGE, joined[at].begin, call.end)
            last = call.what
        else:
            joined.append(_Call(_EXCHANGE, call.begin, call.end))
            last = call.what
    return joined


# -- one call of the graph ------------------------------------------------------------------------


def _matches(
    program: Program, order: Order, stretches: Sequence[_Stretch]
) -> Iterator[_Match | _Refusal]:
    tasks = program.tasks
    has_messages = any(_kind_of(program, start) in _MESSAGES for start in program.starts)
    places = [p for p, i in enumerate(order.tasks) if tasks[i].kind in (Kind.START, Kind.WAIT)]
    for stretch in stretches:
        if not has_messages:
            stretch = replace(stretch, calls=_with_exchanges(stretch.calls))
        calls = stretch.calls
        anchors = [k for k, call in enumerate(calls) if call.is_anchor]
        wanted = _wanted(program, order, places, [calls[k].what for k in anchors])
        spare = max(len(anchors) - len(wanted), 0) if wanted else 0
        for first in range(spare + 1):
            is_all = stretch.is_function and not spare
            yield _match_at(program, order, stretch, anchors[first:], wanted, is_all)


def _kind_of(program: Program, start: int) -> CollectiveKind | None:
    work = program.tasks[start].work
    return work.kind if isinstance(work, Collective) else None


def _wanted(
    program: Program, order: Order, places: Sequence[int], anchors: Sequence[str]
) -> list[tuple[int, int]]:
    """Task and place in the order, for each call that a collective or a wait should have made.

    Several tensors that are exchanged as one collective are an exchange each.
    """
    parts = {
        start: len(waits)
        for start, waits in program.waits_of.items()
        if _kind_of(program, start) in _EXCHANGED and len(waits) > 1
    }
    exchanged = [s for s in program.starts if _kind_of(program, s) in _EXCHANGED]
    if sum(what == _EXCHANGE for what in anchors) < sum(parts.get(s, 1) for s in exchanged):
        parts = {}
    tasks = [(order.tasks[place], place) for place in places]
    return [task for task in tasks for _ in range(parts.get(task[0], 1))]


def _match_at(
    program: Program,
    order: Order,
    stretch: _Stretch,
    anchors: Sequence[int],
    wanted: Sequence[tuple[int, int]],
    is_all: bool,
) -> _Match | _Refusal:
    """The graph's call that has its collectives and waits from the first of `anchors` on."""
    calls = stretch.calls
    for k, (task, _) in enumerate(wanted):
        said = calls[anchors[k]].what if k < len(anchors) else ""
        if not _is_call_of(program, task, said):
            named = f"the task '{program.tasks[task].name}' ({_described(program, task)})"
            there = f"the trace has {_article(said)}" if said else "the trace has ended"
            return _Refusal(k, f"where {named} should run, {there}")
    found: dict[int, list[_Call]] = {}
    for (task, _), at in zip(wanted, anchors, strict=False):
        found.setdefault(task, []).append(calls[at])
    used = list(anchors[: len(wanted)])
    edges = [(-1, -1), *zip(used, (place for _, place in wanted), strict=True)]
    edges.append((len(calls), len(order.tasks)))
    for (before, after_place), (until, place) in pairwise(edges):
        compute = [i for i in order.tasks[after_place + 1 : place] if _op_of(program, i)]
        between = [call for call in calls[before + 1 : until] if not call.is_anchor]
        found |= {task: [call] for task, call in _aligned(program, compute, between)}
    refusal = _doubts(program, order, calls, found, len(wanted))
    if refusal:
        return refusal
    if not is_all:
        own = [call for calls in found.values() for call in calls]
        return _Match(found, min(call.begin for call in own), max(call.end for call in own), False)
    # With views at its ends, and what was fused there, which no call tells of.
    compute = [i for i in order.tasks if program.tasks[i].kind is Kind.COMPUTE]
    begin = calls[0].begin if compute and compute[0] in found else stretch.begin
    end = calls[-1].end if compute and compute[-1] in found else stretch.end
    return _Match(found, begin, end, is_all)


def _is_call_of(program: Program, task: int, what: str) -> bool:
    if program.tasks[task].kind is Kind.WAIT:
        return what == _WAIT
    kind = _kind_of(program, task)
    return what == kind or (what == _EXCHANGE and kind in _EXCHANGED)


def _described(program: Program, task: int) -> str:
    return str(_kind_of(program, task) or "a wait")


def _article(what: str) -> str:
    return f"an {what}" if what[0] in "ae" else f"a {what}"


def _op_of(program: Program, task: int) -> str:
    work = program.tasks[task].work
    return work.op if isinstance(work, Work) else ""


def _aligned(
    program: Program, tasks: Sequence[int], calls: Sequence[_Call]
) -> list[tuple[int, _Call]]:
    """Compute tasks and the operators that they are, in order; from the last one on, since what an
    exchange copies comes before what the graph does."""
    wanted, known = _keys(program, tasks, calls)
    pairs = []
    at = len(calls)
    for task, key in zip(reversed(tasks), reversed(wanted), strict=True):
        at = next((k for k in range(at - 1, -1, -1) if known[k] == key), -1)
        if at < 0:
            break
        pairs.append((task, calls[at]))
    if len(pairs) == len(tasks):
        return pairs
    needed = set(wanted)
    kept = [k for k, key in enumerate(known) if key in needed]
    has = [known[k] for k in kept]
    blocks = difflib.SequenceMatcher(None, wanted, has, autojunk=False).get_matching_blocks()
    return [(tasks[b.a + k], calls[kept[b.b + k]]) for b in blocks for k in range(b.size)]


_Key = tuple[str, tuple[tuple[int, ...], ...]]


def _keys(
    program: Program, tasks: Sequence[int], calls: Sequence[_Call]
) -> tuple[list[_Key], list[_Key]]:
    """What tasks and calls are compared by: operators; for products their sizes too, where the
    trace has them."""
    products = {
        work.op: len(work.inputs)
        for work in (_product(program, task) for task in tasks)
        if work and any(call.shapes for call in calls)
    }
    wanted = []
    for task in tasks:
        work, op = _product(program, task), _op_of(program, task)
        wanted.append((op, work.inputs if work and op in products else ()))
    # The result may be given as well.
    return wanted, [(call.what, call.shapes[: products.get(call.what, 0)]) for call in calls]


def _product(program: Program, task: int) -> Work | None:
    work = program.tasks[task].work
    is_product = isinstance(work, Work) and work.op_class is OpClass.MATMUL
    return work if is_product and isinstance(work, Work) else None


def _doubts(
    program: Program,
    order: Order,
    calls: Sequence[_Call],
    found: dict[int, list[_Call]],
    agreed: int,
) -> _Refusal | None:
    """Why calls that agree in their collectives are still of another graph."""
    if not found:
        return _Refusal(agreed, "none of its tasks has an operator or a collective in it")
    for start in program.starts:
        work, own = program.tasks[start].work, found[start]
        wanted = work.nbytes if isinstance(work, Collective) else None
        if wanted and len(own) == 1 and own[0].nbytes not in (0, wanted):
            return _Refusal(
                agreed,
                f"the task '{program.tasks[start].name}' is {_article(_described(program, start))} "
                f"of {format_nbytes(wanted)}, the trace's is of {format_nbytes(own[0].nbytes)}",
            )
    compute = [i for i in order.tasks if program.tasks[i].kind is Kind.COMPUTE]
    missing = [i for i in compute if i not in found]
    agreed += len(compute) - len(missing)
    if not program.starts and len(missing) > (1 - _LEAST_MATCHED) * len(compute):
        named = f"first '{program.tasks[missing[0]].name}' ({_op_of(program, missing[0])})"
        counts = f"{len(missing)} of its {len(compute)} tasks"
        return _Refusal(agreed, f"{counts} have no operator in it, {named}")
    products = [(i, work) for i in compute if (work := _product(program, i))]
    if not any(i in found for i, _ in products):
        for i, work in products:
            call = next((call for call in calls if call.what == work.op and call.shapes), None)
            if call:  # else it was fused
                return _Refusal(
                    agreed,
                    f"the task '{program.tasks[i].name}' is {work.op} of {_sizes(work.inputs)}, "
                    f"the trace's is of {_sizes(call.shapes[: len(work.inputs)])}",
                )
    return None


def _sizes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes)


# -- from calls to a Timeline ---------------------------------------------------------------------


class _Clock:
    """When what was called ran, in the trace's nanoseconds: on the device, if it has one."""

    def __init__(self, found: SortedTrace) -> None:
        runs = sorted(find_runs(found), key=lambda run: (run.launched, run.begin))
        self.on_device = bool(found.kernels or found.nccl_kernels)
        self._wire = [run for run in runs if run.is_collective]
        self._kernels = [run for run in runs if not run.is_collective]

    def wire(self, calls: Sequence[_Call]) -> tuple[int, int] | None:
        return _span([run for call in calls for run in _launched(self._wire, call)])

    def own(self, calls: Sequence[_Call]) -> tuple[int, int] | None:
        """What calls take of the compute stream; None if that is nothing."""
        if not self.on_device:
            return calls[0].begin, calls[-1].end
        return _span([run for call in calls for run in _launched(self._kernels, call)])


def _launched(runs: Sequence[Run], call: _Call) -> Sequence[Run]:
    first = bisect_left(runs, call.begin, key=lambda run: run.launched)
    return runs[first : bisect_right(runs, call.end, key=lambda run: run.launched)]


def _span(runs: Sequence[Run]) -> tuple[int, int] | None:
    return (min(run.begin for run in runs), max(run.end for run in runs)) if runs else None


def _measured(
    name: str, found: SortedTrace, program: Program, order: Order, match: _Match
) -> Measured:
    clock = _Clock(found)
    spans = {task: clock.own(calls) for task, calls in match.calls.items()}
    wires = {start: clock.wire(match.calls[start]) for start in program.starts}
    zero, until = match.begin, match.end
    if clock.on_device:  # from the first kernel to the last
        known = [span for span in (*spans.values(), *wires.values()) if span]
        zero = min((begin for begin, _ in known), default=zero)
        until = max((end for _, end in known), default=until)
    ready, begin, end, exposed = (np.zeros(len(program), dtype=np.int64) for _ in range(4))
    follows = _follows(order, spans, until)
    free = 0  # when the compute stream is done with what came before
    fused: list[list[int]] = []
    last = -1  # the compute task before, or a collective's
    for i, follow in zip(order.tasks, follows, strict=True):
        task, span = program.tasks[i], spans.get(i)
        since, to = (free, free) if span is None else (max(t - zero, free) for t in span)
        if task.kind is Kind.WAIT and clock.on_device:
            wire = wires[task.start]
            to = max(free, min(wire[1], follow) - zero) if wire else free
        elif task.kind is Kind.COMPUTE and i not in match.calls:
            if last < 0 or last in match.calls:
                to = max(follow - zero, since)
                fused.append([])
            fused[-1].append(i)
        ready[i], begin[i], end[i] = since, since, to
        if task.kind is Kind.WAIT:
            exposed[task.start] += to - since
        last = last if task.kind is Kind.VIEW else i
        free = max(free, to)
    for start in program.starts:
        wire, waits = wires[start], program.waits_of[start]
        last = int(end[waits[0]]) if waits else free
        begin[start] = min(max(wire[0] - zero, ready[start]) if wire else ready[start], last)
        end[start] = max(min(wire[1] - zero, last) if wire else last, begin[start])
    memory = profile_memory(program, order)
    total = max(until - zero, free)
    timeline = Timeline(program, order, ready, begin, end, exposed, memory, total)
    notes = {
        FUSED: sum(map(len, fused)),
        UNSEEN: sum(wire is None for wire in wires.values()),
    }
    return replace(
        measured_of(name, 0, timeline),
        rank=found.rank,
        skipped={reason: count for reason, count in notes.items() if count},
        fused=tuple(map(tuple, fused)),
    )


def _follows(order: Order, spans: dict[int, tuple[int, int] | None], until: int) -> list[int]:
    """Per place, when the first task after it begins that takes the compute stream's time."""
    found = []
    for i in reversed(order.tasks):
        found.append(until)
        span = spans.get(i)
        until = until if span is None else span[0]
    return found[::-1]
