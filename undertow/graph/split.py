"""Writes splits into a graph: nodes in pieces, and the slices, concatenations and sums around them.

Every new node has its fake value, so that the graph can be converted again. Where the whole of a
result is still needed, a concatenation of its pieces takes the place of the node that made it, in
the same layout in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.capture.schema import nodes_in
from undertow.errors import OrderError
from undertow.graph.coalesce import OF_ONE_CALL
from undertow.graph.collectives import collective_call
from undertow.graph.convert import Converted
from undertow.graph.describe import Descriptions
from undertow.graph.nodes import Values, tensors_of
from undertow.graph.row_axis import RESIZED, Axis, packet_of
from undertow.graph.splittable import RowWork
from undertow.program import CollectiveKind, Kind
from undertow.schedule.splits import Divided, Part, PartKind

_aten = torch.ops.aten
_RESIZED_AT = 1  # the position of the shape among the arguments of such an operator


def divide(work: RowWork, divided: Divided) -> Converted:
    """Bring the graph into the pieces that were decided on its Program.

    The result pairs the tasks of the divided Program with the graph's new nodes; their order in the
    graph is not legal until `undertow.graph.rewrite` has arranged them.
    """
    if not divided.splits:
        return work.converted
    writer = _Writer(work, divided)
    with torch.no_grad(), writer.fake_mode:
        nodes = [writer.add(part) for part in divided.parts]
    writer.erase_divided()
    return Converted(
        divided.program,
        tuple(nodes),
        work.converted.notes,
        work.converted.storages,
        {node: tuple(glue) for node, glue in writer.glue.items()},
    )


class _Writer:
    """One walk over the parts of a divided Program."""

    def __init__(self, work: RowWork, divided: Divided) -> None:
        self.work, self.divided = work, divided
        self.nodes = work.converted.nodes
        self.program = work.converted.program
        self.graph = self.nodes[0].graph
        self.output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        self.fake_mode = _fake_mode(self.nodes)
        self.counts = self._counts()
        self.pieces: dict[tuple[fx.Node, int], fx.Node] = {}
        self.count_of: dict[fx.Node, int] = {}  # value -> in how many pieces it is there
        self.whole_of: dict[fx.Node, fx.Node] = {}  # value -> what took its place
        self.copies: dict[tuple[int, int, int], fx.Node] = {}
        self.sums: dict[int, fx.Node] = {}
        self.glue: dict[fx.Node, list[fx.Node]] = {}
        self.kept: set[fx.Node] = set()
        self.renewed: set[fx.Node] = set()  # wholes made of pieces, and views of them
        self._made: list[fx.Node] = []
        self._alike = Descriptions(Values())
        self._known: dict[object, Any] = {}  # calls that look the same -> what one of them gave

    def _counts(self) -> dict[int, int]:
        """Task -> the number of its pieces."""
        found: dict[int, int] = {}
        for part in self.divided.parts:
            if part.kind is PartKind.PIECE:
                found[part.task] = max(found.get(part.task, 0), part.piece + 1)
        return found

    def add(self, part: Part) -> fx.Node:
        node = self.nodes[part.task]
        if part.kind is PartKind.WHOLE:
            return self._keep(node)
        made: list[fx.Node] = []
        self._made = made
        if part.kind is PartKind.PIECE:
            self._add_piece(node, part)
        elif part.kind is PartKind.CAT:
            self._add_cat(node, part)
        elif part.kind is PartKind.SUM:
            self._add_sum(node, part)
        else:
            self._add_copy(node, part)
        if len(made) > 1:
            self.glue[made[-1]] = made[:-1]
        return made[-1]

    # -- the parts ---------------------------------------------------------------------------------

    def _keep(self, node: fx.Node) -> fx.Node:
        self.kept.add(node)
        is_view = self.program.tasks[self.program.index[node.name]].kind is Kind.VIEW
        if is_view and any(source in self.renewed for source in node.all_input_nodes):
            self._renew(node)
        return node

    def _renew(self, node: fx.Node) -> None:
        """A view of what was put together shares its memory, and so must its value."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.renewed.add(node)
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]
                self.renewed.add(user)

    def _add_piece(self, node: fx.Node, part: Part) -> None:
        k, count = part.piece, self.counts[part.task]
        given = iter(self._ways(node))
        seen = -1

        def argument(arg: fx.Node) -> fx.Node:
            nonlocal seen
            known, axis = next(given)
            if self._whole(known) is not arg:
                raise OrderError(f"{node.name!r} was changed since it was looked at; plan anew")
            if axis is None:
                return arg
            seen += 1
            if self.work.axes.get(known) == axis and self.count_of.get(known) == count:
                return self.pieces[known, k]
            copied = self.copies.get((part.task, k, seen))
            return copied if copied is not None else self._slice(arg, axis, k, count)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
        args = self._resized(node, list(args), count)
        assert callable(node.target)
        made = self._call(node.target, args, kwargs, node, f"{node.name}_piece_{k}")
        self._register(node, made, k, count)

    def _ways(self, node: fx.Node) -> Iterable[tuple[fx.Node, Axis | None]]:
        return self.work.ways[node].arguments

    def _register(self, node: fx.Node, made: fx.Node, k: int, count: int) -> None:
        self.pieces[node, k] = made
        self.count_of[node] = 0 if self.work.ways[node].adds else count
        for user in list(node.users):
            if user.target is operator.getitem:
                picked = self._call(
                    operator.getitem, (made, user.args[1]), {}, user, f"{user.name}_piece_{k}"
                )
                self._made.pop()  # it is placed with what it picks from
                self.pieces[user, k] = picked
                self.count_of[user] = count

    def _resized(self, node: fx.Node, args: list[Any], count: int) -> tuple[Any, ...]:
        """Arguments that tell sizes, for a piece."""
        axis = self.work.axes.get(node)
        if axis is None:
            return tuple(args)
        if packet_of(node) in RESIZED:
            args[_RESIZED_AT] = _piece_shape(node.meta["val"].shape, axis, count)
        call = collective_call(node)
        if call is not None and call.work.kind is CollectiveKind.ALL_TO_ALL and axis.dim == 0:
            args[1:3] = [[size // count for size in sizes] for sizes in args[1:3]]
        return tuple(args)

    def _add_cat(self, node: fx.Node, part: Part) -> None:
        task = self.program.tasks[part.task]
        count = self.counts[part.task]
        buffer = task.writes[part.which]
        values = self._values(part.task, buffer)
        value = values[0]
        axis = self.work.axes[value]
        name = f"{value.name}_whole"
        pieces = [self.pieces[value, k] for k in range(count)]
        whole = self._concatenated(pieces, axis, value.meta["val"], name)
        for old in values:
            self.whole_of[old] = whole
            old.replace_all_uses_with(whole)

    def _values(self, task: int, buffer: int) -> list[fx.Node]:
        """The nodes that stand for one result of a task: itself, what picks it, or its wait."""
        node = self.nodes[task]
        waits = self.program.waits_of.get(task, ())
        if waits:
            return [self.nodes[waits[0]]]
        if isinstance(node.meta["val"], Tensor):
            return [node]
        storages = self.work.converted.storages
        return [
            user
            for user in node.users
            if user.target is operator.getitem
            and any(storages.get(torch_api.storage_key(t)) == buffer for t in tensors_of(user))
        ]

    def _concatenated(
        self, pieces: Sequence[fx.Node], axis: Axis, like: Tensor, name: str
    ) -> fx.Node:
        """The pieces as one tensor that lies in memory as `like` does."""
        order = _layout(like)
        is_moved = order != list(range(like.dim()))
        parts = list(pieces)
        if is_moved:
            parts = [self._call(_aten.permute.default, (piece, order), {}) for piece in parts]
        dim = order.index(axis.dim)
        shape = [int(like.shape[d]) for d in order]
        if axis.outer > 1:
            part_rows = axis.rows // len(parts)
            cut = [*shape[:dim], axis.outer, part_rows, axis.inner, *shape[dim + 1 :]]
            parts = [self._reshaped(part, cut) for part in parts]
            whole = self._call(_aten.cat.default, (parts, dim + 1), {}, pieces[0])
            whole = self._call(_aten.view.default, (whole, shape), {}, pieces[0])
        else:
            whole = self._call(_aten.cat.default, (parts, dim), {}, pieces[0])
        if is_moved:
            back = [order.index(d) for d in range(len(order))]
            whole = self._call(_aten.permute.default, (whole, back), {}, pieces[0])
        whole._rename(name)
        self.renewed.add(whole)
        return whole

    def _add_sum(self, node: fx.Node, part: Part) -> None:
        k = part.piece
        before = self.pieces[node, 0] if k == 1 else self.sums[part.task]
        is_last = k == self.counts[part.task] - 1
        name = f"{node.name}_whole" if is_last else f"{node.name}_sum_{k}"
        made = self._call(_aten.add.Tensor, (before, self.pieces[node, k]), {}, node, name)
        self.sums[part.task] = made
        if is_last:
            self.whole_of[node] = made
            node.replace_all_uses_with(made)

    def _add_copy(self, node: fx.Node, part: Part) -> None:
        cut = [(arg, axis) for arg, axis in self._ways(node) if axis is not None]
        arg, axis = cut[part.which]
        count, k = self.counts[part.task], part.piece
        whole = self._whole(arg)
        shape = [int(size) for size in whole.meta["val"].shape]
        piece_shape = _piece_shape(shape, axis, count)
        form = {"memory_format": torch.contiguous_format}
        if axis.outer == 1:
            piece = self._slice(whole, axis, k, count)
            made = self._call(_aten.clone.default, (piece,), form, arg)
        else:
            d, rows = axis.dim, axis.rows
            factors = [*shape[:d], axis.outer, rows, axis.inner, *shape[d + 1 :]]
            view = self._reshaped(whole, factors)
            piece = self._slice(view, Axis(d + 1, rows), k, count)
            made = self._call(_aten.clone.default, (piece,), form, arg)
            made = self._call(_aten.view.default, (made, piece_shape), {}, arg)
        self.copies[part.task, k, part.which] = made

    # -- nodes -------------------------------------------------------------------------------------

    def _whole(self, value: fx.Node) -> fx.Node:
        return self.whole_of.get(value, value)

    def _slice(self, whole: fx.Node, axis: Axis, k: int, count: int) -> fx.Node:
        length = axis.rows // count * axis.inner
        args = (whole, axis.dim, k * length, (k + 1) * length)
        return self._call(_aten.slice.Tensor, args, {}, whole)

    def _reshaped(self, node: fx.Node, shape: list[int]) -> fx.Node:
        try:
            return self._call(_aten.view.default, (node, shape), {}, node)
        except RuntimeError:  # it does not lie so in memory
            form = {"memory_format": torch.contiguous_format}
            copied = self._call(_aten.clone.default, (node,), form, node)
            return self._call(_aten.view.default, (copied, shape), {}, node)

    def _call(
        self,
        target: Callable[..., Any],
        args: Iterable[Any],
        kwargs: dict[str, Any],
        like: fx.Node | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """A new node with its value; `like` is the node whose notes it keeps."""
        args = tuple(args)
        try:
            value = self._value(target, args, kwargs)
        except RuntimeError:
            if target is not _aten.view.default or name is None:
                raise
            # A piece may lie otherwise than the whole did: in one run of memory any view works.
            form = {"memory_format": torch.contiguous_format}
            copied = self._call(_aten.clone.default, (args[0],), form, like)
            return self._call(target, (copied, *args[1:]), kwargs, like, name)
        with self.graph.inserting_before(self.output):
            made = self.graph.create_node("call_function", target, args, kwargs, name)
        if like is not None:
            made.meta = {k: v for k, v in like.meta.items() if k not in OF_ONE_CALL}
        made.meta["val"] = value
        self._made.append(made)
        return made

    def _value(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The fake value of a call. Pieces repeat: what others like it gave says what it gives, for
        to dispatch it takes ten times as long."""
        key = self._alike.key(target, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            return _anew(known)
        values, named = fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        if isinstance(target, torch_api.OpOverload) and _makes_views(target) and not named:
            return torch_api.view_of(target, *values)
        value = target(*values, **named)
        if key is not None and _is_new(value, nodes_in((args, kwargs))):
            self._known[key] = value
        return value

    def erase_divided(self) -> None:
        """Nodes that run in pieces go, with what picks from them and the views nobody needs."""
        gone = {node for node in self.nodes if node not in self.kept}
        for node in reversed(list(self.graph.nodes)):
            picks = node.target is operator.getitem and node.args[0] in gone
            if node in gone or picks:
                if node.users:
                    user = next(iter(node.users))
                    raise OrderError(
                        f"{user.name!r} still uses {node.name!r}, which was divided; this is a "
                        "fault of undertow's: turn splits off and report it"
                    )
                self.graph.erase_node(node)


def _makes_views(target: torch_api.OpOverload[..., Any]) -> bool:
    return target.is_view or target is _aten._unsafe_view.default


def _is_new(value: Any, given: Iterable[fx.Node]) -> bool:
    """Whether a call that was given these gave tensors, each with memory of its own."""
    tensors = value if isinstance(value, tuple) else (value,)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return False
    keys = {torch_api.storage_key(tensor) for tensor in tensors}
    before = {torch_api.storage_key(tensor) for node in given for tensor in tensors_of(node)}
    return len(keys) == len(tensors) and not keys & before


def _anew(known: Any) -> Any:
    """Other tensors like those that are known."""
    if isinstance(known, Tensor):
        return torch_api.new_like(known)
    return tuple([torch_api.new_like(tensor) for tensor in known])


def _piece_shape(shape: Iterable[int], axis: Axis, count: int) -> list[int]:
    sizes = [int(size) for size in shape]
    sizes[axis.dim] //= count
    return sizes


def _layout(tensor: Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))


def _fake_mode(nodes: Sequence[fx.Node]) -> Any:
    for node in nodes:
        for tensor in tensors_of(node):
            if isinstance(tensor, torch_api.FakeTensor):
                return tensor.fake_mode
    return torch_api.new_fake_mode()
