"""From a graph whose fake tensors have symbolic sizes to one that can be lowered.

Each SymInt becomes a `Size`: sums and products of symbols as they are, and anything else (a floor
division, a maximum) an atom that is computed before the kernels run. The numbers behind the symbols
are read from the arguments of each call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from undertow.capture.torch_api import without_fakes
from undertow.loops.sizes import Atom, DynamicShapesError, OddSizeError, Scalar, Size, Table

LEAST_HINT = 32  # small numbers make sizes that are 1 by accident, which others are not


class SizedTensor(torch.Tensor):
    """Stands for a tensor of symbolic sizes while a graph is lowered. It has no memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(
        sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 0
    ) -> torch.Tensor:
        with without_fakes():
            plain = torch.empty((1,) * len(sizes), dtype=dtype, device="meta")
            made = plain.as_subclass(SizedTensor)
        made.sizes, made.strides, made.offset = sizes, strides, offset
        return made

    @property
    def shape(self) -> Any:  # type: ignore[override]
        return self.sizes

    def stride(self, dim: Any = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def storage_offset(self) -> int:
        return self.offset


def meta_tensor(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor without memory; its sizes may be symbols."""
    if any(isinstance(size, Size) for size in (*sizes, *strides)):
        return SizedTensor.of(sizes, strides, dtype)
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


@dataclass(slots=True)
class Symbols:
    """The symbols of a graph: as sizes, and where an argument tells each."""

    table: Table = field(default_factory=Table)
    sources: dict[Any, tuple[int, int | None]] = field(default_factory=dict)  # argument, dimension
    unbacked: set[int] = field(default_factory=set)  # places in `sources` of what values told

    def read(self, args: list[Any]) -> tuple[int, ...]:
        """The value of each symbol in a call, in the order of `sources`. Torch compiles anew for
        sizes of 0 and 1, where these follow other rules, but not for those that values told."""
        found = tuple(
            args[at] if dim is None else args[at].shape[dim] for at, dim in self.sources.values()
        )
        if any(found[at] < 2 for at in self.unbacked):
            raise OddSizeError("a size of 0 or 1 that only values told")
        return found

    def named(self, values: tuple[int, ...]) -> dict[Any, int]:
        return dict(zip(self.sources, values, strict=True))

    # -- from torch's expressions to ours ---------------------------------------------------

    def size(self, value: Any) -> int:
        """A SymInt as a size. It is an int to all who need not know."""
        if isinstance(value, int):
            return value
        return self._size(value.node.expr, value.node.shape_env)

    def _size(self, expr: Any, env: Any) -> int:
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr.is_Add:
            return sum(self._size(part, env) for part in expr.args)
        if expr.is_Mul:
            total = 1
            for part in expr.args:
                total = total * self._size(part, env)
            return total
        if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
            total = 1
            for _ in range(int(expr.exp)):
                total = total * self._size(expr.base, env)
            return total
        return self.table.atom(expr, lambda: self._atom(expr, env))

    def _atom(self, expr: Any, env: Any) -> Atom:
        hints = {}
        for symbol in expr.free_symbols:
            known = env.backed_var_to_val.get(symbol, 0)
            if symbol not in self.sources:
                raise DynamicShapesError(f"no argument tells the size {symbol}")
            if symbol not in env.backed_var_to_val:
                self.unbacked.add(list(self.sources).index(symbol))
            hints[symbol] = sympy.Integer(max(int(known), LEAST_HINT))
        bound = env.bound_sympy(expr).lower
        least = int(bound) if getattr(bound, "is_Integer", False) else -1
        return Atom(
            str(expr), int(expr.xreplace(hints)), least, lambda symbols, _: evaluated(expr, symbols)
        )

    def find_sources(self, graph: fx.Graph) -> None:
        """Which argument tells each symbol."""
        inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
        for at, value in enumerate(inputs):
            if isinstance(value, torch.SymInt) and _is_symbol(value):
                self.sources.setdefault(value.node.expr, (at, None))
        for at, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and _is_symbol(size):
                        self.sources.setdefault(size.node.expr, (at, dim))

    def value(self, meta: Any) -> Any:
        """What a node of the graph stands for, without SymInts."""
        if isinstance(meta, torch.SymInt):
            return self.size(meta)
        if isinstance(meta, torch.SymFloat | torch.SymBool):
            return self.scalar(meta)
        if isinstance(meta, list | tuple):
            return type(meta)(self.value(part) for part in meta)
        if not isinstance(meta, torch.Tensor):
            return meta
        return self.tensor(meta)

    def scalar(self, meta: Any) -> Scalar:
        expr = meta.node.expr
        kind = float if isinstance(meta, torch.SymFloat) else bool
        if any(symbol not in self.sources for symbol in expr.free_symbols):
            raise DynamicShapesError(f"no argument tells {expr}")

        def find(symbols: dict[Any, int], _: list[Any]) -> Any:
            numbers = {s: sympy.Integer(symbols[s]) for s in expr.free_symbols}
            return kind(expr.xreplace(numbers))

        return self.table.scalar((kind, expr), lambda: Atom(str(expr), 0, -1, find))

    def tensor(self, meta: torch.Tensor) -> torch.Tensor:
        if meta.layout is not torch.strided:
            raise DynamicShapesError("a sparse tensor among symbolic sizes")
        numbers = (*meta.shape, *meta.stride(), meta.storage_offset())
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            return meta
        if meta.device.type not in ("cpu", "meta") or meta.is_neg() or meta.is_conj():
            raise DynamicShapesError("a tensor that kernels do not take, of symbolic size")
        sizes = tuple(self.size(size) for size in meta.shape)
        for size in cast(tuple[object, ...], sizes):
            if isinstance(size, Size) and size.hint < 2:
                raise DynamicShapesError(f"the size {size!r}, which may be 1")
        strides = tuple(self.size(stride) for stride in meta.stride())
        return SizedTensor.of(sizes, strides, meta.dtype, self.size(meta.storage_offset()))


def evaluated(expr: Any, symbols: dict[Any, int]) -> int:
    if isinstance(expr, int):
        return expr
    if expr.is_Symbol:
        return symbols[expr]
    return int(expr.xreplace({s: sympy.Integer(symbols[s]) for s in expr.free_symbols}))


def _is_symbol(value: torch.SymInt) -> bool:
    return bool(getattr(value.node.expr, "is_Symbol", False))


def with_symbols(gm: fx.GraphModule) -> tuple[fx.GraphModule, Symbols]:
    """A copy of a graph whose nodes carry sizes of ours in place of SymInts."""
    symbols = Symbols()
    symbols.find_sources(gm.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = symbols.value(node.meta["val"])
    return copy, symbols
