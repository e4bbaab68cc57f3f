"""A kernel as a C++ function.

The function runs a part [begin, end) of the outer loops, so that threads can share them. Rows are
numbered; the inner loops run once per pass under `#pragma omp simd`. Late reductions have partial
results per part, and a second function combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.codegen.cpp_ops import C_TYPES, STORED
from undertow.codegen.cpp_text import BLOCK, Text, is_long
from undertow.codegen.cpp_tiles import TILE, Tiles, find_tiles
from undertow.loops.dtypes import NBYTES
from undertow.loops.ir import Buffer, product
from undertow.loops.kernel import Kernel
from undertow.loops.passes import Pass, plan_passes, work
from undertow.loops.sizes import ceil_div, declared, hint_of, is_symbolic

LANES = 64  # contiguous columns reduced together
WORTH = 100_000  # element additions that pay for one more thread
ROWS_PER_PART = 64  # at least, in late reductions
MOST_PARTS = 64
PARTS_IF_UNKNOWN = 8  # at least, where the number of rows is a symbol
ANGLES = 1024  # sines and cosines between two looks at how large their arguments are
VECTOR = 16  # float32 in the widest register
LONGEST_WITH_TAIL = 2048  # elements of a row; in longer ones what is left does not count
_LIBRARY_CALLS = """
tan asin acos atan sinh cosh asinh acosh atanh erfc lgamma atan2 hypot fmod remainder floordiv
gather bound
"""
_LIBRARY = frozenset(_LIBRARY_CALLS.split())
"""Calls that are not vectors in any case, or would be made for what is not there."""


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
            self.row(begin, end)
        elif lanes:
            self.lanes(begin, end)
        else:
            self.open(f"for (i64 row = {begin}; row < {end}; ++row) {{")
            self.outer_indices("row")
            self.row("0", f"{kernel.inner[-1]}L" if kernel.inner else "1")
            self.close()
        if kernel.late:
            self.finish_late()
            self.close()
        text = "static void @(char **P, i64 begin, i64 end) {\n" + "\n".join(self.lines) + "\n}\n"
        scratch = 0
        if kernel.late:
            scratch = sum(8 * self.parts * self.late_width(number) for number in kernel.late)
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
        """Threads share the innermost loop where it is free of computed addresses."""
        kernel = self.kernel
        store = next(s for s in kernel.stores if s.mode)
        apart = all(kernel.levels[arg] == "row" for arg, _ in store.terms)
        apart = apart and bool(kernel.inner) and store.strides[-1] != 0
        apart = apart and not self.row_stores()
        size = kernel.inner[-1] if kernel.inner else 1
        blocks = ceil_div(size, LANES) if apart else 1
        self.in_order = not apart
        self.declare()
        self.put(f"const i64 low = begin * {LANES};")
        self.put(f"const i64 high = end * {LANES} < {size}L ? end * {LANES} : {size}L;")
        low, high = ("low", "high") if apart else ("0", f"{size}L")
        self.open(f"for (i64 row = 0; row < {product(kernel.outer)}L; ++row) {{")
        self.outer_indices("row")
        self.row(low, high)
        self.close()
        text = "static void @(char **P, i64 begin, i64 end) {\n" + "\n".join(self.lines) + "\n}\n"
        return Source(text, tuple(self.slots), blocks, work(kernel), 0, False)

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
        self.row("ti", "te")
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

    def row_stores(self) -> bool:
        return any(store.level == "row" for store in self.kernel.stores)

    def count_parts(self, total: int, flat: bool) -> int:
        """A power of two, which threads can share evenly."""
        each = BLOCK * 4 if flat else ROWS_PER_PART
        least = PARTS_IF_UNKNOWN if is_symbolic(total) else 1
        wanted = max(least, min(MOST_PARTS, hint_of(total) // each))
        return int(1 << (wanted.bit_length() - 1))

    def outer_indices(self, row: str) -> None:
        sizes = self.kernel.outer
        left = row
        for k in range(len(sizes) - 1, 0, -1):
            self.put(f"const i64 o{k} = {left} % {sizes[k]}L, u{k} = {left} / {sizes[k]}L;")
            left = f"u{k}"
        if sizes:
            self.put(f"const i64 o0 = {left};")

    # -- rows -------------------------------------------------------------------------------

    def row(self, low: str, high: str) -> None:
        """All passes over one row, and the values of the row between them."""
        kernel = self.kernel
        self.scratch_rows()
        done = -1
        for at, this in enumerate(self.passes):
            done = self.row_values(done, at)
            self.run_pass(this, low, high)
        self.row_values(done, 1 << 30)
        for store in kernel.stores:
            if store.level == "row":
                self.put(self.store_text(store) + ";")

    def scratch_rows(self) -> None:
        width = product(self.kernel.inner) * (LANES if self.kernel.kind == "lanes" else 1)
        for this in self.passes:
            for value in this.keeps:
                kind = C_TYPES[self.kernel.code[value].dtype]
                if is_symbolic(width):  # compilers do not align arrays whose size they do not know
                    self.put(f"{kind} h{value}[{width} + 64];")
                    self.put(
                        f"{kind} *const s{value} = ({kind} *)(((u64)h{value} + 63) / 64 * 64);"
                    )
                    continue
                self.put(f"{kind} s{value}[{width}] __attribute__((aligned(64)));")

    def stack_nbytes(self) -> int:
        width = product(self.kernel.inner) * (LANES if self.kernel.kind == "lanes" else 1)
        kept = [self.kernel.code[value].dtype for this in self.passes for value in this.keeps]
        return width * sum(NBYTES[dtype] for dtype in kept) if kept else 0

    def row_values(self, done: int, upto: int) -> int:
        """Instructions of the row that are possible before pass `upto`, and not yet written."""
        kernel = self.kernel
        for number, instr in enumerate(kernel.code):
            ready = done < kernel.phases[number] <= upto
            if kernel.levels[number] == "row" and ready and instr.op not in ("const", "reduce"):
                self.put(self.definition(number, instr))
        return upto

    def run_pass(self, this: Pass, low: str, high: str) -> None:
        if not (this.stores or this.reduces or this.late or this.keeps):
            return
        kernel = self.kernel
        inner = kernel.inner
        for number in this.reduces:
            self.put(self.accumulator(number, "r"))
        for k, size in enumerate(inner[:-1]):
            self.open(f"for (i64 i{k} = 0; i{k} < {size}L; ++i{k}) {{")
        sums = [*this.reduces, *(n for n in this.late if not self.is_column(n))]
        count = inner[-1] if inner else 1
        blocked = bool(sums) and is_long(count)
        if blocked:
            self.open(f"for (i64 b = {low}; b < {high}; b += {BLOCK}) {{")
            self.put(f"const i64 e = b + {BLOCK} < {high} ? b + {BLOCK} : {high};")
            low, high = "b", "e"
        for number in sums:
            self.put(self.accumulator(number, "t"))
        self.innermost(this, low, high, sums)
        for number in sums:
            self.fold(number, "r", "t")
        if blocked:
            self.close()
        for _ in inner[:-1]:
            self.close()
        for number in this.reduces:
            kind = C_TYPES[kernel.code[number].dtype]
            self.put(f"const {kind} v{number} = ({kind})r{number};")

    def innermost(self, this: Pass, low: str, high: str, sums: list[int]) -> None:
        """The innermost loop of a pass. Where it has sines or cosines, a block at a time, and in
        another way if a block has an angle that the fast ones cannot do."""
        angles = self.angles(this)
        if not angles or not self.kernel.inner:
            self.far = bool(angles)
            self.innermost_loop(this, low, high, sums)
            self.far = False
            return
        last = len(self.kernel.inner) - 1
        self.open(f"for (i64 g = {low}; g < {high}; g += {ANGLES}) {{")
        self.put(f"const i64 h = g + {ANGLES} < {high} ? g + {ANGLES} : {high};")
        self.put("i32 far = 0;")
        self.put("#pragma omp simd reduction(|:far)")
        self.open(f"for (i64 i{last} = g; i{last} < h; ++i{last}) {{")
        self.values(this, self.sources(this, angles), self.linear())
        for angle in angles:
            self.put(f"far |= is_far({self.name(angle)});")
        self.close()
        self.open("if (far) {")
        self.far = True
        self.innermost_loop(this, "g", "h", sums)
        self.far = False
        self.close()
        self.open("else {")
        self.innermost_loop(this, "g", "h", sums)
        self.close()
        self.close()

    def angles(self, this: Pass) -> list[int]:
        """Arguments of the float32 sines and cosines that a pass computes."""
        code = self.kernel.code
        found = [
            code[number].args[0]
            for number in this.body
            if code[number].op in ("sin", "cos")
            and code[number].dtype == "f32"
            and number not in this.reloads
        ]
        return list(dict.fromkeys(found))

    def sources(self, this: Pass, wanted: list[int]) -> list[int]:
        """What a pass must compute to have these values, in order."""
        mine, found = set(this.body), set[int]()
        stack = list(wanted)
        while stack:
            number = stack.pop()
            if number in mine and number not in found:
                found.add(number)
                if number not in this.reloads:
                    stack.extend(self.kernel.code[number].args)
        return sorted(found)

    def innermost_loop(self, this: Pass, low: str, high: str, sums: list[int]) -> None:
        kernel = self.kernel
        last = len(kernel.inner) - 1
        clauses = self.simd_clauses(sums)
        if not kernel.inner:
            self.open("{")
            self.iteration(this, sums)
            self.close()
            return
        if self.has_open_tail(clauses, low, high):
            assert clauses is not None
            self.open_tail(this, sums, clauses, high)
            return
        whole, rest = self.tail(clauses, low, high)
        if whole:
            if clauses is not None:
                self.put(f"#pragma omp simd{clauses}")
            end = f"{whole}L" if rest else high
            self.open(f"for (i64 i{last} = {low}; i{last} < {end}; ++i{last}) {{")
            self.iteration(this, sums)
            self.close()
        if rest:
            self.put(f"#pragma omp simd{clauses}")
            self.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
            self.open(f"if (lane < {rest}) {{")
            self.put(f"const i64 i{last} = {whole}L + lane;")
            self.iteration(this, sums)
            self.close()
            self.close()

    def tail(self, clauses: str | None, low: str, high: str) -> tuple[int, int]:
        """How many iterations fill vectors, and how many are left for a masked one. What is left of
        a row is a loop of a fixed length under a condition, which compilers turn into masks."""
        count = self.kernel.inner[-1]
        fixed = (low, high) == ("0", f"{count}L") and clauses is not None
        fixed = fixed and not is_symbolic(count)
        if not fixed or count > LONGEST_WITH_TAIL or count % VECTOR < 2 or not self.is_maskable():
            return count, 0
        return count - count % VECTOR, count % VECTOR

    def has_open_tail(self, clauses: str | None, low: str, high: str) -> bool:
        """Whether what is left of a row of symbolic length should be masked."""
        count = self.kernel.inner[-1]
        whole = (low, high) == ("0", f"{count}L") and clauses is not None
        short = is_symbolic(count) and hint_of(count) <= LONGEST_WITH_TAIL
        return whole and short and self.is_maskable()

    def open_tail(self, this: Pass, sums: list[int], clauses: str, high: str) -> None:
        """The innermost loop over a length that is not known yet: vectors, then a masked one."""
        last = len(self.kernel.inner) - 1
        self.open("{")
        self.put(f"const i64 rest = {high} % {VECTOR}, full = rest > 1 ? {high} - rest : {high};")
        self.put(f"#pragma omp simd{clauses}")
        self.open(f"for (i64 i{last} = 0; i{last} < full; ++i{last}) {{")
        self.iteration(this, sums)
        self.close()
        self.open(f"if (full < {high}) {{")
        self.put(f"#pragma omp simd{clauses}")
        self.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
        self.open("if (lane < rest) {")
        self.put(f"const i64 i{last} = full + lane;")
        self.iteration(this, sums)
        for _ in range(4):
            self.close()

    def is_maskable(self) -> bool:
        """Whether a body is all float32, for which a vector is one register."""
        kernel = self.kernel
        types = {
            instr.dtype
            for instr, level in zip(kernel.code, kernel.levels, strict=True)
            if level == "element" and instr.op != "index"
        }
        stored = {self.buffers[number].dtype for number in (*kernel.reads, *kernel.writes)}
        plain = all(instr.op not in _LIBRARY for instr in kernel.code)
        return types <= {"f32", "bool", "i32"} and stored <= {"f32", "i64"} and plain

    def iteration(self, this: Pass, sums: list[int]) -> None:
        """What the innermost loop does for one element."""
        kernel = self.kernel
        self.element_body(this, self.linear())
        for number in sums:
            self.accumulate(number, "t")
        for number in this.late:
            if self.is_column(number):
                arg = self.name(kernel.code[number].args[0])
                target = f"a{number}[{self.linear()}]"
                self.put(f"{target} = {self.combined(number, target, arg)};")

    def values(self, this: Pass, numbers: list[int], place: str) -> None:
        for number in numbers:
            instr = self.kernel.code[number]
            if number in this.reloads:
                kind = C_TYPES[instr.dtype]
                self.put(f"const {kind} v{number} = s{number}[{place}];")
            else:
                self.put(self.definition(number, instr))

    def element_body(self, this: Pass, place: str) -> None:
        self.values(this, this.body, place)
        for number in this.keeps:
            self.put(f"s{number}[{place}] = v{number};")
        for store in this.stores:
            self.put(self.store_text(store) + ";")

    # -- lanes ------------------------------------------------------------------------------

    def lanes(self, begin: str, end: str) -> None:
        """Reductions over loops that are not contiguous, a block of columns at a time."""
        kernel = self.kernel
        blocks = ceil_div(kernel.lane, LANES)
        self.open(f"for (i64 unit = {begin}; unit < {end}; ++unit) {{")
        self.put(f"const i64 row = unit / {blocks}L, l0 = unit % {blocks}L * {LANES};")
        self.put(f"const i64 ln = l0 + {LANES} < {kernel.lane}L ? {LANES} : {kernel.lane}L - l0;")
        self.outer_indices("row")
        self.scratch_rows()
        done = -1
        for at, this in enumerate(self.passes):
            done = self.lane_values(done, at)
            for number in this.reduces:
                kind = C_TYPES[kernel.code[number].dtype]
                self.put(f"{kind} v{number}[{LANES}];")
                if self.is_arg(number):
                    best = C_TYPES[kernel.code[kernel.code[number].args[0]].dtype]
                    self.put(f"{best} m{number}[{LANES}];")
                first = self.identity(number)
                self.put(f"for (i64 l = 0; l < ln; ++l) v{number}[l] = {first};")
                if self.is_arg(number):
                    worst = self.worst(number)
                    self.put(f"for (i64 l = 0; l < ln; ++l) m{number}[l] = {worst};")
            for k, size in enumerate(kernel.inner):
                self.open(f"for (i64 i{k} = 0; i{k} < {size}L; ++i{k}) {{")
            if not any(self.is_arg(number) for number in this.reduces):
                self.put("#pragma omp simd")
            self.open("for (i64 l = 0; l < ln; ++l) {")
            self.element_body(this, f"({self.linear()}) * {LANES} + l")
            for number in this.reduces:
                self.accumulate(number, "v")
            self.close()
            for _ in kernel.inner:
                self.close()
        self.lane_values(done, 1 << 30)
        rows = [store for store in kernel.stores if store.level == "row"]
        if rows:
            self.put("#pragma omp simd")
            self.open("for (i64 l = 0; l < ln; ++l) {")
            for store in rows:
                self.put(self.store_text(store) + ";")
            self.close()
        self.close()

    def lane_values(self, done: int, upto: int) -> int:
        kernel = self.kernel
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
            self.put(f"{C_TYPES[kernel.code[number].dtype]} v{number}[{LANES}];")
        self.put("#pragma omp simd")
        self.open("for (i64 l = 0; l < ln; ++l) {")
        for number in ready:
            text = self.definition(number, kernel.code[number])
            self.put(f"v{number}[l] = " + text.split(" = ", 1)[1])
        self.close()
        return upto
