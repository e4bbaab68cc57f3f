"""A kernel as a C++ function.

The function runs a part [begin, end) of the outer loops, so that threads can share them. Rows are
numbered; the inner loops run once per pass under `#pragma omp simd`. Late reductions have partial
results per part, and a second function combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.codegen.cpp_lanes import write_lanes
from undertow.codegen.cpp_ops import STORED
from undertow.codegen.cpp_rows import write_row
from undertow.codegen.cpp_scan import chunk_nbytes, rows_abreast
from undertow.codegen.cpp_text import BLOCK, LANES, Text
from undertow.codegen.cpp_tiles import TILE, Tiles, find_tiles
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Buffer, product
from undertow.loops.kernel import Kernel, KernelStore
from undertow.loops.passes import plan_passes, work
from undertow.loops.sizes import ceil_div, declared, hint_of, is_symbolic

WORTH = 100_000  # element additions that pay for one more thread
ROWS_PER_PART = 64  # at least, in late reductions
MOST_PARTS = 64
PARTS_IF_UNKNOWN = 8  # at least, where the number of rows is a symbol


def worth(additions: int) -> int:
    """The number of threads that work of this size pays for."""
    return max(1, min(additions // WORTH, 1 << 20))


def worth_text(additions: int) -> str:
    """The same in C++, also of work whose size is a symbol."""
    if is_symbolic(additions):
        return f"{additions}L / {WORTH}L"
    return f"{worth(additions)}L"


@dataclass(slots=True)
class Source:
    """A kernel's C++ text, the same for kernels of the same structure, and how to launch it."""

    text: str  # with @ for the function's name
    buffers: tuple[int, ...]  # the buffer behind each pointer
    total: int  # iterations to share among threads
    work: int  # element additions
    scratch: int  # bytes of partial results, behind a pointer after the buffers'
    combine: bool  # whether there is a @_end to run after
    sized: bool = False  # whether a last pointer leads to the values of symbolic sizes,
    is_symbolic: bool = False  # or its launch alone needs them
    stack: int = 0  # bytes of rows that it keeps on a thread's stack


def kernel_source(kernel: Kernel, buffers: list[Buffer]) -> Source:
    """Generate a kernel."""
    writer = _Writer(kernel, buffers)
    source = writer.write()
    source.text, source.sized = declared(source.text, len(source.buffers) + bool(source.scratch))
    source.is_symbolic = source.sized or is_symbolic(source.work)
    source.stack = writer.stack_nbytes()
    return source


class _Writer(Text):
    """Writes the loops."""

    # -- the function -----------------------------------------------------------------------

    def write(self) -> Source:
        kernel = self.kernel
        for number in (*kernel.reads, *kernel.writes):
            self.slots.setdefault(number, len(self.slots))
        lanes = kernel.kind == "lanes"
        self.passes = plan_passes(kernel, LANES if lanes else 1)
        rows = product(kernel.outer)
        flat = not kernel.outer and len(kernel.inner) == 1 and len(self.passes) == 1
        if kernel.kind == "scatter":
            return self.scatter()
        tiles = find_tiles(kernel, self.buffers)
        if tiles is not None:
            return self.tiles(tiles)
        flat = flat and not self.passes[0].reduces and not lanes and not self.row_stores()
        flat = flat and not kernel.has_scan
        total = kernel.inner[0] if flat else rows
        if lanes:
            total *= ceil_div(kernel.lane, LANES)
        if kernel.late:
            self.parts = self.count_parts(total, flat)
        self.declare()
        begin, end = "begin", "end"
        if kernel.late:
            self.open("for (i64 part = begin; part < end; ++part) {")
            self.put(f"const i64 first = {total}L * part / {self.parts}, ")
            self.put(f"  last = {total}L * (part + 1) / {self.parts};")
            begin, end = "first", "last"
            self.start_late()
        if flat:
            write_row(self, begin, end)
        elif lanes:
            write_lanes(self, begin, end)
        else:
            begin = rows_abreast(self, begin, end)
            self.open(f"for (i64 row = {begin}; row < {end}; ++row) {{")
            self.outer_indices("row")
            write_row(self, "0", f"{kernel.inner[-1]}L" if kernel.inner else "1")
            self.close()
        if kernel.late:
            self.finish_late()
            self.close()
        text = "static void @(char **P, i64 begin, i64 end) {\n" + "\n".join(self.lines) + "\n}\n"
        scratch = 0
        if kernel.late:
            scratch = sum(map(self.late_nbytes, kernel.late))
            text += self.combine()
        return Source(
            text,
            tuple(self.slots),
            self.parts or total,
            work(kernel),
            scratch,
            bool(kernel.late),
        )

    def scatter(self) -> Source:
        """Threads share the innermost loop where it is free of computed addresses, or else the
        outermost one if what it writes in one iteration it writes in no other."""
        kernel = self.kernel
        store = next(s for s in kernel.stores if s.mode)
        apart = all(kernel.levels[arg] == "row" for arg, _ in store.terms)
        apart = apart and bool(kernel.inner) and store.strides[-1] != 0
        apart = apart and not self.row_stores()
        size = kernel.inner[-1] if kernel.inner else 1
        lines = 0 if apart or self.row_stores() else self.lines_apart(store)
        blocks = ceil_div(size, LANES) if apart else max(lines, 1)
        self.in_order = not apart
        self.declare()
        self.put(f"const i64 low = begin * {LANES};")
        self.put(f"const i64 high = end * {LANES} < {size}L ? end * {LANES} : {size}L;")
        low, high = ("low", "high") if apart else ("0", f"{size}L")
        rows = product(kernel.outer)
        first, last = "0", f"{rows}L"
        if lines:
            first, last = f"begin * {rows // lines}L", f"end * {rows // lines}L"
        self.open(f"for (i64 row = {first}; row < {last}; ++row) {{")
        self.outer_indices("row")
        write_row(self, low, high)
        self.close()
        text = "static void @(char **P, i64 begin, i64 end) {\n" + "\n".join(self.lines) + "\n}\n"
        return Source(text, tuple(self.slots), blocks, work(kernel), 0, False)

    def lines_apart(self, store: KernelStore) -> int:
        """How many iterations the outermost loop has, if no two of them write to one place."""
        kernel = self.kernel
        loops = (*kernel.outer, *kernel.inner)
        if not kernel.outer or any(is_symbolic(n) for n in (*loops, *store.strides)):
            return 0
        reach = sum(step * (n - 1) for step, n in zip(store.strides[1:], loops[1:], strict=False))
        for arg, step in store.terms:
            instr = kernel.code[arg]
            if instr.op not in ("bound", "within", "inside") or is_symbolic(instr.data):
                return 0
            reach += step * (instr.data - 1)
        return kernel.outer[0] if reach < store.strides[0] else 0

    def tiles(self, tiles: Tiles) -> Source:
        """Square tiles of the innermost loop and the one along which some loads are contiguous."""
        kernel = self.kernel
        count, width = kernel.outer[tiles.loop], kernel.inner[0]
        tall, wide = ceil_div(count, TILE), ceil_div(width, TILE)
        self.declare()
        self.open("for (i64 unit = begin; unit < end; ++unit) {")
        self.put(f"const i64 ti = unit % {wide}L * {TILE}, ua = unit / {wide}L;")
        self.put(f"const i64 ko = ua % {tall}L * {TILE}, ub = ua / {tall}L;")
        self.put(f"const i64 te = ti + {TILE} < {width}L ? ti + {TILE} : {width}L;")
        self.put(f"const i64 kn = ko + {TILE} < {count}L ? {TILE} : {count}L - ko;")
        left, total = "ub", tall * wide
        for k in range(len(kernel.outer) - 1, -1, -1):
            if k != tiles.loop:
                size = kernel.outer[k]
                self.put(f"const i64 o{k} = {left} % {size}L, u{k} = {left} / {size}L;")
                left, total = f"u{k}", total * size
        for number in tiles.loads:
            self.turn(number, tiles)
        self.open("for (i64 tk = 0; tk < kn; ++tk) {")
        self.put(f"const i64 o{tiles.loop} = ko + tk;")
        self.tiled = frozenset(tiles.loads)
        write_row(self, "ti", "te")
        self.close()
        self.close()
        text = "static void @(char **P, i64 begin, i64 end) {\n" + "\n".join(self.lines) + "\n}\n"
        return Source(text, tuple(self.slots), total, work(kernel), 0, False)

    def turn(self, number: int, tiles: Tiles) -> None:
        instr = self.kernel.code[number]
        assert instr.strides is not None
        kind = STORED[self.buffers[instr.data].dtype]
        start = self.address(instr.strides, instr.offset)
        start = start.replace(f"o{tiles.loop}", "ko").replace("i0", "ti")
        source = f"p{self.slots[instr.data]} + ({start}), {instr.strides[-1]}L"
        self.put(f"{kind} x{number}[{TILE * TILE}] __attribute__((aligned(64)));")
        self.put(f"turn_tile<{TILE}>({source}, x{number}, te - ti, kn);")

    def count_parts(self, total: int, flat: bool) -> int:
        """A power of two, which threads can share evenly."""
        each = BLOCK * 4 if flat else ROWS_PER_PART
        least = PARTS_IF_UNKNOWN if is_symbolic(total) else 1
        wanted = max(least, min(MOST_PARTS, hint_of(total) // each))
        return int(1 << (wanted.bit_length() - 1))

    def stack_nbytes(self) -> int:
        width = product(self.kernel.inner) * (LANES if self.kernel.kind == "lanes" else 1)
        kept = [self.kernel.code[value].dtype for this in self.passes for value in this.keeps]
        rows = width * sum(NBYTES[dtype] for dtype in kept) if kept else 0
        return rows + (chunk_nbytes(self) if self.kernel.kind == "rows" else 0)
