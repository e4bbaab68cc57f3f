"""From an FX graph of ATen calls to loop nests and extern calls, in program order.

Every tensor of the graph is a `View` of a buffer (or a `Constant`): the strides and offsets that
the fake tensors carry say all there is to say about views, so view operators cost nothing and need
no rules of their own. What has no loop form becomes an extern call, counted by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from undertow.capture.schema import named_arguments
from undertow.capture.torch_api import OpOverload
from undertow.errors import UndertowError
from undertow.loops.body import Body, CannotLower
from undertow.loops.dtypes import TAGS, TORCH
from undertow.loops.externs import OUT_VARIANTS, add_call, add_wait
from undertow.loops.ir import (
    Buffer,
    Constant,
    Lowered,
    Nest,
    Passed,
    Store,
    Value,
    View,
    contiguous,
    product,
    span_of,
)
from undertow.loops.pointwise import POINTWISE
from undertow.loops.random_states import run_and_save, run_with
from undertow.loops.recipes import Recipe, make_recipe
from undertow.loops.sizes import DynamicShapesError, InexactSizeError, Scalar, Size
from undertow.loops.symbols import meta_tensor
from undertow.loops.tensors import (
    all_lowerable,
    check_static,
    effect_tokens,
    is_opaque,
    is_view,
    lowerable,
    metas_of,
    reads_of,
    spread,
    takes,
    written_roots,
)

aten = torch.ops.aten
Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
"""Operators with a loop form beside the elementwise ones, by name without overload."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    def keep(function: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = function
        return function

    return keep


def name_of(node: fx.Node) -> str:
    """An operator's own name, without its namespace and overload."""
    return str(node.target._schema.name.partition("::")[2])  # type: ignore[union-attr]


def lower_graph(gm: fx.GraphModule) -> Lowered:
    """Lower every call of a graph whose nodes carry `meta["val"]`."""
    from undertow.loops import (  # noqa: F401 (for HANDLERS)
        movement,
        pooling,
        random,
        reductions,
        scans,
        scatter,
    )

    lowering = Lowering(gm)
    for node in gm.graph.nodes:
        lowering.visit(node)
    return lowering.result


class Lowering:
    """The state of one lowering: what each node's value is, and the steps so far."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.result = Lowered()
        self.env: dict[fx.Node, Any] = {}
        self.lazy: dict[int, list[fx.Node]] = {}  # nodes that are casts of a buffer, by buffer
        self.made: dict[Value, View] = {}  # values that had to be written out
        self.recipes: dict[int, Recipe] = {}  # cheap results, by buffer
        self.readers: dict[int, list[int]] = {}  # recipes that read a buffer
        self.by_nest: set[int] = set()  # buffers that nests make
        self.written = written_roots(gm.graph)
        self.tokens = effect_tokens(gm.graph)

    # -- the walk ---------------------------------------------------------------------------

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.env[node] = self.input(node, node.meta.get("val"))
            self.result.inputs.append(self.env[node])
        elif node.op == "get_attr":
            value: Any = self.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            self.env[node] = self.attribute(node, value)
        elif node.op == "call_function":
            self.result.nodes.append(node.name)
            whole = node.meta.get("original_aten") or node.target
            self.result.operators.append(getattr(whole, "_opname", getattr(whole, "__name__", "")))
            self.env[node] = self.call(node)
        elif node.op == "output":
            self.result.outputs = [self.output(item) for item in node.args[0]]  # type: ignore[union-attr]
        else:
            raise UndertowError(f"a graph of ATen calls has no {node.op!r} nodes ({node.name})")

    def input(self, node: fx.Node, meta: Any) -> Any:
        if isinstance(meta, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise DynamicShapesError(f"the input {node.name} is a size that is not fixed")
        if not isinstance(meta, torch.Tensor):
            known = isinstance(meta, int | float | bool | Size | Scalar)
            return meta if known else Passed(len(self.result.inputs))
        check_static(meta)
        if not lowerable(meta) or node in self.tokens:
            # known to extern calls alone: the buffer stands for the tensor, whatever it holds
            return self.opaque(node.name, meta, "input")
        sizes, strides = tuple(meta.shape), tuple(meta.stride())
        buffer = self.buffer(node.name, TAGS[meta.dtype], sizes, strides, "input")
        return View(buffer, sizes, strides, 0, TAGS[meta.dtype])

    def attribute(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = self.input(node, value)
        self.result.constants[found.buffer] = value
        return found

    def output(self, item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        value = self.env[item]
        return self.tensor(value) if isinstance(value, View | Constant) else value

    def call(self, node: fx.Node) -> Any:
        target: Any = node.target
        if isinstance(node.meta.get("val"), int | float | bool | Size | Scalar):
            return node.meta["val"]  # arithmetic on sizes
        if getattr(target, "__name__", "") == "getitem":
            return self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        if not isinstance(target, OpOverload):
            kept = "a checkpoint keeps the state of its random generator"
            is_kept = target in (run_and_save, run_with)
            return self.extern(node, kept if is_kept else "not an operator of ATen")
        name = name_of(node)
        if str(target).startswith("_c10d_functional.wait_tensor"):
            return add_wait(self, node)
        if target._schema.is_mutable:
            if target is aten.copy_.default:
                return self.copy_into(node)
            return self.extern(node, "it writes to its arguments")
        if is_view(target):
            found = self.view(node)
            if found is not None:
                return found
            return self.extern(node, "a view that strides do not express")
        reason = "a tensor without elements, or of a type or place that loops do not take"
        if target in OUT_VARIANTS:
            reason = "a matrix product, for which ATen's is used"
        elif str(target).startswith("_c10d_functional"):
            reason = "a collective"
        elif all_lowerable(node):
            reason = "it has no loop form"
            mark = len(self.result.steps), len(self.result.buffers)
            try:
                found = self.lower_call(node, name)
            except (CannotLower, InexactSizeError) as error:
                reason = str(error)
                self.roll_back(*mark)
                found = None
            if found is not None:
                return found
        return self.extern(node, reason)

    def roll_back(self, steps: int, buffers: int) -> None:
        """Forget what a rule did before it found that it could not go on."""
        for number in range(buffers, len(self.result.buffers)):
            self.recipes.pop(number, None)
            self.by_nest.discard(number)
        for key, view in list(self.made.items()) if buffers < len(self.result.buffers) else ():
            if view.buffer >= buffers:
                del self.made[key]
        del self.result.steps[steps:], self.result.buffers[buffers:]

    def lower_call(self, node: fx.Node, name: str) -> Any:
        handler = HANDLERS.get(name)
        if handler is not None:
            args, kwargs = self.values(node.args), self.values(node.kwargs)
            if not takes(handler, (self, node, *args), kwargs):
                raise CannotLower("an overload that the rule does not know")
            return handler(self, node, *args, **kwargs)
        if name in POINTWISE and isinstance(node.meta["val"], torch.Tensor):
            return self.pointwise(
                node.name,
                name,
                node.meta["val"],
                self.values(node.args),
                self.values(node.kwargs),
                metas_of((*node.args, *node.kwargs.values())),
            )
        return None

    # -- values -----------------------------------------------------------------------------

    def values(self, item: Any) -> Any:
        """Arguments with nodes replaced by what they are to us."""
        if isinstance(item, fx.Node):
            return self.env[item]
        if isinstance(item, list | tuple):
            return [self.values(part) for part in item]
        if isinstance(item, dict):
            return {key: self.values(part) for key, part in item.items()}
        return item

    def buffer(
        self, name: str, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], kind: str
    ) -> int:
        number = len(self.result.buffers)
        self.result.buffers.append(Buffer(number, name, dtype, sizes, strides, kind))
        return number

    def opaque(self, name: str, meta: torch.Tensor, kind: str) -> View:
        sizes = tuple(meta.shape) if not meta.is_sparse else ()
        number = self.buffer(name, "opaque", sizes, (), kind)
        return View(number, sizes, (), 0, "opaque")

    def fresh(self, name: str, meta: torch.Tensor) -> View:
        """A new buffer laid out as eager would lay out this result."""
        sizes, strides = tuple(meta.shape), tuple(meta.stride())
        if span_of(sizes, strides) != product(sizes):
            raise CannotLower("a result whose memory has holes")
        tag = TAGS[meta.dtype]
        return View(self.buffer(name, tag, sizes, strides, "temp"), sizes, strides, 0, tag)

    def tensor(self, value: Any) -> View:
        """A value in memory as it is, written out if it was not."""
        if isinstance(value, View) and not value.casts:
            return value
        found = self.made.get(value)
        if found is None:
            strides = value.strides if isinstance(value, View) else contiguous(value.sizes)
            if span_of(value.sizes, strides) != product(value.sizes):
                strides = contiguous(value.sizes)
            meta = meta_tensor(value.sizes, strides, TORCH[value.dtype])
            found = self.fresh("copy", meta)
            body = Body(value.sizes, value.dtype)
            self.nest(body, found, body.load(value), "copy")
            self.made[value] = found
        return found

    # -- steps ------------------------------------------------------------------------------

    def nest(
        self,
        body: Body,
        out: View | list[tuple[View, int]],
        value: int,
        origin: str,
        reduced: tuple[bool, ...] = (),
        scanned: int = -1,
    ) -> View:
        """Add a nest that stores `value` to `out`, over the loops of the body."""
        pairs = [(out, value)] if isinstance(out, View) else out
        stores = []
        for view, stored in pairs:
            strides = view.strides
            if reduced:
                strides = spread(view, reduced)
            stores.append(Store(view.buffer, strides, view.offset, stored))
        reduced = reduced or (False,) * len(body.sizes)
        self.by_nest.update(store.buffer for store in stores)
        self.result.steps.append(
            Nest(
                len(self.result.steps),
                body.sizes,
                reduced,
                tuple(body.instrs),
                tuple(stores),
                origin,
                reads=reads_of(body.instrs),
                writes=tuple(store.buffer for store in stores),
                scanned=scanned,
            )
        )
        return pairs[0][0]

    def scatter(self, body: Body, store: Store, origin: str) -> None:
        """Add a nest that writes at computed addresses, over what the buffer has."""
        reads = reads_of(body.instrs)
        if store.buffer in reads:
            raise CannotLower("it reads what it writes to")
        self.result.steps.append(
            Nest(
                len(self.result.steps),
                body.sizes,
                (False,) * len(body.sizes),
                tuple(body.instrs),
                (store,),
                origin,
                reads=(*reads, store.buffer),
                writes=(store.buffer,),
            )
        )

    def pointwise(
        self, origin: str, name: str, meta: Any, args: Any, kwargs: Any, metas: tuple[Any, ...]
    ) -> Value:
        body = Body(tuple(meta.shape), TAGS[meta.dtype], metas, self.recipes)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("memory_format", "dtype")}
        if not takes(POINTWISE[name], (body, *args), kwargs):
            raise CannotLower("an overload that the rule does not know")
        value = body.cast(POINTWISE[name](body, *args, **kwargs), body.t)
        if body.instrs[value].op == "const" and not self.written:
            return Constant(body.sizes, body.out, body.instrs[value].data)
        out = self.nest(body, self.fresh(origin, meta), value, origin)
        value = body.convert(value, out.dtype)  # as a reader of the buffer would find it
        recipe = self.recipe(body, value, out)
        if recipe is not None:
            self.recipes[out.buffer] = recipe
            for number in reads_of(recipe.body):
                self.readers.setdefault(number, []).append(out.buffer)
        return out

    def recipe(self, body: Body, value: int, out: View) -> Recipe | None:
        """How to make a result again: from what is furthest back, if that is cheap."""
        recipe = make_recipe(body.sizes, out.strides, tuple(body.instrs), value)
        if recipe is None or not any(n in self.recipes for n in reads_of(body.instrs)):
            return recipe
        whole = Body(body.sizes, body.out, (), self.recipes)
        value = whole.expand(recipe.body, value)
        further = make_recipe(body.sizes, out.strides, tuple(whole.instrs), value)
        return recipe if further is None or further.per_row > recipe.per_row else further

    def body(self, sizes: tuple[int, ...], dtype: str) -> Body:
        """A body that may compute cheap results again."""
        return Body(sizes, dtype, (), self.recipes)

    def is_at_hand(self, value: Value) -> bool:
        """Whether reading a window of a value does not force it to be written for that alone."""
        if isinstance(value, Constant):
            return True
        recipe = self.recipes.get(value.buffer)
        return value.buffer not in self.by_nest or (recipe is not None and not recipe.per_row)

    def view(self, node: fx.Node) -> Any:
        """What a view operator returns: other strides on the same buffer."""
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        base = self.env[source]
        meta, before = node.meta["val"], source.meta["val"]
        if isinstance(meta, list | tuple):
            found = [self.view_of(base, before, part) for part in meta]
            return None if any(part is None for part in found) else found
        return self.view_of(base, before, meta)

    def view_of(self, base: Any, before: torch.Tensor, meta: torch.Tensor) -> Value | None:
        check_static(meta)
        if meta.dtype != before.dtype or not lowerable(meta) or not lowerable(before):
            return None
        if isinstance(base, Constant):
            return Constant(tuple(meta.shape), base.dtype, base.number)
        if not isinstance(base, View) or base.dtype == "opaque":
            return None
        moved: Any = meta.storage_offset() - before.storage_offset()
        return View(
            base.buffer,
            tuple(meta.shape),
            tuple(meta.stride()),
            base.offset + moved,
            base.dtype,
            base.casts,
        )

    def settle(self, buffer: int) -> None:
        """Write out casts of a buffer before it changes under them."""
        for node in self.lazy.pop(buffer, ()):
            value = self.env[node]
            if isinstance(value, View) and value.casts:
                self.env[node] = self.tensor(value)
        for number in (buffer, *self.readers.pop(buffer, ())):
            self.recipes.pop(number, None)
        for value in [v for v in self.made if isinstance(v, View) and v.buffer == buffer]:
            del self.made[value]

    def copy_into(self, node: fx.Node) -> Any:
        args = named_arguments(node)
        target, source = self.env[args["self"]], self.values(args["src"])
        if not isinstance(target, View) or is_opaque(target) or not all_lowerable(node):
            return self.extern(node)
        assert not target.casts, "a cast that is written to has memory of its own"
        self.settle(target.buffer)
        if isinstance(source, View) and source.buffer == target.buffer and source != target:
            return self.extern(node)  # it may read what it has already overwritten
        body = Body(target.sizes, target.dtype)
        try:
            value = body.take(source, body.t)
        except CannotLower:
            return self.extern(node)
        self.nest(body, target, value, node.name)
        return target

    def extern(self, node: fx.Node, reason: str = "what it copies overlaps") -> Any:
        return add_call(self, node, reason)
