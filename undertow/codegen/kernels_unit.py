"""One C++ unit per graph: its kernels, and a function for each run of launches."""

from __future__ import annotations

from undertow.codegen.cpp_kernel import worth
from undertow.codegen.kernels_plan import Launch, Schedule
from undertow.loops.ir import Extern


def segments(schedule: Schedule) -> list[list[int] | int]:
    """Runs of launches (as lists of steps) and extern calls (as steps), in order."""
    found: list[list[int] | int] = []
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Extern):
            found.append(at)
        elif found and isinstance(found[-1], list):
            found[-1].append(at)
        else:
            found.append([at])
    return found


def pointer_slots(schedule: Schedule) -> dict[int, int]:
    """The place of each buffer that kernels touch in the table of pointers; scratch of step k is
    number of buffers + k."""
    slots: dict[int, int] = {}
    count = len(schedule.lowered.buffers)
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Launch):
            for source in step.sources:
                for number in source.buffers:
                    slots.setdefault(number, len(slots))
            if at in schedule.scratch:
                slots.setdefault(count + at, len(slots))
    return slots


def unit_text(schedule: Schedule) -> str:
    """The C++ of a whole graph, without the prelude."""
    slots = pointer_slots(schedule)
    comments: dict[str, list[str]] = {}
    for step in schedule.steps:
        if isinstance(step, Launch):
            origins = comments.setdefault(step.name, [])
            origins.append(" ".join(step.kernels[0].origins[:12]))
    parts = []
    for name, text in schedule.texts.items():
        more = f" and {len(comments[name]) - 1} more" if len(comments[name]) > 1 else ""
        parts.append(f"// {comments[name][0]}{more}\n{text.replace('@', name)}")
    for k, segment in enumerate(s for s in segments(schedule) if isinstance(s, list)):
        parts.append(_segment(schedule, k, segment, slots))
    return "\n".join(parts)


def _segment(schedule: Schedule, k: int, steps: list[int], slots: dict[int, int]) -> str:
    lines = [f'extern "C" i64 seg{k}(char **P) {{']
    for at in steps:
        step = schedule.steps[at]
        assert isinstance(step, Launch)
        if len(step.kernels) > 1:
            lines += _many(step, slots)
        else:
            lines += _single(schedule, at, step, slots)
    checks = any("bound(" in schedule.texts[_launch(schedule, at).name] for at in steps)
    lines.append(f"  return {'take_bad_index()' if checks else '0'};")
    return "\n".join(lines) + "\n}\n"


def _launch(schedule: Schedule, at: int) -> Launch:
    step = schedule.steps[at]
    assert isinstance(step, Launch)
    return step


def _single(schedule: Schedule, at: int, step: Launch, slots: dict[int, int]) -> list[str]:
    source = step.sources[0]
    wanted = [slots[number] for number in source.buffers]
    if at in schedule.scratch:
        wanted.append(slots[len(schedule.lowered.buffers) + at])
    pointers = ", ".join(f"P[{slot}]" for slot in wanted)
    text = f"  {{ char *q[] = {{{pointers}}}; "
    text += f"run({step.name}, q, {source.total}L, {worth(source.work)}L);"
    if source.combine:
        text += f" {step.name}_end(q);"
    return [text + " }"]


def _many(step: Launch, slots: dict[int, int]) -> list[str]:
    """A table of pointers and sizes for kernels of one structure."""
    width = len(step.sources[0].buffers)
    table = ", ".join(str(slots[n]) for source in step.sources for n in source.buffers)
    ends, total = [], 0
    for source in step.sources:
        total += source.total
        ends.append(f"{total}L")
    threads = worth(sum(source.work for source in step.sources))
    return [
        f"  {{ static const i32 T[] = {{{table}}};",
        f"    static const i64 E[] = {{{', '.join(ends)}}};",
        f"    run_many({step.name}, P, T, {width}, E, {len(ends)}, {threads}L); }}",
    ]
