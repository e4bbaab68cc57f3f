"""A Timeline as a Chrome trace, to open in Perfetto (ui.perfetto.dev) or chrome://tracing.

One process; a thread per stream and one for exposed time; counters for live memory and for the
bytes in flight of each group; an arrow from each collective to the wait for it. Times are in
microseconds, as the format has it, with nanoseconds behind the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from undertow.program import COMPUTE_STREAM, HOST_STREAM, Collective, Kind, Timeline, Work
from undertow.report.curves import in_flight_curve, memory_curve

Event = dict[str, Any]

_PID = 1
_EXPOSED_TID = 2
_FIRST_GROUP_TID = 3
_HOST_TID = 10_000  # below all groups

# Among events of one time: arrows to the next slice come before it, slices before what is bound to
# them. Perfetto reads events in this order.
_PHASE_ORDER = {"f": 0, "X": 1, "s": 2, "C": 3}


def timeline_to_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as plain data for `json.dumps`.

    >>> from undertow.program import parse_program, simulate
    >>> trace = timeline_to_trace(simulate(parse_program("matmul compute 1.5us")))
    >>> [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    [('matmul', 0.0, 1.5)]
    """
    events = [*_slices(timeline), *_arrows(timeline), *_counters(timeline)]
    events.sort(key=_sort_key)
    return {
        "displayTimeUnit": "ns",
        "otherData": {"program": timeline.program.name, "total_ns": timeline.total_ns},
        "traceEvents": [*_names(timeline), *events],
    }


def _sort_key(event: Event) -> tuple[float, int, float]:
    phase = 2 if event.get("bp") == "e" else _PHASE_ORDER[event["ph"]]
    return event["ts"], phase, -event.get("dur", 0.0)


def _us(ns: int) -> float:
    return ns / 1000


def _tid(stream: int) -> int:
    if stream == COMPUTE_STREAM:
        return 1
    return _HOST_TID if stream == HOST_STREAM else _FIRST_GROUP_TID + stream - 2


def _names(timeline: Timeline) -> Iterator[Event]:
    """Metadata: what processes and threads are called and the order in which they are shown."""
    yield _metadata("process_name", 0, name=timeline.program.name)
    threads = [(_tid(i), stream.name) for i, stream in enumerate(timeline.program.streams)]
    threads.append((_EXPOSED_TID, "exposed"))
    for tid, name in sorted(threads):
        yield _metadata("thread_name", tid, name=name)
        yield _metadata("thread_sort_index", tid, sort_index=tid)


def _metadata(what: str, tid: int, **args: object) -> Event:
    return {"ph": "M", "pid": _PID, "tid": tid, "ts": 0.0, "name": what, "args": args}


def _slices(timeline: Timeline) -> Iterator[Event]:
    for i, task in enumerate(timeline.program.tasks):
        begin, end = int(timeline.begin[i]), int(timeline.end[i])
        is_held = task.kind is Kind.WAIT and end > begin
        if task.kind is Kind.VIEW or (task.kind is Kind.WAIT and not is_held):
            continue
        yield _slice(task.name, task.kind.value, _tid(task.stream), begin, end, _args(timeline, i))
        if is_held:
            name = timeline.program.tasks[task.start].name
            yield _slice(name, "exposed", _EXPOSED_TID, begin, end, {"wait": task.name})
    yield from _held_at_end(timeline)


def _held_at_end(timeline: Timeline) -> Iterator[Event]:
    """Collectives that nobody waits for expose the end of the step."""
    for start, waits in timeline.program.waits_of.items():
        exposed = int(timeline.exposed[start])
        if not waits and exposed:
            end = int(timeline.end[start])
            name = timeline.program.tasks[start].name
            yield _slice(name, "exposed", _EXPOSED_TID, end - exposed, end, {"wait": ""})


def _slice(name: str, category: str, tid: int, begin: int, end: int, args: Event) -> Event:
    return {
        "ph": "X",
        "pid": _PID,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": _us(begin),
        "dur": _us(end - begin),
        "args": args,
    }


def _args(timeline: Timeline, i: int) -> Event:
    """What a click on a slice shows."""
    task = timeline.program.tasks[i]
    args: Event = {"kind": task.kind.value}
    if task.module:
        args["module"] = task.module
    if isinstance(task.work, Collective):
        args |= {"collective": task.work.kind.value, "dtype": task.work.dtype}
        if task.work.nbytes is not None:
            args["bytes"] = task.work.nbytes
    elif isinstance(task.work, Work):
        args |= {"op": task.work.op, "flops": task.work.flops, "bytes": task.work.nbytes}
    if task.priced_by:
        args["priced_by"] = task.priced_by
    if task.kind is Kind.START:
        args["exposed_us"] = _us(int(timeline.exposed[i]))
        args["queued_us"] = _us(int(timeline.begin[i] - timeline.ready[i]))
    if task.kind is Kind.WAIT:
        args["start"] = timeline.program.tasks[task.start].name
    return args


def _arrows(timeline: Timeline) -> Iterator[Event]:
    """From each collective to its waits. A wait of no duration has no slice: its arrow binds to
    what runs next on the compute stream."""
    program = timeline.program
    number = 0
    for start, waits in program.waits_of.items():
        for wait in waits:
            if timeline.end[start] == timeline.begin[start]:
                continue
            number += 1
            common: Event = {"pid": _PID, "cat": "collective", "name": "wait", "id": number}
            yield common | {
                "ph": "s",
                "tid": _tid(program.tasks[start].stream),
                "ts": _us(int(timeline.begin[start])),
            }
            arrival: Event = {"ph": "f", "tid": _tid(COMPUTE_STREAM)}
            if timeline.end[wait] > timeline.begin[wait]:
                arrival["bp"] = "e"  # bind to the slice around this time
            # A wait can be reached before its collective has left the queue; an arrow cannot go
            # back in time.
            at = max(int(timeline.begin[wait]), int(timeline.begin[start]))
            yield common | arrival | {"ts": _us(at)}


def _counters(timeline: Timeline) -> Iterator[Event]:
    for at, nbytes in memory_curve(timeline):
        yield _counter("live memory", at, nbytes)
    for index, stream in enumerate(timeline.program.streams[2:], 2):
        for at, nbytes in in_flight_curve(timeline, index):
            yield _counter(f"in flight: {stream.name}", at, nbytes)


def _counter(name: str, at: int, nbytes: int) -> Event:
    return {
        "ph": "C",
        "pid": _PID,
        "tid": 0,
        "name": name,
        "ts": _us(at),
        "args": {"bytes": nbytes},
    }
