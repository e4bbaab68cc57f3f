"""The innermost loop of a pass: vectors, what is left of a row, and sines of large angles."""

from __future__ import annotations

from undertow.codegen.cpp_ops import C_TYPES
from undertow.codegen.cpp_text import Text, is_better
from undertow.loops.dtypes import NBYTES, is_float
from undertow.loops.passes import Pass
from undertow.loops.sizes import hint_of, is_symbolic

ANGLES = 1024  # sines and cosines between two looks at how large their arguments are
VECTOR = 16  # float32 in the widest register,
BYTES = 64  # and bytes
LONGEST_WITH_TAIL = 2048  # elements of a row; in longer ones what is left does not count
_LIBRARY_CALLS = """
tan asin acos atan sinh cosh asinh acosh atanh erfc lgamma atan2 hypot fmod remainder floordiv
gather bound within inside divisor
"""
_LIBRARY = frozenset(_LIBRARY_CALLS.split())
"""Calls that are not vectors in any case, or would be made for what is not there."""


def innermost(text: Text, this: Pass, low: str, high: str, sums: list[int], count: int) -> None:
    """The innermost loop of a pass, of `count` iterations in all. Where it has sines or cosines, a
    part at a time, and in another way if a part has an angle that the fast ones cannot do. Where
    extrema are is looked for in a loop before it, which reads what this one may write over."""
    places = [number for number in sums if text.is_arg(number)]
    if places and not text.in_order and hint_of(count) >= 2 * VECTOR:
        _find_places(text, this, low, high, places)
        sums = [number for number in sums if number not in places]
        if not (sums or this.stores or this.keeps or any(map(text.is_column, this.late))):
            return
    angles = _angles(text, this)
    if not angles or not text.kernel.inner:
        text.far = bool(angles)
        _loop(text, this, low, high, sums, count)
        text.far = False
        return
    last = len(text.kernel.inner) - 1
    text.open(f"for (i64 g = {low}; g < {high}; g += {ANGLES}) {{")
    text.put(f"const i64 h = g + {ANGLES} < {high} ? g + {ANGLES} : {high};")
    text.put("i32 far = 0;")
    text.put("#pragma omp simd reduction(|:far)")
    text.open(f"for (i64 i{last} = g; i{last} < h; ++i{last}) {{")
    _values(text, this, _sources(text, this, angles), text.linear())
    for angle in angles:
        text.put(f"far |= is_far({text.name(angle)});")
    text.close()
    text.open("if (far) {")
    text.far = True
    _loop(text, this, "g", "h", sums, count)
    text.far = False
    text.close()
    text.open("else {")
    _loop(text, this, "g", "h", sums, count)
    text.close()
    text.close()


def _find_places(text: Text, this: Pass, low: str, high: str, places: list[int]) -> None:
    """Where extrema of the innermost loop are: the first of every sixteenth element, each in a lane
    of its own, so that they are vectors, and then the first of those."""
    code, last = text.kernel.code, len(text.kernel.inner) - 1
    body = _sources(text, this, [arg for number in places for arg in code[number].args])
    text.far = any(code[number].op in ("sin", "cos") for number in body)
    text.open("{")
    for number in places:
        text.put(f"i64 a{number}[{VECTOR}]; {_lane_type(text, number)} m{number}[{VECTOR}];")
        text.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
        text.put(f"a{number}[lane] = t{number}; m{number}[lane] = t{number}m;")
        text.close()
    text.put(f"i64 g = {low};")
    for head, width in (
        (f"for (; g + {VECTOR} <= {high}; g += {VECTOR}) {{", f"{VECTOR}"),
        (f"if (g < {high}) {{", f"{high} - g"),
    ):
        text.open(head)
        text.put("#pragma omp simd")
        text.open(f"for (i64 lane = 0; lane < {width}; ++lane) {{")
        text.put(f"const i64 i{last} = g + lane;")
        _values(text, this, body, text.linear())
        for number in places:
            _take_lane(text, number)
        text.close()
        text.close()
    text.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
    for number in places:
        found = (f"m{number}[lane]", f"a{number}[lane]", f"t{number}m", f"t{number}")
        text.take_place(*found, text.kind_of(number))
    text.close()
    text.close()
    text.far = False


def _lane_type(text: Text, number: int) -> str:
    """The type that lanes keep an extremum in; vectors of bytes are short beside places."""
    best = text.best_type(number)
    return C_TYPES["i32" if not is_float(best) and NBYTES[best] < 4 else best]


def _take_lane(text: Text, number: int) -> None:
    """Take one element into its lane. Of equals the one that is there came before, if places grow
    along the loop, and need not be compared."""
    code = text.kernel.code
    value, place = code[number].args
    steps = code[place].strides if code[place].op == "index" else None
    step = steps[-1] if steps else 0
    grows = not is_symbolic(step) and step > 0
    arg, at, kind = text.name(value), text.name(place), text.kind_of(number)
    text.put(f"const {_lane_type(text, number)} b{number} = m{number}[lane];")
    text.put(f"const i64 g{number} = a{number}[lane];")
    better = is_better(arg, "" if grows else at, f"b{number}", f"g{number}", kind)
    text.put(f"const bool f{number} = {better};")
    text.put(f"m{number}[lane] = f{number} ? {arg} : b{number};")
    text.put(f"a{number}[lane] = f{number} ? {at} : g{number};")


def _angles(text: Text, this: Pass) -> list[int]:
    """Arguments of the float32 sines and cosines that a pass computes."""
    code = text.kernel.code
    found = [
        code[number].args[0]
        for number in this.body
        if code[number].op in ("sin", "cos")
        and code[number].dtype == "f32"
        and number not in this.reloads
    ]
    return list(dict.fromkeys(found))


def _sources(text: Text, this: Pass, wanted: list[int]) -> list[int]:
    """What a pass must compute to have these values, in order."""
    mine, found = set(this.body), set[int]()
    stack = list(wanted)
    while stack:
        number = stack.pop()
        if number in mine and number not in found:
            found.add(number)
            if number not in this.reloads:
                stack.extend(text.kernel.code[number].args)
    return sorted(found)


def _loop(text: Text, this: Pass, low: str, high: str, sums: list[int], count: int) -> None:
    kernel = text.kernel
    last = len(kernel.inner) - 1
    clauses = text.simd_clauses(sums)
    if not kernel.inner:
        text.open("{")
        iteration(text, this, sums)
        text.close()
        return
    if _has_open_tail(text, clauses, low, high, count):
        assert clauses is not None
        _open_tail(text, this, sums, clauses, high)
        return
    text.narrow = _narrow(text, this, clauses, low, high, count)
    for number in sorted(text.narrow):
        text.put(f"i32 n{number}[{count}] __attribute__((aligned(64)));")
    whole, rest = _tail(text, clauses, low, high, count)
    if whole:
        if clauses is not None:
            text.put(f"#pragma omp simd{clauses}")
        end = f"{whole}L" if rest else high
        text.open(f"for (i64 i{last} = {low}; i{last} < {end}; ++i{last}) {{")
        iteration(text, this, sums)
        text.close()
    if rest:
        text.put(f"#pragma omp simd{clauses}")
        text.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
        text.open(f"if (lane < {rest}) {{")
        text.put(f"const i64 i{last} = {whole}L + lane;")
        iteration(text, this, sums)
        text.close()
        text.close()
    _write_narrow(text, this, high)


def _narrow(
    text: Text, this: Pass, clauses: str | None, low: str, high: str, count: int
) -> frozenset[int]:
    """Values of one byte that a short loop only stores. They would make its vectors as short as a
    vector of bytes is full; they are kept in four bytes each and stored by a loop of their own."""
    code = text.kernel.code
    is_short = not is_symbolic(count) and VECTOR <= count < BYTES
    if not is_short or clauses is None or (low, high) != ("0", f"{count}L"):
        return frozenset()
    found = {
        store.value
        for store in this.stores
        if not store.mode
        and code[store.value].op == "convert"
        and code[store.value].dtype in ("i8", "u8")
        and is_float(code[code[store.value].args[0]].dtype)
        and store.value not in this.reloads
        and store.value in this.body
    }
    used = {arg for number in this.body for arg in code[number].args if number not in this.reloads}
    used.update(arg for n in (*this.reduces, *this.blocks, *this.late) for arg in code[n].args)
    return frozenset(found - used - set(this.keeps))


def _write_narrow(text: Text, this: Pass, high: str) -> None:
    narrow, text.narrow = text.narrow, frozenset()
    last = len(text.kernel.inner) - 1
    for store in this.stores if narrow else ():
        if store.value in narrow:
            kind = C_TYPES[text.kernel.code[store.value].dtype]
            text.put("#pragma omp simd")
            text.open(f"for (i64 i{last} = 0; i{last} < {high}; ++i{last}) {{")
            text.put(f"const {kind} v{store.value} = ({kind})n{store.value}[i{last}];")
            text.put(text.store_text(store) + ";")
            text.close()


def _tail(text: Text, clauses: str | None, low: str, high: str, count: int) -> tuple[int, int]:
    """How many iterations fill vectors, and how many are left for a masked one. What is left of
    a row is a loop of a fixed length under a condition, which compilers turn into masks."""
    fixed = (low, high) == ("0", f"{count}L") and clauses is not None
    fixed = fixed and not is_symbolic(count)
    if not fixed or count > LONGEST_WITH_TAIL or count % VECTOR < 2 or not _is_maskable(text):
        return count, 0
    return count - count % VECTOR, count % VECTOR


def _has_open_tail(text: Text, clauses: str | None, low: str, high: str, count: int) -> bool:
    """Whether what is left of a row of symbolic length should be masked."""
    whole = (low, high) == ("0", f"{count}L") and clauses is not None
    short = is_symbolic(count) and hint_of(count) <= LONGEST_WITH_TAIL
    return whole and short and _is_maskable(text)


def _open_tail(text: Text, this: Pass, sums: list[int], clauses: str, high: str) -> None:
    """The innermost loop over a length that is not known yet: vectors, then a masked one."""
    last = len(text.kernel.inner) - 1
    text.open("{")
    text.put(f"const i64 rest = {high} % {VECTOR}, full = rest > 1 ? {high} - rest : {high};")
    text.put(f"#pragma omp simd{clauses}")
    text.open(f"for (i64 i{last} = 0; i{last} < full; ++i{last}) {{")
    iteration(text, this, sums)
    text.close()
    text.open(f"if (full < {high}) {{")
    text.put(f"#pragma omp simd{clauses}")
    text.open(f"for (i64 lane = 0; lane < {VECTOR}; ++lane) {{")
    text.open("if (lane < rest) {")
    text.put(f"const i64 i{last} = full + lane;")
    iteration(text, this, sums)
    for _ in range(4):
        text.close()


def _is_maskable(text: Text) -> bool:
    """Whether a body is all float32, for which a vector is one register."""
    kernel = text.kernel
    types = {
        instr.dtype
        for instr, level in zip(kernel.code, kernel.levels, strict=True)
        if level == "element" and instr.op != "index"
    }
    stored = {text.buffers[number].dtype for number in (*kernel.reads, *kernel.writes)}
    plain = all(instr.op not in _LIBRARY for instr in kernel.code)
    return types <= {"f32", "bool", "i32"} and stored <= {"f32", "i64"} and plain


def iteration(text: Text, this: Pass, sums: list[int]) -> None:
    """What the innermost loop does for one element."""
    _values(text, this, this.body, text.linear())
    finish_iteration(text, this, sums)


def finish_iteration(text: Text, this: Pass, sums: list[int]) -> None:
    """What is done with the values of an element: they are kept, stored and summed."""
    kernel = text.kernel
    _keep(text, this, text.linear())
    for number in sums:
        text.accumulate(number, "t")
    for number in this.late:
        if text.is_column(number):
            args = [text.name(arg) for arg in kernel.code[number].args]
            text.take_column(number, f"a{number}[{text.linear()}]", *args)


def _values(text: Text, this: Pass, numbers: list[int], place: str) -> None:
    for number in numbers:
        instr = text.kernel.code[number]
        if number in this.reloads:
            kind = C_TYPES[instr.dtype]
            text.put(f"const {kind} v{number} = s{number}[{place}];")
        elif number in text.narrow:
            last = len(text.kernel.inner) - 1
            text.put(f"n{number}[i{last}] = (i32){text.name(instr.args[0])};")
        else:
            text.put(text.definition(number, instr))


def element_body(text: Text, this: Pass, place: str) -> None:
    _values(text, this, this.body, place)
    _keep(text, this, place)


def _keep(text: Text, this: Pass, place: str) -> None:
    for number in this.keeps:
        text.put(f"s{number}[{place}] = v{number};")
    for store in this.stores:
        if store.value not in text.narrow:
            text.put(text.store_text(store) + ";")
