"""Loops in which something runs along: each iteration takes over from the one before it.

Where little else is done, all of it fits between one step of the running result and the next, and
the loop is one that is not vectorised. Else it runs a chunk at a time: vectors compute what goes
into the running results, a loop in order runs them along the chunk, and vectors use them. What goes
from one to the other is in arrays of a chunk, which stay in the nearest cache. In both a few rows
run abreast where they can: each step of a running sum waits for the last of its own row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undertow.codegen.cpp_inner import finish_iteration, iteration
from undertow.codegen.cpp_ops import C_TYPES
from undertow.codegen.cpp_text import LANES, Text
from undertow.loops.dtypes import HALVES, NBYTES, is_float
from undertow.loops.ir import product
from undertow.loops.passes import Pass, weight
from undertow.loops.sizes import hint_of

CHUNK = 512  # elements
LIGHT = 16  # additions that run beside a running sum for nothing
ABREAST = 4  # rows, as many as an addition takes cycles
LEAST_ABREAST = 16  # elements of rows that run abreast,
MOST_ABREAST = 40  # and instructions, of which there will be as many for each
DEAR = 12  # of one instruction, which vectors do much faster
_AGAIN = ("load", "index", "const")  # what is cheaper to have again than to keep


def scans_of(text: Text, this: Pass) -> list[int]:
    """Running results that a pass computes."""
    code = text.kernel.code
    return [n for n in this.body if code[n].op == "scan" and n not in this.reloads]


def start_scans(text: Text, this: Pass) -> None:
    """What is carried along, before the loops of a pass begin."""
    before = [n for other in _until(text, this) for n in scans_of(text, other)]
    width = LANES if text.kernel.kind == "lanes" else ABREAST if text.is_abreast else 0
    for number in scans_of(text, this):
        carried = [("r", text.wide(number), text.identity(number))]
        if text.is_arg(number):
            best = C_TYPES[text.kernel.code[text.kernel.code[number].args[0]].dtype]
            carried.append(("m", best, text.worst(number)))
        for prefix, kind, first in carried:
            name = f"{prefix}{number}"
            if width:
                if number not in before:
                    text.put(f"{kind} {name}[{width}] __attribute__((aligned(64)));")
                text.put(f"for (i64 l = 0; l < {width}; ++l) {name}[l] = {first};")
            else:
                text.put(f"{'' if number in before else kind + ' '}{name} = {first};")


def _until(text: Text, this: Pass) -> list[Pass]:
    at = next(k for k, other in enumerate(text.passes) if other is this)
    return text.passes[:at]


def loop_head(text: Text, name: str, low: str, high: str) -> str:
    """The head of a loop that runs in the direction of the kernel's running results."""
    if text.kernel.is_reversed:
        return f"for (i64 {name} = {high} - 1; {name} >= {low}; --{name}) {{"
    return f"for (i64 {name} = {low}; {name} < {high}; ++{name}) {{"


def scanned_loops(text: Text, this: Pass, low: str, high: str, sums: list[int]) -> None:
    """The inner loops of a pass that has running results."""
    inner = text.kernel.inner
    last = len(inner) - 1
    for k in range(last):
        text.open(loop_head(text, f"i{k}", "0", f"{inner[k]}L"))
    text.far = True  # sines of any angle: to look for large ones would be to run along twice
    if _is_light(text, this, sums):
        text.open(loop_head(text, f"i{last}", low, high))
        _open_rows(text)
        iteration(text, this, [])
        _close_rows(text)
        text.close()
    else:
        _chunks(text, this, low, high, sums)
    text.far = False
    for _ in range(last):
        text.close()


def rows_abreast(text: Text, begin: str, end: str) -> str:
    """Loops over several rows at a time, where that pays; where the rows that are left begin."""
    if not _runs_abreast(text):
        return begin
    kernel, (this,) = text.kernel, text.passes
    text.put(f"i64 rest = {begin};")
    text.open(f"for (; rest + {ABREAST} <= {end}; rest += {ABREAST}) {{")
    for at in range(len(kernel.outer)):
        text.put(f"i64 w{at}[{ABREAST}];")
    text.open(f"for (i64 k = 0; k < {ABREAST}; ++k) {{")
    text.outer_indices("(rest + k)")
    for at in range(len(kernel.outer)):
        text.put(f"w{at}[k] = o{at};")
    text.close()
    text.is_abreast = True
    start_scans(text, this)
    scanned_loops(text, this, "0", f"{kernel.inner[0]}L", [])
    text.is_abreast = False
    text.close()
    return "rest"


def _open_rows(text: Text) -> None:
    """The rows that run abreast, one after the other; nothing if it is one. Written out one by one
    they do not keep compilers from making vectors of each."""
    if text.is_abreast:
        text.put(f"#pragma GCC unroll {ABREAST}")
        text.open(f"for (i64 k = 0; k < {ABREAST}; ++k) {{")
        for at in range(len(text.kernel.outer)):
            text.put(f"const i64 o{at} = w{at}[k];")


def _close_rows(text: Text) -> None:
    if text.is_abreast:
        text.close()


def _runs_abreast(text: Text) -> bool:
    """Whether rows have running sums or products of floats, which wait, and no values of rows."""
    kernel = text.kernel
    if len(text.passes) != 1 or len(kernel.inner) != 1 or kernel.late or text.row_stores():
        return False
    this, code = text.passes[0], kernel.code
    scans = [code[n] for n in scans_of(text, this)]
    rows = hint_of(product(kernel.outer))
    is_fit = rows >= ABREAST and hint_of(kernel.inner[0]) >= LEAST_ABREAST
    is_fit = is_fit and len(this.body) <= MOST_ABREAST
    is_waiting = any(is_float(i.dtype) and i.data.kind in ("sum", "prod") for i in scans)
    is_plain = all(i.data.kind != "logsumexp" for i in scans) and not this.reduces
    per_row = (
        level == "row" and instr.op != "const"
        for instr, level in zip(code, kernel.levels, strict=True)
    )
    return is_fit and is_waiting and is_plain and not any(per_row)


def _is_light(text: Text, this: Pass, sums: list[int]) -> bool:
    """Whether all of a pass runs beside its running results. Sums do not: they are more exact in
    vectors, each lane of which sums a part. Nor do conversions of 16-bit floats."""
    code = text.kernel.code
    loads = [code[n].data for n in this.body if code[n].op == "load" and n not in this.reloads]
    touched = (*loads, *(store.buffer for store in this.stores))
    if any(text.buffers[number].dtype in HALVES for number in touched):
        return False
    found = [1 if n in this.reloads else weight(code[n]) for n in this.body if code[n].op != "scan"]
    return not sums and sum(found) <= LIGHT and max(found, default=0) < DEAR


@dataclass(slots=True)
class Stage:
    """What vectors do with a chunk between running results."""

    body: list[int] = field(default_factory=list)
    reloads: set[int] = field(default_factory=set)  # from arrays of the chunk
    scans: list[int] = field(default_factory=list)  # that run after it


def plan_stages(text: Text, this: Pass) -> list[Stage]:
    """The stages of a pass: each has what the running results after it need, the last the rest."""
    code, mine = text.kernel.code, set(this.body)
    depths: dict[int, int] = {}
    for number in this.body:
        args = () if number in this.reloads else code[number].args
        below = max((depths[arg] for arg in args if arg in mine), default=0)
        depths[number] = below + (code[number].op == "scan" and number not in this.reloads)
    stages = [Stage() for _ in range(max(depths.values(), default=0) + 1)]
    roots: list[list[int]] = [[] for _ in stages]
    for number in scans_of(text, this):
        stages[depths[number] - 1].scans.append(number)
        args = code[number].args
        roots[depths[number] - 1].extend(n for n in args if not is_at_hand(text, this, n))
    roots[-1] += [store.value for store in this.stores] + this.keeps
    roots[-1] += [arg for n in (*this.reduces, *this.late) for arg in code[n].args]
    done: set[int] = set()
    for stage, wanted in zip(stages, roots, strict=True):
        needed: set[int] = set()
        stack = list(wanted)
        while stack:
            number = stack.pop()
            if number not in mine or number in needed:
                continue
            needed.add(number)
            if number in this.reloads:
                continue
            is_done = number in done and code[number].op not in _AGAIN
            if is_done or code[number].op == "scan":
                stage.reloads.add(number)
            else:
                stack.extend(code[number].args)
        stage.body = sorted(needed)
        done |= needed
    return stages


def is_at_hand(text: Text, this: Pass, number: int) -> bool:
    """Whether a running result takes a value straight from memory."""
    instr = text.kernel.code[number]
    if instr.op == "load" and text.buffers[instr.data].dtype in HALVES:
        return False
    return instr.op in _AGAIN and number not in this.reloads


def chunk_arrays(text: Text, this: Pass) -> list[int]:
    """Values that are in an array of the chunk: running results, what goes into them, and what
    several stages need."""
    code, mine = text.kernel.code, set(this.body)
    scans = scans_of(text, this)
    args = [arg for n in scans for arg in code[n].args if arg in mine]
    found = {*scans, *(arg for arg in args if not is_at_hand(text, this, arg))}
    for stage in plan_stages(text, this):
        found |= stage.reloads
    return sorted(found)


def chunk_nbytes(text: Text) -> int:
    """Bytes of a thread's stack that arrays of chunks take, at most."""
    found = [n for this in text.passes if scans_of(text, this) for n in chunk_arrays(text, this)]
    return ABREAST * CHUNK * sum(NBYTES[text.kernel.code[n].dtype] for n in found)


def _chunks(text: Text, this: Pass, low: str, high: str, sums: list[int]) -> None:
    code, stages, arrays = text.kernel.code, plan_stages(text, this), chunk_arrays(text, this)
    last = len(text.kernel.inner) - 1
    text.open("{")
    for number in arrays:
        kind = C_TYPES[code[number].dtype]
        rows = f"[{ABREAST}]" if text.is_abreast else ""
        text.put(f"{kind} z{number}{rows}[{CHUNK}] __attribute__((aligned(64)));")
    if text.kernel.is_reversed:
        text.open(f"for (i64 h = {high}, g; h > {low}; h = g) {{")
        text.put(f"g = h - {CHUNK} > {low} ? h - {CHUNK} : {low};")
    else:
        text.open(f"for (i64 g = {low}, h; g < {high}; g = h) {{")
        text.put(f"h = g + {CHUNK} < {high} ? g + {CHUNK} : {high};")
    for number in sums:
        text.put(text.accumulator(number, "t"))
    for stage in stages:
        is_last = stage is stages[-1]
        if is_last or set(stage.body) - stage.reloads:
            _vectors(text, this, stage, is_last, sums)
        if stage.scans:
            text.open(loop_head(text, f"i{last}", "g", "h"))
            _open_rows(text)
            args = {arg for number in stage.scans for arg in code[number].args}
            for arg in sorted(args.intersection(this.body)):
                if is_at_hand(text, this, arg):
                    text.put(text.definition(arg, code[arg]))
            for number in stage.scans:
                _run_along(text, number, arrays)
            _close_rows(text)
            text.close()
    for number in sums:
        text.fold(number, "r", "t")
    text.close()
    text.close()


def _vectors(text: Text, this: Pass, stage: Stage, is_last: bool, sums: list[int]) -> None:
    """What a stage does with each element of a chunk; stores and sums wait for the last, so that
    nothing is written over that another stage reads."""
    code, arrays = text.kernel.code, chunk_arrays(text, this)
    last = len(text.kernel.inner) - 1
    _open_rows(text)
    clauses = text.simd_clauses(sums if is_last else [])
    if clauses is not None:
        text.put(f"#pragma omp simd{clauses}")
    text.open(f"for (i64 i{last} = g; i{last} < h; ++i{last}) {{")
    for number in stage.body:
        kind = C_TYPES[code[number].dtype]
        if number in stage.reloads:
            text.put(f"const {kind} v{number} = {_in_chunk(text, number)};")
        elif number in this.reloads:
            text.put(f"const {kind} v{number} = s{number}[{text.linear()}];")
        else:
            text.put(text.definition(number, code[number]))
    for number in stage.body:
        if number in arrays and number not in stage.reloads and not is_last:
            text.put(f"{_in_chunk(text, number)} = v{number};")
    if is_last:
        finish_iteration(text, this, sums)
    text.close()
    _close_rows(text)


def _in_chunk(text: Text, number: int) -> str:
    """A value's place in its array."""
    return f"z{number}{text.lane()}[i{len(text.kernel.inner) - 1} - g]"


def _run_along(text: Text, number: int, arrays: list[int]) -> None:
    instr = text.kernel.code[number]
    args = [_in_chunk(text, arg) if arg in arrays else text.name(arg) for arg in instr.args]
    text.put(text.carried(number, args))
    text.put(f"{_in_chunk(text, number)} = ({C_TYPES[instr.dtype]})r{number}{text.lane()};")
