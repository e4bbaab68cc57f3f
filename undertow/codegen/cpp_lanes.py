"""Reductions over loops that are not contiguous: rows of columns that lie side by side."""

from __future__ import annotations

from undertow.codegen.cpp_inner import element_body
from undertow.codegen.cpp_ops import C_TYPES
from undertow.codegen.cpp_scan import loop_head, start_scans
from undertow.codegen.cpp_text import LANES, Text
from undertow.loops.sizes import ceil_div


def write_lanes(text: Text, begin: str, end: str) -> None:
    """Reductions over loops that are not contiguous, a block of columns at a time."""
    kernel = text.kernel
    blocks = ceil_div(kernel.lane, LANES)
    text.open(f"for (i64 unit = {begin}; unit < {end}; ++unit) {{")
    text.put(f"const i64 row = unit / {blocks}L, l0 = unit % {blocks}L * {LANES};")
    text.put(f"const i64 ln = l0 + {LANES} < {kernel.lane}L ? {LANES} : {kernel.lane}L - l0;")
    text.outer_indices("row")
    text.scratch_rows()
    done = -1
    for at, this in enumerate(text.passes):
        done = _lane_values(text, done, at)
        for number in this.reduces:
            kind = C_TYPES[kernel.code[number].dtype]
            text.put(f"{kind} v{number}[{LANES}];")
            if text.is_arg(number):
                best = C_TYPES[kernel.code[kernel.code[number].args[0]].dtype]
                text.put(f"{best} m{number}[{LANES}];")
            first = text.identity(number)
            text.put(f"for (i64 l = 0; l < ln; ++l) v{number}[l] = {first};")
            if text.is_arg(number):
                worst = text.worst(number)
                text.put(f"for (i64 l = 0; l < ln; ++l) m{number}[l] = {worst};")
        start_scans(text, this)
        for k, size in enumerate(kernel.inner):
            text.open(loop_head(text, f"i{k}", "0", f"{size}L"))
        if not any(text.is_arg(number) for number in this.reduces):
            text.put("#pragma omp simd")
        text.open("for (i64 l = 0; l < ln; ++l) {")
        element_body(text, this, f"({text.linear()}) * {LANES} + l")
        for number in this.reduces:
            text.accumulate(number, "v")
        text.close()
        for _ in kernel.inner:
            text.close()
    _lane_values(text, done, 1 << 30)
    rows = [store for store in kernel.stores if store.level == "row"]
    if rows:
        text.put("#pragma omp simd")
        text.open("for (i64 l = 0; l < ln; ++l) {")
        for store in rows:
            text.put(text.store_text(store) + ";")
        text.close()
    text.close()


def _lane_values(text: Text, done: int, upto: int) -> int:
    kernel = text.kernel
    ready = [
        number
        for number, instr in enumerate(kernel.code)
        if kernel.levels[number] == "row"
        and done < kernel.phases[number] <= upto
        and instr.op not in ("const", "reduce")
    ]
    if not ready:
        return upto
    for number in ready:
        text.put(f"{C_TYPES[kernel.code[number].dtype]} v{number}[{LANES}];")
    text.put("#pragma omp simd")
    text.open("for (i64 l = 0; l < ln; ++l) {")
    for number in ready:
        line = text.definition(number, kernel.code[number])
        text.put(f"v{number}[l] = " + line.split(" = ", 1)[1])
    text.close()
    return upto
