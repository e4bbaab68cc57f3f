"""A kernel as a C++ function.

The function runs a part [begin, end) of the outer loops, so that threads can share them. Rows are
numbered; the inner loops run once per pass under `#pragma omp simd`. Late reductions have partial
results per part, and a second function combines them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undertow.codegen.cpp_ops import C_TYPES, STORED, expression, kept, literal, loaded
from undertow.loops.dtypes import NBYTES, is_float
from undertow.loops.ir import Buffer, Instr, product
from undertow.loops.kernel import Kernel, KernelStore
from undertow.loops.passes import Pass, plan_passes, work

BLOCK = 4096  # elements summed in float32 before the sum goes to a wider one
LANES = 64  # contiguous columns reduced together
WORTH = 100_000  # element additions that pay for one more thread
ROWS_PER_PART = 64  # at least, in late reductions
MOST_PARTS = 64

_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}
_SIMD = {"sum": "+", "prod": "*", "max": "max", "min": "min", "any": "|", "all": "&"}


def worth(additions: int) -> int:
    """The number of threads that work of this size pays for."""
    return max(1, min(additions // WORTH, 1 << 20))


@dataclass(slots=True)
class Source:
    """A kernel's C++ text, the same for kernels of the same structure, and how to launch it."""

    text: str  # with @ for the function's name
    buffers: tuple[int, ...]  # the buffer behind each pointer
    total: int  # iterations to share among threads
    work: int  # element additions
    scratch: int  # bytes of partial results, behind a last pointer
    combine: bool  # whether there is a @_end to run after


def kernel_source(kernel: Kernel, buffers: list[Buffer]) -> Source:
    """Generate a kernel."""
    return _Writer(kernel, buffers).write()


@dataclass(slots=True)
class _Writer:
    kernel: Kernel
    buffers: list[Buffer]
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    slots: dict[int, int] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    parts: int = 0
    in_order: bool = False  # whether iterations of the innermost loop may depend on each other

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
        flat = flat and not self.passes[0].reduces and not lanes and not self.row_stores()
        total = kernel.inner[0] if flat else rows
        if lanes:
            total *= -(-kernel.lane // LANES)
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
        blocks = -(-size // LANES) if apart else 1
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

    def row_stores(self) -> bool:
        return any(store.level == "row" for store in self.kernel.stores)

    def count_parts(self, total: int, flat: bool) -> int:
        each = BLOCK * 4 if flat else ROWS_PER_PART
        return max(1, min(MOST_PARTS, total // each))

    def declare(self) -> None:
        for number, slot in self.slots.items():
            kind = STORED[self.buffers[number].dtype]
            self.put(f"{kind} *const p{slot} = ({kind} *)P[{slot}];")

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
                self.put(f"{kind} s{value}[{width}] __attribute__((aligned(64)));")

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
        blocked = bool(sums) and count > BLOCK
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
        kernel = self.kernel
        last = len(kernel.inner) - 1
        clauses = self.simd_clauses(sums)
        if clauses is not None and kernel.inner:
            self.put(f"#pragma omp simd{clauses}")
        if kernel.inner:
            self.open(f"for (i64 i{last} = {low}; i{last} < {high}; ++i{last}) {{")
        else:
            self.open("{")
        self.element_body(this, self.linear())
        for number in sums:
            self.accumulate(number, "t")
        for number in this.late:
            if self.is_column(number):
                arg = self.name(kernel.code[number].args[0])
                target = f"a{number}[{self.linear()}]"
                self.put(f"{target} = {self.combined(number, target, arg)};")
        self.close()

    def element_body(self, this: Pass, place: str) -> None:
        kernel = self.kernel
        for number in this.body:
            instr = kernel.code[number]
            if number in this.reloads:
                kind = C_TYPES[instr.dtype]
                self.put(f"const {kind} v{number} = s{number}[{place}];")
            else:
                self.put(self.definition(number, instr))
        for number in this.keeps:
            self.put(f"s{number}[{place}] = v{number};")
        for store in this.stores:
            self.put(self.store_text(store) + ";")

    def linear(self) -> str:
        """The place within a row."""
        inner = self.kernel.inner
        if not inner:
            return "0"
        text = f"i{len(inner) - 1}"
        step = inner[-1]
        for k in range(len(inner) - 2, -1, -1):
            text += f" + i{k} * {step}L"
            step *= inner[k]
        return text

    # -- lanes ------------------------------------------------------------------------------

    def lanes(self, begin: str, end: str) -> None:
        """Reductions over loops that are not contiguous, a block of columns at a time."""
        kernel = self.kernel
        blocks = -(-kernel.lane // LANES)
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

    # -- values -----------------------------------------------------------------------------

    def name(self, number: int) -> str:
        instr = self.kernel.code[number]
        if instr.op == "const":
            return literal(instr.data, instr.dtype)
        if self.kernel.kind == "lanes" and self.kernel.levels[number] == "row":
            return f"v{number}[l]"
        return f"v{number}"

    def definition(self, number: int, instr: Instr) -> str:
        kind = C_TYPES[instr.dtype]
        args = [self.name(arg) for arg in instr.args]
        if instr.op == "load":
            assert instr.strides is not None
            slot, stored = self.slots[instr.data], self.buffers[instr.data].dtype
            text = loaded(f"p{slot}", self.address(instr.strides, instr.offset), stored)
        elif instr.op == "mload":
            assert instr.strides is not None
            slot, stored = self.slots[instr.data], self.buffers[instr.data].dtype
            text = loaded(f"p{slot}", self.address(instr.strides, instr.offset), stored)
            text = f"{args[0]} ? {text} : ({kind})0"
        elif instr.op == "gather":
            assert instr.strides is not None
            buffer, steps = instr.data
            address = self.address(instr.strides, instr.offset)
            for arg, step in zip(args, steps, strict=True):
                address += f" + {arg} * {step}L"
            text = loaded(f"p{self.slots[buffer]}", address, self.buffers[buffer].dtype)
        elif instr.op == "index":
            assert instr.strides is not None
            text = self.address(instr.strides, instr.offset)
            text = text if kind == "i64" else f"({kind})({text})"
        else:
            source = self.kernel.code[instr.args[0]].dtype if instr.args else ""
            text = expression(instr, args, source)
        return f"const {kind} v{number} = {text};"

    def address(self, strides: tuple[int, ...], offset: int) -> str:
        kernel = self.kernel
        terms = []
        for k, stride in enumerate(strides):
            if not stride:
                continue
            if k < len(kernel.outer):
                name = f"o{k}"
            elif k < len(kernel.outer) + len(kernel.inner):
                name = f"i{k - len(kernel.outer)}"
            else:
                name = "(l0 + l)"
            terms.append(name if stride == 1 else f"{name} * {stride}L")
        if offset or not terms:
            terms.append(f"{offset}L")
        return " + ".join(terms)

    def store_text(self, store: KernelStore) -> str:
        slot, stored = self.slots[store.buffer], self.buffers[store.buffer].dtype
        address = self.address(store.strides, store.offset)
        for arg, step in store.terms:
            address += f" + {self.name(arg)} * {step}L"
        if store.mode == "add":
            target = f"p{slot}[{address}]"
            dtype = self.kernel.code[store.value].dtype
            return f"{target} = " + expression(
                Instr("add", dtype), [target, self.name(store.value)], dtype
            )
        return f"p{slot}[{address}] = {kept(self.name(store.value), stored)}"

    # -- reductions -------------------------------------------------------------------------

    def kind_of(self, number: int) -> str:
        data = self.kernel.code[number].data
        return str(data[0] if isinstance(data, tuple) else data)

    def is_arg(self, number: int) -> bool:
        return self.kind_of(number).startswith("arg")

    def is_column(self, number: int) -> bool:
        """Whether a late reduction keeps one sum per place in the row."""
        data = self.kernel.code[number].data
        return isinstance(data, tuple) and data[1] == "column"

    def identity(self, number: int) -> str:
        instr = self.kernel.code[number]
        kind = self.kind_of(number)
        if kind in _IDENTITY:
            return literal(_IDENTITY[kind], instr.dtype)
        if kind in ("max", "min"):
            return worst_of(kind, instr.dtype)
        return "0"

    def worst(self, number: int) -> str:
        instr = self.kernel.code[self.kernel.code[number].args[0]]
        return worst_of(self.kind_of(number)[3:], instr.dtype)

    def wide(self, number: int) -> str:
        """The type of a sum that has run over many elements."""
        instr = self.kernel.code[number]
        large = product(self.kernel.inner) > BLOCK or number in self.kernel.late
        if instr.dtype == "f32" and self.kind_of(number) == "sum" and large:
            return "f64"
        return "i32" if instr.dtype == "bool" else C_TYPES[instr.dtype]

    def accumulator(self, number: int, prefix: str) -> str:
        instr = self.kernel.code[number]
        kind = self.wide(number) if prefix == "r" else C_TYPES[instr.dtype]
        kind = "i32" if instr.dtype == "bool" else kind
        text = f"{kind} {prefix}{number} = {self.identity(number)};"
        if self.kind_of(number) in ("max", "min") and is_float(instr.dtype):
            text += f" i32 {prefix}{number}n = 0;"
        if self.is_arg(number):
            best = C_TYPES[self.kernel.code[instr.args[0]].dtype]
            text += f" {best} {prefix}{number}m = {self.worst(number)};"
        return text

    def simd_clauses(self, sums: list[int]) -> str | None:
        if any(self.is_arg(number) for number in sums) or self.in_order:
            return None
        text = ""
        for number in sums:
            kind = self.kind_of(number)
            text += f" reduction({_SIMD[kind]}:t{number})"
            if kind in ("max", "min") and is_float(self.kernel.code[number].dtype):
                text += f" reduction(|:t{number}n)"
        return text

    def accumulate(self, number: int, prefix: str) -> None:
        """Take one element into an accumulator."""
        kernel = self.kernel
        instr = kernel.code[number]
        arg = self.name(instr.args[0])
        lanes = kernel.kind == "lanes"
        target = f"v{number}[l]" if lanes else f"{prefix}{number}"
        kind = self.kind_of(number)
        if self.is_arg(number):
            best = f"m{number}[l]" if lanes else f"{prefix}{number}m"
            self.take_place(arg, self.name(instr.args[1]), best, target, kind)
        elif kind in ("max", "min") and is_float(instr.dtype) and not lanes:
            sign = ">" if kind == "max" else "<"
            self.put(f"{target} = {arg} {sign} {target} ? {arg} : {target};")
            self.put(f"{target}n |= {arg} != {arg};")
        else:
            self.put(f"{target} = {self.combined(number, target, arg)};")

    def take_place(self, arg: str, place: str, best: str, target: str, kind: str) -> None:
        sign = ">" if kind == "argmax" else "<"
        better = f"{arg} {sign} {best} || ({arg} != {arg} && {best} == {best})"
        equal = f"({arg} == {best} || ({arg} != {arg} && {best} != {best})) && {place} < {target}"
        self.put(f"if ({better} || ({equal})) {{ {best} = {arg}; {target} = {place}; }}")

    def combined(self, number: int, old: str, new: str) -> str:
        kind, dtype = self.kind_of(number), self.kernel.code[number].dtype
        if kind in ("sum", "prod"):
            name = "add" if kind == "sum" else "mul"
            if is_float(dtype):
                return f"{old} {'+' if kind == 'sum' else '*'} {new}"
            return expression(Instr(name, dtype), [old, new], dtype)
        if kind in ("max", "min"):
            return f"u_{kind}<{C_TYPES[dtype]}>({old}, {new})"
        return f"{old} {'|' if kind == 'any' else '&'} {new}"

    def fold(self, number: int, into: str, prefix: str) -> None:
        """Add what a run of the innermost loop has found to what the row has."""
        instr = self.kernel.code[number]
        source, target = f"{prefix}{number}", f"{into}{number}"
        kind = self.kind_of(number)
        if self.is_arg(number):
            self.take_place(f"{source}m", source, f"{target}m", target, kind)
        elif kind in ("max", "min") and is_float(instr.dtype):
            nan = f"{source}n ? ({C_TYPES[instr.dtype]})NAN_ : {source}"
            self.put(f"{target} = {self.combined(number, target, f'({nan})')};")
        else:
            self.put(f"{target} = {self.combined(number, target, source)};")

    # -- late reductions --------------------------------------------------------------------

    def late_width(self, number: int) -> int:
        return product(self.kernel.inner) if self.is_column(number) else 1

    def late_places(self) -> dict[int, int]:
        """Where each late reduction's partial results begin, in units of 8 bytes."""
        found, at = {}, 0
        for number in self.kernel.late:
            found[number] = at
            at += self.parts * self.late_width(number)
        return found

    def start_late(self) -> None:
        slot = len(self.slots)
        for number, at in self.late_places().items():
            first = self.identity(number)
            if not self.is_column(number):
                self.put(self.accumulator(number, "r"))
                continue
            kind = C_TYPES[self.kernel.code[number].dtype]
            width = self.late_width(number)
            self.put(f"{kind} *const a{number} = ({kind} *)(P[{slot}] + 8 * {at}L)")
            self.put(f"  + part * {width}L;")
            self.put(f"for (i64 j = 0; j < {width}L; ++j) a{number}[j] = {first};")

    def finish_late(self) -> None:
        slot = len(self.slots)
        for number, at in self.late_places().items():
            if not self.is_column(number):
                kind = self.wide(number)
                self.put(f"(({kind} *)(P[{slot}] + 8 * {at}L))[part] = r{number};")

    def combine(self) -> str:
        """The function that turns partial results into results."""
        kernel = self.kernel
        self.lines = []
        self.declare()
        slot = len(self.slots)
        columns = any(self.is_column(number) for number in kernel.late)
        if columns:
            for k, size in enumerate(kernel.inner):
                self.open(f"for (i64 i{k} = 0; i{k} < {size}L; ++i{k}) {{")
        for columnar in (True, False):
            self.combine_kind(columnar, slot)
            if columnar and columns:
                for _ in kernel.inner:
                    self.close()
        return "static void @_end(char **P) {\n" + "\n".join(self.lines) + "\n}\n"

    def combine_kind(self, columnar: bool, slot: int) -> None:
        kernel = self.kernel
        mine: set[int] = set()
        for number, instr in enumerate(kernel.code):
            if kernel.levels[number] != "late":
                continue
            if number in kernel.late:
                if self.is_column(number) == columnar:
                    mine.add(number)
                    self.combine_one(number, slot)
            elif any(arg in mine for arg in instr.args):
                mine.add(number)
                self.put(self.definition(number, instr))
        for store in kernel.stores:
            if store.level == "late" and store.value in mine:
                self.put(self.store_text(store) + ";")

    def combine_one(self, number: int, slot: int) -> None:
        at = self.late_places()[number]
        dtype = self.kernel.code[number].dtype
        column = self.is_column(number)
        kind = C_TYPES[dtype] if column else self.wide(number)
        base = f"(({kind} *)(P[{slot}] + 8 * {at}L))"
        place = f"part * {self.late_width(number)}L + {self.linear()}" if column else "part"
        self.put(f"{kind} w{number} = {self.identity(number)};")
        self.put(f"for (i64 part = 0; part < {self.parts}; ++part)")
        item = f"{base}[{place}]"
        nan_safe = self.combined(number, f"w{number}", item)
        self.put(f"  w{number} = {nan_safe};")
        self.put(f"const {C_TYPES[dtype]} v{number} = ({C_TYPES[dtype]})w{number};")

    # -- text -------------------------------------------------------------------------------

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def open(self, line: str) -> None:
        self.put(line)
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.put("}")


def worst_of(kind: str, dtype: str) -> str:
    """What every element is at least as good as."""
    if is_float(dtype):
        return f"({dtype}){'-' if kind == 'max' else ''}INF"
    if dtype == "bool":
        return "false" if kind == "max" else "true"
    if dtype == "u8":
        return "0" if kind == "max" else "255"
    bits = 8 * NBYTES[dtype] - 1
    return literal(-(1 << bits) if kind == "max" else (1 << bits) - 1, dtype)
