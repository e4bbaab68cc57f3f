"""The parts of a kernel's text: values, addresses, stores and reductions."""

from __future__ import annotations

from dataclasses import dataclass, field

from undertow.codegen.cpp_ops import C_TYPES, STORED, expression, kept, literal, loaded
from undertow.codegen.cpp_tiles import TILE
from undertow.loops.dtypes import NBYTES, is_float
from undertow.loops.ir import Buffer, Instr, product
from undertow.loops.kernel import Kernel, KernelStore
from undertow.loops.passes import Pass, reduced_over
from undertow.loops.sizes import is_symbolic

BLOCK = 4096  # elements summed in float32 before the sum goes to a wider one
LANES = 64  # contiguous columns reduced together
COLUMNS = 64  # whose partial sums are added together
_IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "logsumexp": float("-inf")}
_SIMD = {"sum": "+", "prod": "*", "max": "max", "min": "min", "any": "|", "all": "&"}


@dataclass(slots=True)
class Text:
    """Lines of one kernel, and what its values are called in them.

    Prefixes: p a buffer, v a value, s a scratch row, o and i the outer and inner loop variables,
    r a reduction over a row, t over one run of the innermost loop, a partial results of a late one,
    m extrema whose places are looked for, and b, g and f the best one, its place and what beats it.
    """

    kernel: Kernel
    buffers: list[Buffer]
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    slots: dict[int, int] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    parts: int = 0
    in_order: bool = False  # whether iterations of the innermost loop may depend on each other
    tiled: frozenset[int] = frozenset()  # loads whose tiles have been turned round
    narrow: frozenset[int] = frozenset()  # values of one byte that are kept in four until stored
    is_abreast: bool = False  # whether the loop being written is that of several rows
    far: bool = False  # whether the loop being written is for angles of any size

    def declare(self) -> None:
        for number, slot in self.slots.items():
            kind = STORED[self.buffers[number].dtype]
            self.put(f"{kind} *const p{slot} = ({kind} *)P[{slot}];")

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

    # -- loops ------------------------------------------------------------------------------

    def outer_indices(self, row: str) -> None:
        sizes = self.kernel.outer
        left = row
        for k in range(len(sizes) - 1, 0, -1):
            self.put(f"const i64 o{k} = {left} % {sizes[k]}L, u{k} = {left} / {sizes[k]}L;")
            left = f"u{k}"
        if sizes:
            self.put(f"const i64 o0 = {left};")

    def row_stores(self) -> bool:
        return any(store.level == "row" for store in self.kernel.stores)

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

    # -- values -----------------------------------------------------------------------------

    def name(self, number: int) -> str:
        instr = self.kernel.code[number]
        if instr.op == "const":
            return literal(instr.data, instr.dtype)
        if instr.op == "index" and not any(instr.strides or ()):  # a size, as a number
            return f"(({C_TYPES[instr.dtype]}){instr.offset}L)"
        if self.kernel.kind == "lanes" and self.kernel.levels[number] == "row":
            return f"v{number}[l]"
        return f"v{number}"

    def definition(self, number: int, instr: Instr) -> str:
        kind = C_TYPES[instr.dtype]
        args = [self.name(arg) for arg in instr.args]
        if instr.op == "scan":
            lane = self.lane()
            return f"{self.carried(number, args)} const {kind} v{number} = ({kind})r{number}{lane};"
        if instr.op == "load":
            assert instr.strides is not None
            slot, stored = self.slots[instr.data], self.buffers[instr.data].dtype
            if number in self.tiled:
                text = loaded(f"x{number}", f"(tk * {TILE} + i0 - ti)", stored)
            else:
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
            careful = self.far or self.kernel.kind != "rows"
            careful = careful or self.kernel.levels[number] != "element"
            if instr.op in ("sin", "cos") and careful:
                text = text.replace("u_", "far_", 1)
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
        value = self.name(store.value)
        if store.mode not in ("", "set"):
            dtype = self.kernel.code[store.value].dtype
            old = loaded(f"p{slot}", address, stored)
            value = f"({expression(Instr(store.mode, dtype), [old, value], dtype)})"
        return f"p{slot}[{address}] = {kept(value, stored)}"

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

    def best_type(self, number: int) -> str:
        """The type of the extremum whose place is looked for."""
        return self.kernel.code[self.kernel.code[number].args[0]].dtype

    def worst(self, number: int) -> str:
        return worst_of(self.kind_of(number)[3:], self.best_type(number))

    def wide(self, number: int) -> str:
        """The type of a sum that has run over many elements."""
        instr = self.kernel.code[number]
        if instr.op == "scan":
            return C_TYPES[instr.data.wide]
        inner, over = self.kernel.inner, reduced_over(instr)
        if over:
            blocks = self.kernel.blocks
            inner = inner[:blocks] if over == "blocks" else inner[blocks:]
        large = is_long(product(inner)) or number in self.kernel.late
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
            best = C_TYPES[self.best_type(number)]
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

    def lane(self) -> str:
        """Which of several running results side by side is meant."""
        return "[l]" if self.kernel.kind == "lanes" else "[k]" if self.is_abreast else ""

    def carried(self, number: int, args: list[str]) -> str:
        """A running result takes one element; of equals the last is the best, as in eager."""
        lane = self.lane()
        target, kind = f"r{number}{lane}", self.kind_of(number)
        if kind == "logsumexp":
            return f"{target} = log_add_exp(({self.wide(number)}){args[0]}, {target});"
        if kind in ("sum", "prod"):
            return f"{target} = {self.combined(number, target, args[0])};"
        best = f"m{number}{lane}" if self.is_arg(number) else target
        sign = ">=" if kind.endswith("max") else "<="
        better = f"({args[0]} {sign} {best}) | ({args[0]} != {args[0]})"
        text = f"{target} = {better} ? {args[-1]} : {target};"
        return f"{text} {best} = {better} ? {args[0]} : {best};" if self.is_arg(number) else text

    def take_place(self, arg: str, place: str, best: str, target: str, kind: str) -> None:
        better = is_better(arg, place, best, target, kind)
        self.put(f"if ({better}) {{ {best} = {arg}; {target} = {place}; }}")

    def take_column(self, number: int, target: str, arg: str, place: str = "") -> None:
        """Take one element into the result of its column. Where an extremum is, is found without a
        branch: columns are vectors."""
        if not self.is_arg(number):
            self.put(f"{target} = {self.combined(number, target, arg)};")
            return
        best, value = f"m{target[1:]}", C_TYPES[self.best_type(number)]
        self.put(f"const {value} b{number} = {best}; const i64 g{number} = {target};")
        better = is_better(arg, place, f"b{number}", f"g{number}", self.kind_of(number))
        self.put(f"const bool f{number} = {better};")
        self.put(f"{best} = f{number} ? {arg} : b{number};")
        self.put(f"{target} = f{number} ? {place} : g{number};")

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

    def late_nbytes(self, number: int) -> int:
        """Bytes of a late reduction's partial results, a multiple of 8. Narrow types have
        4 bytes each; the place of an extremum has the extremum behind all places."""
        narrow = self.is_column(number) and NBYTES[self.kernel.code[number].dtype] <= 4
        each = 4 if narrow and self.parts % 2 == 0 else 16 if self.is_arg(number) else 8
        return each * self.parts * self.late_width(number)

    def late_places(self) -> dict[int, int]:
        """Where each late reduction's partial results begin, in bytes."""
        found, at = {}, 0
        for number in self.kernel.late:
            found[number] = at
            at += self.late_nbytes(number)
        return found

    def start_late(self) -> None:
        for number in self.kernel.late:
            if not self.is_column(number):
                self.put(self.accumulator(number, "r"))
                continue
            width = self.late_width(number)
            kind = C_TYPES[self.kernel.code[number].dtype]
            self.start_columns(f"a{number}", kind, self.partial(number, kind), width)
            self.put(f"for (i64 j = 0; j < {width}L; ++j) a{number}[j] = {self.identity(number)};")
            if self.is_arg(number):
                kind = C_TYPES[self.best_type(number)]
                self.start_columns(f"m{number}", kind, self.partial_best(number), width)
                self.put(f"for (i64 j = 0; j < {width}L; ++j) m{number}[j] = {self.worst(number)};")

    def start_columns(self, name: str, kind: str, table: str, width: int) -> None:
        self.put(f"{kind} *const {name} = {table}")
        self.put(f"  + part * {width}L;")

    def finish_late(self) -> None:
        for number in self.kernel.late:
            if not self.is_column(number):
                self.put(f"{self.partial(number, self.wide(number))}[part] = r{number};")
                if self.is_arg(number):
                    self.put(f"{self.partial_best(number)}[part] = r{number}m;")

    def combine(self) -> str:
        """The function that turns partial results into results."""
        self.lines = []
        self.declare()
        if any(self.is_column(number) for number in self.kernel.late):
            self.combine_columns()
        singles = [number for number in self.kernel.late if not self.is_column(number)]
        for number in singles:
            self.combine_parts(number)
        self.late_values(singles, "")
        return "static void @_end(char **P) {\n" + "\n".join(self.lines) + "\n}\n"

    def combine_parts(self, number: int) -> None:
        kind = self.wide(number)
        self.put(f"{kind} w{number} = {self.identity(number)};")
        item = f"{self.partial(number, kind)}[part]"
        if self.is_arg(number):
            self.put(f"{C_TYPES[self.best_type(number)]} w{number}m = {self.worst(number)};")
            self.open(f"for (i64 part = 0; part < {self.parts}; ++part) {{")
            best = f"{self.partial_best(number)}[part]"
            self.take_place(best, item, f"w{number}m", f"w{number}", self.kind_of(number))
            self.close()
            return
        self.put(f"for (i64 part = 0; part < {self.parts}; ++part)")
        self.put(f"  w{number} = {self.combined(number, f'w{number}', item)};")

    def combine_columns(self) -> None:
        """Results of columns: a block of them at a time, so that rows of parts are vectors."""
        inner = self.kernel.inner
        last = len(inner) - 1
        columns = [number for number in self.kernel.late if self.is_column(number)]
        for k, size in enumerate(inner[:-1]):
            self.open(f"for (i64 i{k} = 0; i{k} < {size}L; ++i{k}) {{")
        self.open(f"for (i64 c = 0; c < {inner[-1]}L; c += {COLUMNS}) {{")
        self.put(f"const i64 n = c + {COLUMNS} < {inner[-1]}L ? {COLUMNS} : {inner[-1]}L - c;")
        for number in columns:
            kind, first = C_TYPES[self.kernel.code[number].dtype], self.identity(number)
            self.start_block(f"w{number}", kind, first)
            if self.is_arg(number):
                kind, first = C_TYPES[self.best_type(number)], self.worst(number)
                self.start_block(f"m{number}", kind, first)
            self.open(f"for (i64 part = 0; part < {self.parts}; ++part) {{")
            self.put("#pragma omp simd")
            self.open("for (i64 j = 0; j < n; ++j) {")
            self.put(f"const i64 i{last} = c + j;")
            place = f"part * {self.late_width(number)}L + {self.linear()}"
            items = [f"{self.partial(number, C_TYPES[self.kernel.code[number].dtype])}[{place}]"]
            if self.is_arg(number):
                items = [f"{self.partial_best(number)}[{place}]", *items]
            self.take_column(number, f"w{number}[j]", *items)
            self.close()
            self.close()
        self.put("#pragma omp simd")
        self.open("for (i64 j = 0; j < n; ++j) {")
        self.put(f"const i64 i{last} = c + j;")
        self.late_values(columns, "[j]")
        self.close()
        for _ in inner:
            self.close()

    def start_block(self, name: str, kind: str, first: str) -> None:
        self.put(f"{kind} {name}[{COLUMNS}] __attribute__((aligned(64)));")
        self.put(f"for (i64 j = 0; j < {COLUMNS}; ++j) {name}[j] = {first};")

    def partial(self, number: int, kind: str) -> str:
        """The partial results of a late reduction."""
        return f"(({kind} *)(P[{len(self.slots)}] + {self.late_places()[number]}L))"

    def partial_best(self, number: int) -> str:
        """The extrema whose places are the partial results of a late reduction."""
        at = self.late_places()[number] + 8 * self.parts * self.late_width(number)
        return f"(({C_TYPES[self.best_type(number)]} *)(P[{len(self.slots)}] + {at}L))"

    def late_values(self, sums: list[int], place: str) -> None:
        """What is computed from late reductions that are all of one kind, and its stores."""
        kernel = self.kernel
        mine = set(sums)
        for number, instr in enumerate(kernel.code):
            if kernel.levels[number] != "late":
                continue
            if number in sums:
                kind = C_TYPES[instr.dtype]
                self.put(f"const {kind} v{number} = ({kind})w{number}{place};")
            elif any(arg in mine for arg in instr.args):
                mine.add(number)
                self.put(self.definition(number, instr))
        for store in kernel.stores:
            if store.level == "late" and store.value in mine:
                self.put(self.store_text(store) + ";")

    # -- text -------------------------------------------------------------------------------

    def put(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    def open(self, line: str) -> None:
        self.put(line)
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.put("}")


def is_long(count: int) -> bool:
    """Whether a sum of so many elements is worth a wider type; if in doubt, it is."""
    return is_symbolic(count) or count > BLOCK


def is_better(arg: str, place: str, best: str, target: str, kind: str) -> str:
    """Whether an element is to take the place of the best so far, in C++: the first of equals is
    the best, and the first NaN before all. Without a place it is known to come after the best."""
    sign = ">" if kind == "argmax" else "<"
    better = f"{arg} {sign} {best} || ({arg} != {arg} && {best} == {best})"
    if not place:
        return better
    equal = f"({arg} == {best} || ({arg} != {arg} && {best} != {best})) && {place} < {target}"
    return f"{better} || ({equal})"


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
