"""Scalar instructions as C++ expressions."""

from __future__ import annotations

import math

from undertow.loops.dtypes import is_float
from undertow.loops.ir import Instr

C_TYPES = {
    "f32": "f32",
    "f64": "f64",
    "i8": "i8",
    "i16": "i16",
    "i32": "i32",
    "i64": "i64",
    "u8": "u8",
    "bool": "bool",
}
STORED = {**C_TYPES, "bool": "u8", "bf16": "u16", "f16": "u16"}
_UNSIGNED = {"i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64", "u8": "u8"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_CALLS = {"maximum": "u_max", "minimum": "u_min"}
_INTEGER_CALLS = frozenset(
    ("floordiv", "remainder", "fmod", "lshift", "rshift", "pow", "gcd", "lcm")
)


def literal(number: float | int | bool, dtype: str) -> str:
    """A constant of a register type.

    >>> literal(0.5, "f32"), literal(True, "bool"), literal(float("-inf"), "f64")
    ('0.5f', 'true', '(f64)-INF')
    """
    if dtype == "bool":
        return "true" if number else "false"
    if not is_float(dtype):
        return "(-9223372036854775807L-1)" if number == -(1 << 63) else f"({dtype}){number}L"
    value = float(number)
    if math.isnan(value):
        return f"({dtype})NAN_"
    if math.isinf(value):
        return f"({dtype}){'-' if value < 0 else ''}INF"
    if dtype == "f32":
        return f"{value!r}f" if abs(value) < 3.5e38 else f"({'-' if value < 0 else ''}INF)"
    return repr(value)


def expression(instr: Instr, args: list[str], from_dtype: str) -> str:
    """What an arithmetic instruction computes from its named arguments."""
    op, t = instr.op, instr.dtype
    if op in _COMPARE:
        return f"{args[0]} {_COMPARE[op]} {args[1]}"
    if op in _INFIX:
        return _arithmetic(op, t, args)
    if op in _BITS:
        return f"({C_TYPES[t]})({args[0]} {_BITS[op]} {args[1]})"
    if op == "not":
        return f"!{args[0]}" if t == "bool" else f"({C_TYPES[t]})(~{args[0]})"
    if op == "neg":
        if is_float(t):
            return f"-{args[0]}"
        return f"({t})(0 - ({_UNSIGNED[t]}){args[0]})"
    if op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if op == "convert":
        return _conversion(t, args[0], from_dtype)
    if op == "round" and instr.data is not None:
        return f"round_{instr.data}({args[0]})"
    if op in ("bound", "within", "inside"):
        return f"{op}({args[0]}, {instr.data}L)"
    if op in _INTEGER_CALLS and not is_float(t):
        return f"i_{op}<{t}>({', '.join(args)})"
    if op == "divisor":
        return f"divisor(({t}){args[0]})"
    return f"{_CALLS.get(op, 'u_' + op)}({', '.join(args)})"


def _arithmetic(op: str, t: str, args: list[str]) -> str:
    if t == "bool":
        return f"{args[0]} {'&' if op == 'mul' else '|' if op == 'add' else '^'} {args[1]}"
    if is_float(t):
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op == "div":
        return f"i_div<{t}>({args[0]}, {args[1]})"
    # integers wrap round, as eager's do; in C++ only unsigned ones may
    kind = _UNSIGNED[t]
    return f"({t})(({kind}){args[0]} {_INFIX[op]} ({kind}){args[1]})"


def _conversion(t: str, arg: str, from_dtype: str) -> str:
    if t == "bool":
        return f"{arg} != ({C_TYPES[from_dtype]})0"
    if t in ("i8", "i16", "u8") and is_float(from_dtype):
        return f"({t})(i32){arg}"
    return f"({C_TYPES[t]}){arg}"


def loaded(pointer: str, address: str, stored: str) -> str:
    """An element of a buffer in its register type."""
    if stored == "bool":
        return f"{pointer}[{address}] != 0"
    if stored in ("bf16", "f16"):
        return f"from_{stored}({pointer}[{address}])"
    return f"{pointer}[{address}]"


def kept(value: str, stored: str) -> str:
    """A register value as a buffer holds it."""
    return f"to_{stored}({value})" if stored in ("bf16", "f16") else value
