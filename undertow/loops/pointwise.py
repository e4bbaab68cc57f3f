"""Elementwise ATen operators as scalar instructions, with eager's type promotion.

Each entry builds the value of one element in a `Body`. Operands are converted to the type of the
result, except in comparisons, which are made in the type that their operands promote to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import HALVES, TAGS, is_float, register
from undertow.loops.ir import Constant, View
from undertow.loops.sizes import is_symbolic

Rule = Callable[..., int]
POINTWISE: dict[str, Rule] = {}
"""Rules by the operator's name without its overload."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(function: Rule) -> Rule:
        for name in names:
            POINTWISE[name] = function
        return function

    return keep


def promoted(b: Body) -> str:
    """The storage type in which the operands of a comparison meet."""
    known: list[Any] = [0 if is_symbolic(m) else m for m in b.metas]
    operands: list[Any] = [m for m in known if isinstance(m, torch.Tensor | int | float | bool)][:2]
    if len(operands) == 1:
        return TAGS[operands[0].dtype] if isinstance(operands[0], torch.Tensor) else "f32"
    return TAGS[torch.result_type(*operands)]


# Operators of one operand whose instruction has the same name and the type of the result.
_UNARY = """
exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh erf erfc sigmoid reciprocal lgamma
"""
for _name in _UNARY.split():

    def _float_unary(b: Body, x: Any, *, _op: str = _name) -> int:
        if not is_float(b.t):
            raise CannotLower("a result that is not a float")
        return b.op(_op, b.t, b.take(x, b.t))

    POINTWISE[_name] = _float_unary

for _name in ("floor", "ceil", "round", "trunc"):

    def _rounding(b: Body, x: Any, *, _op: str = _name, **options: Any) -> int:
        if options.get("decimals"):
            raise CannotLower("rounding to decimals")
        return b.op(_op, b.t, b.take(x, b.t)) if is_float(b.t) else b.take(x, b.t)

    POINTWISE[_name] = _rounding

for _name in ("maximum", "minimum", "fmax", "fmin"):

    def _extremum(b: Body, x: Any, y: Any, *, _op: str = _name) -> int:
        if b.out == "bf16" and _op in ("fmax", "fmin"):
            x, y = y, x  # of two zeros eager takes the second, in this type alone
        return b.op(_op, b.t, b.take(x, b.t), b.take(y, b.t))

    POINTWISE[_name] = _extremum

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):

    def _compare(b: Body, x: Any, y: Any, *, _op: str = _name) -> int:
        meet = promoted(b)
        sides = [b.take(side, register(meet)) for side in (x, y)]
        if meet in HALVES:  # both sides are of that type before they are compared
            is_met = [isinstance(side, View | Constant) and side.dtype == meet for side in (x, y)]
            sides = [
                s if met else b.op("round", "f32", s, data=meet)
                for s, met in zip(sides, is_met, strict=True)
            ]
        return b.op(_op, "bool", *sides)

    POINTWISE[_name] = _compare

for _name, _op_name in {"and": "and", "or": "or", "xor": "xor"}.items():

    def _logical(b: Body, x: Any, y: Any, *, _op: str = _op_name) -> int:
        return b.op(_op, "bool", b.take(x, "bool"), b.take(y, "bool"))

    def _bitwise(b: Body, x: Any, y: Any, *, _op: str = _op_name) -> int:
        return b.op(_op, b.t, b.take(x, b.t), b.take(y, b.t))

    POINTWISE[f"logical_{_name}"] = _logical
    POINTWISE[f"bitwise_{_name}"] = _bitwise

for _name in ("atan2", "hypot", "copysign"):

    def _float_binary(b: Body, x: Any, y: Any, *, _op: str = _name) -> int:
        if not is_float(b.t):
            raise CannotLower("a result that is not a float")
        return b.op(_op, b.t, b.take(x, b.t), b.take(y, b.t))

    POINTWISE[_name] = _float_binary

for _name in ("gcd", "lcm", "nextafter"):

    def _binary(b: Body, x: Any, y: Any, *, _op: str = _name) -> int:
        if b.out in HALVES:
            raise CannotLower("the next number of 16 bits")
        return b.op(_op, b.t, b.take(x, b.t), b.take(y, b.t))

    POINTWISE[_name] = _binary


def _met(b: Body, x: Any) -> int:
    """An operand in the type of the result, numbers too. Eager's sums and powers of 16 bits round
    numbers to 16 bits first; its products and quotients do not."""
    found = b.take(x, b.t)
    if b.out not in HALVES or (isinstance(x, View | Constant) and x.dtype == b.out):
        return found
    return b.op("round", "f32", found, data=b.out)


def _scaled(b: Body, y: Any, alpha: Any) -> int:
    scaled = _met(b, y)
    return scaled if alpha == 1 else b.op("mul", b.t, scaled, _met(b, alpha))


@rule("add")
def _add(b: Body, x: Any, y: Any, alpha: Any = 1) -> int:
    return b.op("add", b.t, _met(b, x), _scaled(b, y, alpha))


@rule("sub")
def _sub(b: Body, x: Any, y: Any, alpha: Any = 1) -> int:
    return b.op("sub", b.t, _met(b, x), _scaled(b, y, alpha))


@rule("rsub")
def _rsub(b: Body, x: Any, y: Any, alpha: Any = 1) -> int:
    return b.op("sub", b.t, _met(b, y), _scaled(b, x, alpha))


@rule("mul")
def _mul(b: Body, x: Any, y: Any) -> int:
    return b.op("mul", b.t, b.take(x, b.t), b.take(y, b.t))


@rule("div", "true_divide")
def _div(b: Body, x: Any, y: Any, rounding_mode: str | None = None) -> int:
    if not is_float(b.t):
        return _divide_ints(b, x, y, rounding_mode)
    if rounding_mode == "floor":
        if b.out in HALVES:
            raise CannotLower("a quotient rounded twice")
        return b.op("floordiv", b.t, b.take(x, b.t), b.take(y, b.t))
    quotient = b.op("div", b.t, _met(b, x), b.take(y, b.t))
    if rounding_mode is None:
        return quotient
    if b.out in HALVES:
        quotient = b.op("round", "f32", quotient, data=b.out)
    return b.op("trunc", b.t, quotient)


def _divide_ints(b: Body, x: Any, y: Any, rounding_mode: str | None) -> int:
    name = "floordiv" if rounding_mode == "floor" else "div"
    return b.op(name, b.t, b.take(x, b.t), _divisor(b, y))


def _divisor(b: Body, y: Any) -> int:
    """What integers are divided by; eager raises if it is zero."""
    if b.t == "bool":
        raise CannotLower("a quotient of truth values")
    found = b.take(y, b.t)
    if b.instrs[found].op == "const" and b.instrs[found].data:
        return found
    return b.op("divisor", b.t, found)


@rule("floor_divide")
def _floor_divide(b: Body, x: Any, y: Any) -> int:
    return _div(b, x, y, "floor")


@rule("remainder")
def _remainder(b: Body, x: Any, y: Any) -> int:
    divisor = _met(b, y) if is_float(b.t) else _divisor(b, y)
    return b.op("remainder", b.t, _met(b, x), divisor)


@rule("fmod")
def _fmod(b: Body, x: Any, y: Any) -> int:
    divisor = _met(b, y) if is_float(b.t) else _divisor(b, y)
    return b.op("fmod", b.t, _met(b, x), divisor)


@rule("angle")
def _angle(b: Body, x: Any) -> int:
    found, zero = b.take(x, b.t), b.const(0, b.t)
    kept = b.op("where", b.t, b.op("ne", "bool", found, found), found, zero)
    is_less = b.op("lt", "bool", found, zero)
    return b.op("where", b.t, is_less, b.const(math.pi, b.t), kept)


@rule("neg")
def _neg(b: Body, x: Any) -> int:
    return b.op("neg", b.t, b.take(x, b.t))


@rule("abs")
def _abs(b: Body, x: Any) -> int:
    return b.take(x, b.t) if b.t in ("bool", "u8") else b.op("abs", b.t, b.take(x, b.t))


@rule("sign", "sgn")
def _sign(b: Body, x: Any) -> int:
    return b.take(x, b.t) if b.t == "bool" else b.op("sign", b.t, b.take(x, b.t))


@rule("relu")
def _relu(b: Body, x: Any) -> int:
    return _at_least(b, b.take(x, b.t), 0)


@rule("frac")
def _frac(b: Body, x: Any) -> int:
    found = b.take(x, b.t)
    return b.op("sub", b.t, found, b.op("trunc", b.t, found))


@rule("square")
def _square(b: Body, x: Any) -> int:
    found = b.take(x, b.t)
    return b.op("mul", b.t, found, found)


@rule("pow")
def _pow(b: Body, x: Any, y: Any) -> int:
    if b.t == "bool":
        raise CannotLower("a power of truth values")
    if not is_float(b.t):
        return b.op("pow", b.t, b.take(x, b.t), b.take(y, b.t))
    if isinstance(y, int | float):
        short = _short_power(b, b.take(x, b.t), float(y))
        if short is not None:
            return short
    if isinstance(x, int | float) and x == 2 and b.t == "f32":
        return b.op("exp2", b.t, b.take(y, b.t))
    return b.op("pow", b.t, _met(b, x), _met(b, y))


def _short_power(b: Body, x: int, y: float) -> int | None:
    """Powers that eager computes without pow."""
    if y == 0.0:
        return b.const(1, b.t)
    if y == 1.0:
        return x
    if y == 0.5 and b.out != "f16":
        return b.op("sqrt", b.t, x)
    if y == -0.5 and b.out != "f16":
        return b.op("rsqrt", b.t, x)
    if y in (2.0, 3.0, -1.0, -2.0):
        found = x
        for _ in range(int(abs(y)) - 1):
            found = b.op("mul", b.t, found, x)
        return found if y > 0 else b.op("reciprocal", b.t, found)
    return None


@rule("where")
def _where(b: Body, condition: Any, x: Any, y: Any) -> int:
    return b.op("where", b.t, b.take(condition, "bool"), b.take(x, b.t), b.take(y, b.t))


@rule("masked_fill")
def _masked_fill(b: Body, x: Any, mask: Any, value: Any) -> int:
    return b.op("where", b.t, b.take(mask, "bool"), b.take(value, b.t), b.take(x, b.t))


@rule("clamp")
def _clamp(b: Body, x: Any, low: Any = None, high: Any = None) -> int:
    found = b.take(x, b.t)
    if low is not None:
        found = _at_least(b, found, low)
    if high is None:
        return found
    if isinstance(high, int | float) and high == high:
        limit = b.const(high, b.t)
        return b.op("where", b.t, b.op("gt", "bool", found, limit), limit, found)
    return b.op("minimum", b.t, found, b.take(high, b.t))


def _at_least(b: Body, x: int, low: Any) -> int:
    """A lower bound that keeps NaN, and of two zeros the one it was given, as eager does."""
    if not isinstance(low, int | float) or low != low:
        return b.op("maximum", b.t, x, b.take(low, b.t))
    limit = b.const(low, b.t)
    return b.op("where", b.t, b.op("lt", "bool", x, limit), limit, x)


@rule("clamp_min")
def _clamp_min(b: Body, x: Any, low: Any) -> int:
    return _clamp(b, x, low)


@rule("clamp_max")
def _clamp_max(b: Body, x: Any, high: Any) -> int:
    return _clamp(b, x, None, high)


@rule("logical_not")
def _logical_not(b: Body, x: Any) -> int:
    return b.op("not", "bool", b.take(x, "bool"))


@rule("bitwise_not")
def _bitwise_not(b: Body, x: Any) -> int:
    return b.op("not", b.t, b.take(x, b.t))


for _name, _op_name in {
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
    "__lshift__": "lshift",
    "__rshift__": "rshift",
}.items():

    def _shift(b: Body, x: Any, y: Any, *, _op: str = _op_name) -> int:
        if is_float(b.t) or b.t == "bool":
            raise CannotLower("a shift of what is no integer")
        return b.op(_op, b.t, b.take(x, b.t), b.take(y, b.t))

    POINTWISE[_name] = _shift


def _own_type(b: Body, x: Any) -> int:
    return b.load(x) if not isinstance(x, int | float | bool) else b.const(x, "f32")


@rule("isnan")
def _isnan(b: Body, x: Any) -> int:
    found = _own_type(b, x)
    return b.op("ne", "bool", found, found)


def _beside_infinity(b: Body, x: Any, op: str, if_integer: bool) -> int:
    """How the magnitude of x compares with infinity, which no integer is."""
    found = _own_type(b, x)
    kind = b.instrs[found].dtype
    if not is_float(kind):
        return b.const(if_integer, "bool")
    return b.op(op, "bool", b.op("abs", kind, found), b.const(math.inf, kind))


@rule("isinf")
def _isinf(b: Body, x: Any) -> int:
    return _beside_infinity(b, x, "eq", if_integer=False)


@rule("isfinite")
def _isfinite(b: Body, x: Any) -> int:
    return _beside_infinity(b, x, "lt", if_integer=True)


@rule("signbit")
def _signbit(b: Body, x: Any) -> int:
    found = _own_type(b, x)
    kind = b.instrs[found].dtype
    if is_float(kind):
        return b.op("signbit", "bool", found)
    if kind in ("bool", "u8"):
        return b.const(False, "bool")
    return b.op("lt", "bool", found, b.const(0, kind))


@rule("lerp")
def _lerp(b: Body, start: Any, end: Any, weight: Any) -> int:
    # eager's formula: it is exact at both ends
    t = b.t
    s, e, w = b.take(start, t), b.take(end, t), b.take(weight, t)
    gap = b.op("sub", t, e, s)
    low = b.op("add", t, s, b.op("mul", t, w, gap))
    rest = b.op("sub", t, b.const(1, t), w)
    high = b.op("sub", t, e, b.op("mul", t, gap, rest))
    near = b.op("lt", "bool", b.op("abs", t, w), b.const(0.5, t))
    return b.op("where", t, near, low, high)


def _times(b: Body, x: Any, factor: Any) -> int:
    found = b.take(x, b.t)
    return found if factor == 1 else b.op("mul", b.t, found, b.const(factor, b.t))


@rule("addcmul")
def _addcmul(b: Body, x: Any, y: Any, z: Any, value: Any = 1) -> int:
    scaled = b.op("mul", b.t, _times(b, y, value), b.take(z, b.t))
    return b.op("add", b.t, b.take(x, b.t), scaled)


@rule("addcdiv")
def _addcdiv(b: Body, x: Any, y: Any, z: Any, value: Any = 1) -> int:
    if not is_float(b.t):
        raise CannotLower("a quotient of integers")
    scaled = b.op("div", b.t, _times(b, y, value), b.take(z, b.t))
    return b.op("add", b.t, b.take(x, b.t), scaled)


@rule("sigmoid_backward")
def _sigmoid_backward(b: Body, grad: Any, y: Any) -> int:
    t, out = b.t, b.take(y, b.t)
    rest = b.op("sub", t, b.const(1, t), out)
    return b.op("mul", t, b.take(grad, t), b.op("mul", t, rest, out))


@rule("tanh_backward")
def _tanh_backward(b: Body, grad: Any, y: Any) -> int:
    t, out = b.t, b.take(y, b.t)
    return b.op("mul", t, b.take(grad, t), b.op("sub", t, b.const(1, t), b.op("mul", t, out, out)))


@rule("threshold_backward")
def _threshold_backward(b: Body, grad: Any, x: Any, threshold: Any) -> int:
    t = b.t
    low = b.op("le", "bool", b.take(x, t), b.const(threshold, t))
    return b.op("where", t, low, b.const(0, t), b.take(grad, t))


@rule("threshold")
def _threshold(b: Body, x: Any, threshold: Any, value: Any) -> int:
    found = b.take(x, b.t)
    low = b.op("le", "bool", found, b.const(threshold, b.t))
    return b.op("where", b.t, low, b.const(value, b.t), found)


def _is_shrunk(b: Body, x: int, width: Any) -> int:
    high = b.op("le", "bool", x, b.const(width, b.t))
    return b.op("and", "bool", b.op("ge", "bool", x, b.const(-width, b.t)), high)


@rule("hardshrink")
def _hardshrink(b: Body, x: Any, width: Any = 0.5) -> int:
    found = b.take(x, b.t)
    return b.op("where", b.t, _is_shrunk(b, found, width), b.const(0, b.t), found)


@rule("softshrink")
def _softshrink(b: Body, x: Any, width: Any = 0.5) -> int:
    t, found, by = b.t, b.take(x, b.t), b.const(width, b.t)
    above = b.op("gt", "bool", found, by)
    nearer = b.op("where", t, above, b.op("sub", t, found, by), b.op("add", t, found, by))
    return b.op("where", t, _is_shrunk(b, found, width), b.const(0, t), nearer)


@rule("softshrink_backward", "hardshrink_backward")
def _shrink_backward(b: Body, grad: Any, x: Any, width: Any) -> int:
    gone = _is_shrunk(b, b.take(x, b.t), width)
    return b.op("where", b.t, gone, b.const(0, b.t), b.take(grad, b.t))


@rule("clone", "lift_fresh_copy", "alias_copy")
def _clone(b: Body, x: Any) -> int:
    return b.load(x)


@rule("copy")
def _copy(b: Body, _: Any, source: Any, *__: Any) -> int:
    return b.take(source, b.t)
