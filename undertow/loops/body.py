"""Building the body of a nest: loads of views, constants, conversions, arithmetic."""

from __future__ import annotations

import math
from typing import Any

from undertow.loops.dtypes import HALVES, is_float, register
from undertow.loops.ir import Constant, Instr, Value, View
from undertow.loops.recipes import Mapping, Recipe, find_mapping, is_picked, is_wanted
from undertow.loops.sizes import is_at_least, is_symbolic


class CannotLower(Exception):  # noqa: N818 (it is a decision, not a fault)
    """This call has no loop form here; it runs as an ATen call instead."""


class Body:
    """Instructions of one nest over `sizes`; equal instructions are one."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        out: str,
        metas: tuple[Any, ...] = (),
        recipes: dict[int, Recipe] | None = None,
    ) -> None:
        self.sizes = sizes
        self.recipes = recipes or {}
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
        if is_symbolic(number):
            still = (0,) * len(self.sizes)
            return self.emit(Instr("index", dtype, (), None, still, number))  # type: ignore[arg-type]
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
        recipe = self.recipes.get(value.buffer)
        if recipe is not None and is_wanted(recipe, self.sizes, strides):
            mapping = find_mapping(recipe, self.sizes, strides, offset)
            if mapping is not None:
                return self.casted(self.repeat(recipe, mapping), value)
        found = self.emit(Instr("load", register(stored), (), value.buffer, strides, offset))
        return self.casted(found, value)

    def casted(self, found: int, value: View) -> int:
        """What was loaded from a view's buffer, as the view has it."""
        for cast in (*value.casts[1:], value.dtype) if value.casts else ():
            found = self.convert(found, cast)
        return found

    def repeat(
        self,
        recipe: Recipe,
        mapping: Mapping,
        terms: tuple[tuple[int, int], ...] = (),
        mask: int | None = None,
    ) -> int:
        """Compute a recipe again at mapped places; `terms` are computed indices into its loops."""
        local: list[int] = []
        for instr in recipe.body:
            args = tuple(local[arg] for arg in instr.args)
            if instr.op != "load":
                local.append(self.emit(instr._replace(args=args)))
                continue
            assert instr.strides is not None
            strides = mapping.strides(instr.strides)
            offset = instr.offset + mapping.offset(instr.strides)
            picked = [(arg, instr.strides[k]) for arg, k in terms if instr.strides[k]]
            local.append(self.read(instr.data, instr.dtype, strides, offset, picked, mask))
        return local[recipe.value]

    def expand(self, body: tuple[Instr, ...], value: int) -> int:
        """A recipe's body with the recipes of what it reads put in place of the loads."""
        local: list[int] = []
        for instr in body:
            args = tuple(local[arg] for arg in instr.args)
            recipe = self.recipes.get(instr.data) if instr.op == "load" else None
            mapping = None
            if recipe is not None and instr.strides is not None:
                mapping = find_mapping(recipe, self.sizes, instr.strides, instr.offset)
            if recipe is not None and mapping is not None:
                local.append(self.repeat(recipe, mapping))
            else:
                local.append(self.emit(instr._replace(args=args)))
        return local[value]

    def read(
        self,
        buffer: int,
        dtype: str,
        strides: tuple[int, ...],
        offset: int,
        terms: list[tuple[int, int]],
        mask: int | None,
    ) -> int:
        """A load, by computed indices or under a mask if there are any."""
        if terms:
            data = (buffer, tuple(stride for _, stride in terms))
            args = tuple(arg for arg, _ in terms)
            return self.emit(Instr("gather", dtype, args, data, strides, offset))
        if mask is not None:
            return self.emit(Instr("mload", dtype, (mask,), buffer, strides, offset))
        return self.emit(Instr("load", dtype, (), buffer, strides, offset))

    def recipe_per_element(self, buffer: int) -> Recipe | None:
        recipe = self.recipes.get(buffer)
        return None if recipe is None or recipe.per_row else recipe

    def window(self, value: Value, dim: int, begin: int, mask: int) -> int:
        """A value laid over loop `dim` from `begin` on; anything where the mask is false."""
        if isinstance(value, Constant):
            return self.const(value.number, register(value.dtype))
        recipe = self.recipe_per_element(value.buffer)
        strides = tuple(s if n != 1 else 0 for s, n in zip(value.strides, value.sizes, strict=True))
        if recipe is not None:
            mapping = find_mapping(recipe, value.sizes, strides, value.offset)
            if mapping is not None:
                moved = tuple(
                    o - row[dim] * begin
                    for o, row in zip(mapping.offsets, mapping.factors, strict=True)
                )
                found = self.repeat(recipe, mapping._replace(offsets=moved), mask=mask)
                return self.casted(found, value)
        stored = value.casts[0] if value.casts else value.dtype
        offset = value.offset - begin * strides[dim]
        found = self.read(value.buffer, register(stored), strides, offset, [], mask)
        return self.casted(found, value)

    def inside(self, dim: int, begin: int, end: int) -> int:
        """Whether loop `dim` is in [begin, end)."""
        strides = tuple(int(k == dim) for k in range(len(self.sizes)))
        place = self.emit(Instr("index", "i32", (), None, strides, 0))
        low = self.op("ge", "bool", place, self.const(begin, "i32")) if begin else None
        if is_at_least(end, self.sizes[dim]):
            return self.const(True, "bool") if low is None else low
        high = self.op("lt", "bool", place, self.const(end, "i32"))
        return high if low is None else self.op("and", "bool", low, high)

    def gather(self, value: View, strides: tuple[int, ...], terms: list[tuple[int, int]]) -> int:
        """A value at the loop's place plus computed indices times strides."""
        stored = value.casts[0] if value.casts else value.dtype
        recipe = self.recipes.get(value.buffer)
        if recipe is not None and value.offset == 0 and is_picked(recipe, self.sizes):
            mapping = find_mapping(recipe, self.sizes, strides, 0)
            dims = [
                next((k for k, s in enumerate(recipe.strides) if s == step), None)
                for _, step in terms
            ]
            free = mapping is not None and all(
                k is not None and not any(mapping.factors[k]) and recipe.sizes[k] > 1 for k in dims
            )
            # an index into several of the recipe's loops as one would leave the first of them
            free = free and all(
                size == recipe.sizes[k]
                for k in dims
                if k is not None
                for size, step in zip(value.sizes, value.strides, strict=True)
                if size != 1 and step == recipe.strides[k]
            )
            if mapping is not None and free:
                at = tuple(
                    (arg, k) for (arg, _), k in zip(terms, dims, strict=True) if k is not None
                )
                return self.casted(self.repeat(recipe, mapping, at), value)
        found = self.read(value.buffer, register(stored), strides, value.offset, terms, None)
        return self.casted(found, value)

    def take(self, operand: Any, dtype: str) -> int:
        """An operand (a value or a number) in a register type."""
        if isinstance(operand, View | Constant):
            found = self.load(operand)
            if dtype == "f32" and self.out in HALVES and operand.dtype in _WIDE and operand.sizes:
                return self.convert(found, self.out)  # eager has it in 16 bits before it computes
            return self.cast(found, dtype)
        if isinstance(operand, int | float | bool) or is_symbolic(operand):
            return self.const(operand, dtype)
        raise CannotLower(f"an operand of type {type(operand).__name__}")

    def cast(self, arg: int, dtype: str) -> int:
        """Change the register type."""
        instr = self.instrs[arg]
        if instr.dtype == dtype:
            return arg
        if instr.op == "const":
            return self.const(instr.data, dtype)
        if instr.op == "index" and not any(instr.strides or ()):
            return self.const(instr.offset, dtype)
        return self.op("convert", dtype, arg)

    def convert(self, arg: int, tag: str) -> int:
        """Convert to a storage type: the 16-bit floats are rounded, and stay in float32."""
        found = self.cast(arg, register(tag))
        return self.op("round", "f32", found, data=tag) if tag in HALVES else found


_WIDE = ("i16", "i32", "i64")  # integers that 16-bit floats do not hold
_BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8}


def _wrap(number: int, dtype: str) -> int:
    bits = _BITS[dtype]
    number &= (1 << bits) - 1
    return number - (1 << bits) if dtype != "u8" and number >> (bits - 1) else number
