"""One row of a kernel: its sweeps over the inner loops, and values of the row between them.

Without blocks a sweep is one pass. With blocks a sweep runs over them, and for each of them over
its elements once per pass, so that what a pass finds out about a block is used while the block is
in the nearest cache. A sweep that has nothing to do with blocks is a pass over the whole row.
"""

from __future__ import annotations

from undertow.codegen.cpp_inner import innermost
from undertow.codegen.cpp_ops import C_TYPES
from undertow.codegen.cpp_scan import scanned_loops, scans_of, start_scans
from undertow.codegen.cpp_text import BLOCK, Text, is_long
from undertow.loops.ir import Instr, product
from undertow.loops.kernel import KernelStore
from undertow.loops.passes import Pass, reduced_over


def write_row(text: Text, low: str, high: str) -> None:
    """All sweeps over one row; `low` and `high` bound the innermost loop."""
    kernel = text.kernel
    text.scratch_rows()
    if kernel.blocks:
        _Blocks(text).write()
    else:
        done = -1
        for at, this in enumerate(text.passes):
            done = _row_values(text, done, at)
            _run_pass(text, this, low, high)
        _row_values(text, done, 1 << 30)
    for store in kernel.stores:
        if store.level == "row":
            text.put(text.store_text(store) + ";")


def _row_values(text: Text, done: int, upto: int) -> int:
    """Instructions of the row that are possible before pass `upto`, and not yet written."""
    kernel = text.kernel
    for number, instr in enumerate(kernel.code):
        ready = done < kernel.phases[number] <= upto
        if kernel.levels[number] == "row" and ready and instr.op not in ("const", "reduce"):
            text.put(text.definition(number, instr))
    return upto


def _has_work(this: Pass) -> bool:
    return bool(this.stores or this.reduces or this.blocks or this.late or this.keeps)


def _run_pass(text: Text, this: Pass, low: str, high: str) -> None:
    """A pass over the whole row."""
    if not _has_work(this):
        return
    inner = text.kernel.inner
    for number in this.reduces:
        text.put(text.accumulator(number, "r"))
    if scans_of(text, this):
        start_scans(text, this)
        scanned_loops(text, this, low, high, _sums(text, this))
    else:
        _loops(text, this, range(len(inner)), low, high, inner[-1] if inner else 1)
    for number in this.reduces:
        _finish(text, number)


def _sums(text: Text, this: Pass) -> list[int]:
    """Reductions that a run of the innermost loop makes one number of."""
    return [*this.reduces, *this.blocks, *(n for n in this.late if not text.is_column(n))]


def _loops(text: Text, this: Pass, loops: range, low: str, high: str, count: int) -> None:
    """Some of the inner loops, the last of `count` iterations, with what a pass does in them."""
    inner = text.kernel.inner
    for k in loops[:-1]:
        text.open(f"for (i64 i{k} = 0; i{k} < {inner[k]}L; ++i{k}) {{")
    sums = _sums(text, this)
    is_parted = bool(sums) and is_long(count)
    if is_parted:
        text.open(f"for (i64 b = {low}; b < {high}; b += {BLOCK}) {{")
        text.put(f"const i64 e = b + {BLOCK} < {high} ? b + {BLOCK} : {high};")
        low, high = "b", "e"
    for number in sums:
        text.put(text.accumulator(number, "t"))
    innermost(text, this, low, high, sums, count)
    for number in sums:
        text.fold(number, "r", "t")
    if is_parted:
        text.close()
    for _ in loops[:-1]:
        text.close()


def _finish(text: Text, number: int) -> None:
    kind = C_TYPES[text.kernel.code[number].dtype]
    text.put(f"const {kind} v{number} = ({kind})r{number};")


class _Blocks:
    """Writes a row that is swept block by block. Values of blocks that a later sweep needs are kept
    in a table per row, whose names begin with c."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.kernel = text.kernel
        kernel = text.kernel
        last = max(kernel.sweeps)
        self.sweeps: list[list[Pass]] = [[] for _ in range(last + 1)]
        for at, this in enumerate(text.passes):
            self.sweeps[kernel.sweeps[at]].append(this)
        self.starts = [kernel.sweeps.index(sweep) for sweep in range(last + 1)]
        self.stores: list[list[KernelStore]] = [[] for _ in self.sweeps]
        for store in kernel.stores:
            if store.level == "block":
                late = store.buffer in kernel.reads  # something may still read it
                sweep = last if late else kernel.sweeps[kernel.phases[store.value]]
                self.stores[sweep].append(store)
        self.folds: list[list[int]] = [[] for _ in self.sweeps]  # reductions of values of blocks
        for number, instr in enumerate(kernel.code):
            if instr.op == "reduce" and reduced_over(instr) == "blocks":
                sweep = max(kernel.sweeps[kernel.phases[arg]] for arg in instr.args)
                self.folds[sweep].append(number)
        self.wanted = [self.wanted_in(sweep) for sweep in range(last + 1)]
        self.kept = sorted({n for sweep in range(last + 1) for n in self.from_before(sweep)})

    def is_block(self, number: int) -> bool:
        instr = self.kernel.code[number]
        return self.kernel.levels[number] == "block" and instr.op != "const"

    def sweep_of(self, number: int) -> int:
        return self.kernel.sweeps[self.kernel.phases[number]]

    def mine(self, sweep: int) -> list[int]:
        """Values of blocks that a sweep makes."""
        code = range(len(self.kernel.code))
        return [n for n in code if self.is_block(n) and self.sweep_of(n) == sweep]

    def wanted_in(self, sweep: int) -> set[int]:
        """Values of blocks that a sweep uses."""
        code, found = self.kernel.code, set[int]()
        for this in self.sweeps[sweep]:
            for number in (*this.body, *this.reduces, *this.blocks, *this.late):
                if number not in this.reloads:
                    found.update(code[number].args)
            found.update(store.value for store in this.stores)
        for number in (*self.mine(sweep), *self.folds[sweep]):
            found.update(code[number].args)
        found.update(store.value for store in self.stores[sweep])
        return {number for number in found if self.is_block(number)}

    def from_before(self, sweep: int) -> list[int]:
        return [n for n in sorted(self.wanted[sweep]) if self.sweep_of(n) < sweep]

    # -- text -------------------------------------------------------------------------------

    def write(self) -> None:
        text, kernel = self.text, self.kernel
        count = product(kernel.inner[: kernel.blocks])
        for number in self.kept:
            text.put(f"{C_TYPES[kernel.code[number].dtype]} c{number}[{count}];")
        done = -1
        for sweep, passes in enumerate(self.sweeps):
            done = _row_values(text, done, self.starts[sweep])
            sums = [n for this in passes for n in this.reduces] + self.folds[sweep]
            is_idle = not (self.mine(sweep) or self.folds[sweep] or self.stores[sweep])
            if is_idle and not any(map(_has_work, passes)):
                continue
            for number in sums:
                text.put(text.accumulator(number, "r"))
            if is_idle and not self.wanted[sweep] and len(passes) == 1 and self.is_even(passes[0]):
                self.whole_row(passes[0])
            else:
                self.over_blocks(sweep, passes)
            for number in sums:
                _finish(text, number)
        _row_values(text, done, 1 << 30)

    def is_even(self, this: Pass) -> bool:
        """Whether all addresses of a pass walk the whole row as one loop."""
        kernel = self.kernel
        first, sizes = len(kernel.outer), kernel.inner
        maps = [kernel.code[n].strides for n in this.body if n not in this.reloads]
        for strides in (*maps, *(store.strides for store in this.stores)):
            row = (strides or ())[first : first + len(sizes)]
            if any(a != b * n for a, b, n in zip(row, row[1:], sizes[1:], strict=False)):
                return False
        return True

    def whole_row(self, this: Pass) -> None:
        text, inner = self.text, self.kernel.inner
        text.open("{")
        text.put("const i64 " + ", ".join(f"i{k} = 0" for k in range(len(inner) - 1)) + ";")
        count = product(inner)
        _loops(text, this, range(len(inner) - 1, len(inner)), "0", f"{count}L", count)
        text.close()

    def over_blocks(self, sweep: int, passes: list[Pass]) -> None:
        text, kernel = self.text, self.kernel
        inner, blocks = kernel.inner, kernel.blocks
        for k in range(blocks):
            text.open(f"for (i64 i{k} = 0; i{k} < {inner[k]}L; ++i{k}) {{")
        for number in self.from_before(sweep):
            kind = C_TYPES[kernel.code[number].dtype]
            text.put(f"const {kind} v{number} = c{number}[{self.place()}];")
        done = -1
        for at, this in enumerate(passes, self.starts[sweep]):
            done = self.block_values(sweep, done, at)
            if _has_work(this):
                for number in this.blocks:
                    text.put(text.accumulator(number, "r"))
                _loops(text, this, range(blocks, len(inner)), "0", f"{inner[-1]}L", inner[-1])
                for number in this.blocks:
                    _finish(text, number)
                    self.keep(number)
        self.block_values(sweep, done, 1 << 30)
        for number in self.folds[sweep]:
            self.take(number, kernel.code[number])
        for store in self.stores[sweep]:
            text.put(text.store_text(store) + ";")
        for _ in range(blocks):
            text.close()

    def place(self) -> str:
        """The number of a block in its row."""
        sizes = self.kernel.inner[: self.kernel.blocks]
        name, step = f"i{len(sizes) - 1}", sizes[-1]
        for k in range(len(sizes) - 2, -1, -1):
            name += f" + i{k} * {step}L"
            step *= sizes[k]
        return name

    def block_values(self, sweep: int, done: int, upto: int) -> int:
        for number in self.mine(sweep):
            instr = self.kernel.code[number]
            if done < self.kernel.phases[number] <= upto and instr.op != "reduce":
                self.text.put(self.text.definition(number, instr))
                self.keep(number)
        return upto

    def keep(self, number: int) -> None:
        if number in self.kept:
            self.text.put(f"c{number}[{self.place()}] = v{number};")

    def take(self, number: int, instr: Instr) -> None:
        """One value of a block into a reduction of them all."""
        text = self.text
        arg = text.name(instr.args[0])
        if text.is_arg(number):
            place = text.name(instr.args[1])
            kind = text.kind_of(number)
            text.take_place(arg, place, f"r{number}m", f"r{number}", kind)
        else:
            text.put(f"r{number} = {text.combined(number, f'r{number}', arg)};")
