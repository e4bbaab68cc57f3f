"""Building the body of a nest: loads of views, constants, conversions, arithmetic."""

from __future__ import annotations

import math
from typing import Any

from undertow.loops.dtypes import HALVES, is_float, register
from undertow.loops.ir import Constant, Instr, Value, View


class CannotLower(Exception):  # noqa: N818 (it is a decision, not a fault)
    """This call has no loop form here; it runs as an ATen call instead."""


class Body:
    """Instructions of one nest over `sizes`; equal instructions are one."""

    def __init__(self, sizes: tuple[int, ...], out: str, metas: tuple[Any, ...] = ()) -> None:
        self.sizes = sizes
        self.out = out  # the storage type of the result
        self.metas = metas
        self.instrs: list[Instr] = []
        self._known: dict[Instr, int] = {}

    @property
    def t(self) -> str:
        """The register type of the result."""
        return register(self.out)

    def emit(self, instr: Instr) -> int:
        if instr.op == "const" and instr.data != instr.data:
            key = instr._replace(data="nan")  # a NaN is not equal to itself
        elif instr.op == "const":
            key = instr._replace(data=(str(instr.data), type(instr.data)))
        else:
            key = instr
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.instrs)
            self.instrs.append(instr)
        return found

    def op(self, name: str, dtype: str, *args: int, data: Any = None) -> int:
        return self.emit(Instr(name, dtype, args, data))

    def const(self, number: Any, dtype: str) -> int:
        if dtype == "bool":
            number = bool(number)
        elif is_float(dtype):
            number = float(number)
        else:
            if isinstance(number, float) and not math.isfinite(number):
                raise CannotLower("an integer constant that is not finite")
            number = _wrap(int(number), dtype)
        return self.emit(Instr("const", dtype, (), number))

    def index(self, dim: int) -> int:
        """The loop variable itself."""
        strides = tuple(int(k == dim) for k in range(len(self.sizes)))
        return self.emit(Instr("index", "i64", (), None, strides, 0))

    def map_of(self, value: View) -> tuple[int, ...]:
        """Strides of a view over this nest's loops, broadcasting it as eager does."""
        missing = len(self.sizes) - len(value.sizes)
        if missing < 0:
            raise CannotLower("an operand of more dimensions than the result")
        strides = [0] * missing
        for size, stride, wanted in zip(
            value.sizes, value.strides, self.sizes[missing:], strict=True
        ):
            if size == wanted:
                strides.append(stride if size != 1 else 0)
            elif size == 1:
                strides.append(0)
            else:
                raise CannotLower("operands that do not broadcast")
        return tuple(strides)

    def load(self, value: Value) -> int:
        """A value at the loop's place, in its register type."""
        if isinstance(value, Constant):
            return self.const(value.number, register(value.dtype))
        return self.load_at(value, self.map_of(value), value.offset)

    def load_at(self, value: View, strides: tuple[int, ...], offset: int) -> int:
        stored = value.casts[0] if value.casts else value.dtype
        found = self.emit(Instr("load", register(stored), (), value.buffer, strides, offset))
        for cast in value.casts[1:]:
            found = self.convert(found, cast)
        return self.convert(found, value.dtype) if value.casts else found

    def gather(self, value: View, strides: tuple[int, ...], terms: list[tuple[int, int]]) -> int:
        """A value at the loop's place plus computed indices times strides."""
        stored = value.casts[0] if value.casts else value.dtype
        data = (value.buffer, tuple(stride for _, stride in terms))
        args = tuple(arg for arg, _ in terms)
        found = self.emit(Instr("gather", register(stored), args, data, strides, value.offset))
        for cast in (*value.casts[1:], value.dtype) if value.casts else ():
            found = self.convert(found, cast)
        return found

    def take(self, operand: Any, dtype: str) -> int:
        """An operand (a value or a number) in a register type."""
        if isinstance(operand, View | Constant):
            return self.cast(self.load(operand), dtype)
        if isinstance(operand, int | float | bool):
            return self.const(operand, dtype)
        raise CannotLower(f"an operand of type {type(operand).__name__}")

    def cast(self, arg: int, dtype: str) -> int:
        """Change the register type."""
        instr = self.instrs[arg]
        if instr.dtype == dtype:
            return arg
        if instr.op == "const":
            return self.const(instr.data, dtype)
        return self.op("convert", dtype, arg)

    def convert(self, arg: int, tag: str) -> int:
        """Convert to a storage type: the 16-bit floats are rounded, and stay in float32."""
        found = self.cast(arg, register(tag))
        return self.op("round", "f32", found, data=tag) if tag in HALVES else found


_BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8}


def _wrap(number: int, dtype: str) -> int:
    bits = _BITS[dtype]
    number &= (1 << bits) - 1
    return number - (1 << bits) if dtype != "u8" and number >> (bits - 1) else number
