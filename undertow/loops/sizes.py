"""Sizes that are known only when a kernel is called: polynomials in symbols.

A `Size` stands where an int would: in loop ranges, strides and offsets. Arithmetic on it is exact
and so is equality, which holds for all values or is not said to hold. Comparisons go by a hint:
they may choose between ways that are all right, and what must hold for every value asks `is_less`
or `is_at_least`. What has no exact form (a division with a remainder, a Python int) raises.

In C++ a size is an identifier that spells the polynomial, and `declared` puts its definition at the
head of each function that uses it. So the text of a kernel needs no care for symbols.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeGuard, cast

from undertow.errors import UndertowError
from undertow.loops.ir import Constant, View

SIZES = -1
"""The number that stands for the table of values among the buffers of a kernel."""

Monomial = tuple[int, ...]
"""The atoms of a product, by number, sorted."""


class DynamicShapesError(UndertowError):
    """The graph has sizes that are not numbers."""


class OddSizeError(DynamicShapesError):
    """A size that is rare, for which no kernels are made."""


class InexactSizeError(DynamicShapesError):
    """Something asked of a symbolic size that only a number can answer."""


@dataclass(frozen=True, slots=True)
class Atom:
    """A symbol, or something that is computed from symbols before the kernels run."""

    name: str
    hint: int
    least: int
    find: Callable[[dict[Any, int], list[Any]], Any]  # from values of symbols and earlier atoms


@dataclass(slots=True)
class Table:
    """The atoms of one graph, in the order of their numbers."""

    atoms: list[Atom] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def atom(self, key: Any, make: Callable[[], Atom]) -> int:
        """The size that is one atom, made if it is new. It is an int to all who need not know."""
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = len(self.atoms)
            self.atoms.append(make())
        return cast(int, Size({(number,): 1}, self))

    def scalar(self, key: Any, make: Callable[[], Atom]) -> Scalar:
        """The same for a number that is no size."""
        self.atom(key, make)
        return Scalar(self.known[key])

    def values(self, symbols: dict[Any, int]) -> list[Any]:
        found: list[Any] = []
        for atom in self.atoms:
            found.append(atom.find(symbols, found))
        return found

    def hints(self) -> list[int]:
        return [atom.hint for atom in self.atoms]


class Scalar(NamedTuple):
    """A float or a truth that depends on sizes, by the number of its atom; for ATen calls alone."""

    number: int


class Size:
    """A polynomial with integer coefficients in the atoms of a table; never a constant."""

    __slots__ = ("hint", "table", "terms")

    def __init__(self, terms: dict[Monomial, int], table: Table) -> None:
        self.terms = tuple(sorted(terms.items()))
        self.table = table
        self.hint = self.at(table.hints())

    def at(self, values: list[int]) -> int:
        """What it is for these values of the atoms."""
        total = 0
        for atoms, factor in self.terms:
            for atom in atoms:
                factor *= values[atom]
            total += factor
        return total

    @property
    def least(self) -> int | None:
        """A bound from below, if one is easily seen."""
        least = [atom.least for atom in self.table.atoms]
        for atoms, factor in self.terms:
            if atoms and (factor < 0 or any(least[atom] < 0 for atom in atoms)):
                return None
        return self.at(least)

    # -- arithmetic -------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        terms = dict(self.terms)
        for atoms, factor in _terms(other):
            terms[atoms] = terms.get(atoms, 0) + factor
        return _made(terms, self.table)

    def __mul__(self, other: Any) -> Any:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                key = tuple(sorted((*left, *right)))
                terms[key] = terms.get(key, 0) + a * b
        return _made(terms, self.table)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __floordiv__(self, other: Any) -> Any:
        found = quotient(self, other)
        if found is None:
            raise InexactSizeError(f"{self!r} is not a multiple of {other!r}")
        return found

    def __mod__(self, other: Any) -> NoReturn:
        raise InexactSizeError(f"the remainder of {self!r} by {other!r}")

    def __rmod__(self, other: Any) -> NoReturn:
        raise InexactSizeError(f"the remainder of {other!r} by {self!r}")

    def __rfloordiv__(self, other: Any) -> NoReturn:
        raise InexactSizeError(f"{other!r} divided by {self!r}")

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return _split(self, other)

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return _split(other, self)

    def __abs__(self) -> Any:
        return -self if self.hint < 0 else self

    # -- comparison -------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)

    def __lt__(self, other: Any) -> bool:
        return self.hint < hint_of(other)

    def __le__(self, other: Any) -> bool:
        return self.hint <= hint_of(other)

    def __gt__(self, other: Any) -> bool:
        return self.hint > hint_of(other)

    def __ge__(self, other: Any) -> bool:
        return self.hint >= hint_of(other)

    # -- numbers and text -------------------------------------------------------------------

    def __index__(self) -> int:
        raise InexactSizeError(f"{self!r} is not a number yet")

    def __float__(self) -> float:
        raise InexactSizeError(f"{self!r} is not a number yet")

    __int__ = __index__

    def __repr__(self) -> str:
        names = [atom.name for atom in self.table.atoms]
        return " + ".join(
            "*".join([*([str(f)] if f != 1 or not atoms else []), *(names[a] for a in atoms)])
            for atoms, f in reversed(self.terms)
        )

    def __format__(self, spec: str) -> str:
        """The identifier that stands for it in C++."""
        return "z_" + "p".join(
            f"{'m' if factor < 0 else ''}{abs(factor)}" + "".join(f"s{atom}" for atom in atoms)
            for atoms, factor in self.terms
        )


def is_symbolic(item: object) -> TypeGuard[Size]:
    return isinstance(item, Size)


def hint_of(size: Any) -> int:
    return size.hint if isinstance(size, Size) else cast(int, size)


def _terms(item: Any) -> Iterable[tuple[Monomial, int]]:
    if isinstance(item, Size):
        return item.terms
    if isinstance(item, int):
        return (((), item),)
    raise InexactSizeError(f"arithmetic of a size with {item!r}")


def _made(terms: dict[Monomial, int], table: Table) -> Any:
    left = {atoms: factor for atoms, factor in terms.items() if factor}
    return left.get((), 0) if not left.keys() - {()} else Size(left, table)


def quotient(size: Any, by: Any) -> Any:
    """`size / by` if that is whole for all values, else None.

    >>> quotient(12, 4), quotient(12, 5)
    (3, None)
    """
    if isinstance(size, int) and isinstance(by, int):
        return None if size % by else size // by
    if isinstance(size, int):
        return 0 if size == 0 else None
    table = size.table
    rest, found = dict(size.terms), dict[Monomial, int]()
    lead, factor = max(_terms(by), key=_degree)
    while rest:
        top = max(rest.items(), key=_degree)
        left = list(top[0])
        for atom in lead:
            if atom not in left:
                return None
            left.remove(atom)
        if top[1] % factor:
            return None
        key, times = tuple(left), top[1] // factor
        found[key] = found.get(key, 0) + times
        for atoms, step in _terms(by):
            place = tuple(sorted((*key, *atoms)))
            rest[place] = rest.get(place, 0) - times * step
            if not rest[place]:
                del rest[place]
    return _made(found, table)


def _degree(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return len(term[0]), term[0]


def _split(size: Any, by: Any) -> tuple[Any, Any]:
    """A quotient and a remainder that is surely one, 0 <= remainder < by."""
    whole, rest = cast(Any, 0), cast(Any, 0)
    table = (size if isinstance(size, Size) else by).table
    for atoms, factor in _terms(size):
        part = _made({atoms: factor}, table)
        found = quotient(part, by)
        if found is None and isinstance(part, int) and isinstance(by, int):
            found, part = divmod(part, by)
            rest = rest + part
        elif found is None:
            rest, found = rest + part, 0
        whole = whole + found
    if not is_at_least(rest, 0) or not is_less(rest, by):
        raise InexactSizeError(f"the remainder of {size!r} by {by!r}")
    return whole, rest


def is_less(a: Any, b: Any) -> bool:
    """Whether a < b for all values, as far as is easily seen."""
    return is_at_least(b - a, 1)


def is_at_least(a: Any, b: Any) -> bool:
    """Whether a >= b for all values, as far as is easily seen."""
    gap = a - b
    if isinstance(gap, Size):
        return gap.least is not None and gap.least >= 0
    return bool(gap >= 0)


def ceil_div(size: Any, by: int) -> int:
    """`size / by` rounded up; of a symbolic size, a new atom that is computed before the call."""
    if not isinstance(size, Size):
        return -(-cast(int, size) // by)

    def find(_: dict[Any, int], values: list[int]) -> int:
        return -(-size.at(values) // by)

    return size.table.atom(
        (size.terms, by), lambda: Atom(f"ceil({size!r}, {by})", -(-size.hint // by), 0, find)
    )


def at(item: Any, values: list[int]) -> Any:
    """A value, an argument or a list of them with numbers for its sizes."""
    if isinstance(item, Size):
        return item.at(values)
    if isinstance(item, Scalar):
        return values[item.number]
    if isinstance(item, View):
        sizes, strides = at(item.sizes, values), at(item.strides, values)
        return item._replace(sizes=sizes, strides=strides, offset=at(item.offset, values))
    if isinstance(item, Constant):
        return item._replace(sizes=at(item.sizes, values))
    if type(item) is list or type(item) is tuple:
        return type(item)(at(part, values) for part in item)
    if type(item) is dict:
        return {key: at(part, values) for key, part in item.items()}
    return item


_NAME = re.compile(r"\bz_[0-9msp]+(L?)\b")
_FUNCTION = re.compile(r"(^(?:static|extern) [^\n]*\{\n)", re.MULTILINE)


def declared(text: str, slot: int) -> tuple[str, bool]:
    """C++ with the sizes it names defined at the head of each function, from the table of values
    that pointer `slot` leads to; and whether it names any."""
    parts = _FUNCTION.split(text)
    used = False
    for k in range(2, len(parts), 2):
        names = sorted({match.group() for match in _NAME.finditer(parts[k])})
        if names:
            used = True
            head = f"  const i64 *const S = (const i64 *)P[{slot}];\n"
            parts[k] = head + "".join(f"  const i64 {n} = {_c(n)};\n" for n in names) + parts[k]
    return "".join(parts), used


def _c(name: str) -> str:
    """The C++ of the polynomial that an identifier spells."""
    found = []
    for term in name[2:].removesuffix("L").split("p"):
        factor, *atoms = term.split("s")
        number = factor.replace("m", "-") + "L"
        found.append(" * ".join([number, *(f"S[{atom}]" for atom in atoms)]))
    return " + ".join(found)
