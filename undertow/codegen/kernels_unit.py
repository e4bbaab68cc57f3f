"""One C++ unit per graph: its kernels, and a function for each run of them and of products."""

from __future__ import annotations

from collections.abc import Collection

from undertow.codegen.cpp_kernel import worth, worth_text
from undertow.codegen.kernels_gemm import gemm_text
from undertow.codegen.kernels_panels import panel_lines
from undertow.codegen.kernels_plan import Launch, Schedule, output_buffers
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Extern
from undertow.loops.sizes import SIZES, declared

PART_CHARS = 30_000  # of each part, at least: about a second of compiler
CHUNK_STEPS = 64  # of a run in one function
CHECKS = (
    "bound(",
    "within(",
    "inside(",
    "divisor(",
)  # functions that may find what eager raises for
RUN_NBYTES = 1 << 20  # a run ends when so much would be made early or freed late because of it,
RUN_SHARE = 64  # or such a part of the peak, in a small graph,
LEAST_RUN_NBYTES = 1 << 16  # and not for less,
MADE_SHARE = 16  # unless such a part of the peak would be made beside as much that can be freed,
LEAST_MADE_NBYTES = 1 << 12  # which is worth a call if it is no less than this


def segments(schedule: Schedule) -> list[list[int] | int]:
    """Runs of launches and products (as lists of steps) and ATen calls (as steps), in order."""
    if schedule.runs is not None:
        return schedule.runs
    if schedule.apart:
        calls = (isinstance(step, Extern) for step in schedule.steps)
        return [
            at if is_call and at not in schedule.gemms else [at] for at, is_call in enumerate(calls)
        ]
    found: list[list[int] | int] = []
    made, freed, ours = _made(schedule), _freed(schedule), _freed(schedule, is_ours=True)
    for bundle in schedule.bundles:  # not to be torn apart
        for held in (made, freed, ours):
            held[bundle[0]] = sum(held.pop(at, 0) for at in bundle)
    inside = {at for bundle in schedule.bundles for at in bundle[1:]}
    total = idle = 0  # bytes that the run makes early or frees late, and that would be freed
    most = max(min(RUN_NBYTES, schedule.whole // RUN_SHARE), LEAST_RUN_NBYTES)
    beside = max(schedule.whole // MADE_SHARE, LEAST_MADE_NBYTES)
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Extern) and at not in schedule.gemms:
            found.append(at)
            continue
        last = found[-1] if found else None
        mine = made.get(at, 0) + freed.get(at, 0)
        fits = total + mine <= most and min(made.get(at, 0), idle) < beside
        if isinstance(last, list) and (at in inside or fits):
            last.append(at)
        else:
            found.append([at])
            total = idle = 0
        total, idle = total + mine, idle + ours.get(at, 0)
    return found


def _made(schedule: Schedule) -> dict[int, int]:
    """By step, the bytes of variables that it makes."""
    found: dict[int, int] = {}
    for number in schedule.fresh:
        at = schedule.first_write[number]
        found[at] = found.get(at, 0) + schedule.lowered.buffers[number].nbytes
    return found


def _freed(schedule: Schedule, is_ours: bool = False) -> dict[int, int]:
    """By step, the bytes of variables that nothing needs after it; all, or those that nobody else
    is thought to hold."""
    buffers, spare = schedule.lowered.buffers, schedule.lowered.spare
    kept = output_buffers(schedule.lowered) if is_ours else set()
    found: dict[int, int] = {}
    for number, at in schedule.last_use.items():
        is_variable = buffers[number].kind != "temp" or number in schedule.fresh
        if is_ours and buffers[number].kind == "input":
            is_variable = number in spare
        if is_variable and number not in kept and buffers[number].dtype in NBYTES:
            found[at] = found.get(at, 0) + buffers[number].nbytes
    return found


def pointer_slots(schedule: Schedule) -> dict[int, int]:
    """The place of each buffer that C++ touches in the table of pointers; scratch of step k is
    number of buffers + k."""
    slots: dict[int, int] = {number: k for k, number in enumerate(sorted(schedule.hosts))}
    slots.update({guest: slots[host] for guest, host in sorted(schedule.guests.items())})
    count = len(schedule.lowered.buffers)
    for at, step in enumerate(schedule.steps):
        if isinstance(step, Launch):
            for source in step.sources:
                for number in source.buffers:
                    slots.setdefault(number, len(slots))
            if at in schedule.scratch:
                slots.setdefault(count + at, len(slots))
            if any(source.is_symbolic for source in step.sources):
                slots.setdefault(SIZES, len(slots))
        elif at in schedule.gemms:
            for number in schedule.gemms[at].buffers:
                slots.setdefault(number, len(slots))
            if schedule.gemms[at].is_symbolic:
                slots.setdefault(SIZES, len(slots))
    return slots


def unit_text(schedule: Schedule) -> str:
    """The C++ of a whole graph, without the prelude."""
    pieces = [*_kernels(schedule), *_calls(schedule)]
    head = [gemm_text()] if schedule.gemms else []
    return "\n".join([*head, *(text.replace("@", name) for name, text in pieces)])


def unit_parts(schedule: Schedule, most: int) -> list[str]:
    """The same in up to `most` parts to be compiled at once and linked, without the prelude. A
    small unit is one part."""
    pieces = [*_kernels(schedule), *_calls(schedule)]
    count = min(most, sum(len(text) for _, text in pieces) // PART_CHARS)
    if count < 2:
        return [unit_text(schedule)]
    bins: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name, text in sorted(pieces, key=lambda piece: (-len(piece[1]), piece[0])):
        least = loads.index(min(loads))
        loads[least] += len(text)
        bins[least].append(_shared(text).replace("@", name))
    known = [line for name, text in pieces for line in _declarations(name, text)]
    head = [gemm_text()] if schedule.gemms else []
    return ["\n".join([*head, *known, *texts]) for texts in bins]


def _shared(text: str) -> str:
    """A function that other parts may call."""
    return text.replace("static void @", "SHARED void @").replace("static CALLS", "SHARED CALLS")


def _declarations(name: str, text: str) -> list[str]:
    if "static CALLS" in text:
        return [f"SHARED void {name}(char **);"]
    if "static void @(" not in text:
        return []  # called from outside
    end = [f"SHARED void {name}_end(char **);"] if "static void @_end(" in text else []
    return [f"SHARED void {name}(char **, i64, i64);", *end]


def _kernels(schedule: Schedule) -> list[tuple[str, str]]:
    """Each kernel's name, and its text with a comment on what it computes; @ is for the name."""
    comments: dict[str, list[str]] = {}
    for step in schedule.steps:
        if isinstance(step, Launch):
            origins = comments.setdefault(step.name, [])
            origins.append(" ".join(step.kernels[0].origins[:12]))
    found = []
    for name, text in schedule.texts.items():
        more = f" and {len(comments[name]) - 1} more" if len(comments[name]) > 1 else ""
        found.append((name, f"// {comments[name][0]}{more}\n{text}"))
    return found


def _calls(schedule: Schedule) -> list[tuple[str, str]]:
    """Functions that run the steps of a segment, by name; a long one calls others, since compilers
    take much longer for one large function than for many small ones."""
    slots = pointer_slots(schedule)
    lines = _step_lines(schedule, slots)
    found = []
    runs = [segment for segment in segments(schedule) if isinstance(segment, list)]
    for k, steps in enumerate(runs):
        body = [line for at in steps for line in lines.get(at, ())]
        if len(steps) > CHUNK_STEPS:
            body = []
            for j, first in enumerate(range(0, len(steps), CHUNK_STEPS)):
                chunk = steps[first : first + CHUNK_STEPS]
                inner = "\n".join(line for at in chunk for line in lines.get(at, ()))
                text = f"static CALLS void @(char **P) {{\n{inner}\n}}\n"
                found.append((f"seg{k}_{j}", declared(text, slots.get(SIZES, 0))[0]))
                body.append(f"  seg{k}_{j}(P);")
        body.append(f"  return {'take_fault()' if checking(schedule, steps) else '0'};")
        text = 'extern "C" CALLS i64 @(char **P) {\n' + "\n".join(body) + "\n}\n"
        found.append((f"seg{k}", declared(text, slots.get(SIZES, 0))[0]))
    return found


def checking(schedule: Schedule, steps: Collection[int]) -> list[str]:
    """The nodes in kernels of a run that may find what eager raises for."""
    found: list[str] = []
    for step in (schedule.steps[at] for at in steps):
        if isinstance(step, Launch) and any(c in schedule.texts[step.name] for c in CHECKS):
            found += [origin for kernel in step.kernels for origin in kernel.origins]
    return list(dict.fromkeys(found))


def _step_lines(schedule: Schedule, slots: dict[int, int]) -> dict[int, list[str]]:
    """The C++ that runs each step, or all of a bundle at its first."""
    combos = {combo[0]: combo for combo in schedule.combos}
    panels = {found.steps[0]: found for found in schedule.panels}
    inside = {at for bundle in schedule.bundles for at in bundle[1:]}
    found: dict[int, list[str]] = {}
    for at, step in enumerate(schedule.steps):
        if at in inside:
            continue
        if at in schedule.gemms:
            found[at] = schedule.gemms[at].lines(slots)
        elif isinstance(step, Extern):
            continue
        elif at in panels:
            found[at] = panel_lines(panels[at], step, schedule.gemms, slots)
        elif at in combos:
            found[at] = _combo([_launch(schedule, other) for other in combos[at]], slots)
        elif len(step.kernels) > 1:
            found[at] = _many(step, slots)
        else:
            found[at] = _single(schedule, at, step, slots)
    return found


def _launch(schedule: Schedule, at: int) -> Launch:
    step = schedule.steps[at]
    assert isinstance(step, Launch)
    return step


def _single(schedule: Schedule, at: int, step: Launch, slots: dict[int, int]) -> list[str]:
    source = step.sources[0]
    wanted = [slots[number] for number in source.buffers]
    if at in schedule.scratch:
        wanted.append(slots[len(schedule.lowered.buffers) + at])
    if source.sized:
        wanted.append(slots[SIZES])
    pointers = ", ".join(f"P[{slot}]" for slot in wanted)
    text = f"  {{ char *q[] = {{{pointers}}}; "
    text += f"run({step.name}, q, {source.total}L, {worth_text(source.work)});"
    if source.combine:
        text += f" {step.name}_end(q);"
    return [text + " }"]


def _tables(step: Launch, slots: dict[int, int]) -> tuple[list[str], int]:
    """A table of pointers and one of sizes for kernels of one structure, and how many there are."""
    table = ", ".join(str(slots[n]) for source in step.sources for n in source.buffers)
    ends, total = [], 0
    for source in step.sources:
        total += source.total
        ends.append(f"{total}L")
    return [
        f"  {{ static const i32 T[] = {{{table}}};",
        f"    static const i64 E[] = {{{', '.join(ends)}}};",
    ], len(ends)


def _many(step: Launch, slots: dict[int, int]) -> list[str]:
    """Kernels of one structure as one launch."""
    width = len(step.sources[0].buffers)
    threads = worth(sum(source.work for source in step.sources))
    tables, count = _tables(step, slots)
    return [*tables, f"    run_many({step.name}, P, T, {width}, E, {count}, {threads}L); }}"]


def _combo(members: list[Launch], slots: dict[int, int]) -> list[str]:
    """Launches that do not depend on each other in one parallel region."""
    lines, items = ["  {"], []
    for k, step in enumerate(members):
        if len(step.kernels) == 1:
            source = step.sources[0]
            wanted = [*source.buffers, *([SIZES] if source.sized else [])]
            pointers = ", ".join(f"P[{slots[number]}]" for number in wanted)
            lines.append(f"    char *q{k}[] = {{{pointers}}};")
            items.append(f"{{{step.name}, q{k}, {source.total}L}}")
            continue
        tables, count = _tables(step, slots)
        width, total = len(step.sources[0].buffers), sum(s.total for s in step.sources)
        lines += [line.replace("  { ", "    ").replace("[]", f"{k}[]") for line in tables]
        lines.append(f"    Many m{k} = {{{step.name}, P, T{k}, {width}, E{k}, {count}}};")
        items.append(f"{{part_many, (char **)&m{k}, {total}L}}")
    threads = worth_text(sum(source.work for step in members for source in step.sources))
    lines.append(f"    Item items[] = {{{', '.join(items)}}};")
    lines.append(f"    run_combo(items, {len(items)}, {threads}); }}")
    return lines
