"""Collectives of a bucket as one call on a flat tensor, by copies that later compilers can see.

The inputs are packed into one tensor (`cat`, or copies into an empty one where they are cast on the
way or not contiguous), one plain collective works on that, one wait follows, and what the wait of
each member stood for is taken out of the flat result: a view of it for reductions, else a copy.
Sizes that are symbolic stay so. `undertow.schedule.bucket_copies` is the same on the Program.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.graph.collectives import CollectiveCall, collective_call, is_wait
from undertow.graph.nodes import number, tensors_of
from undertow.graph.storages import Storages
from undertow.program import CollectiveKind

_aten, _c10d = torch.ops.aten, torch_api.collectives
_AG, _RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
_AR, _A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL

_VIEWS = (_aten.view.default, _aten.split_with_sizes.default)

Size = Any  # an int, or the node of a symbolic one


@dataclass(frozen=True)
class Written:
    """The nodes that a copied bucket became: for the copy that packs, for the one wait, and for
    what every member's wait stood for."""

    pack: list[fx.Node]
    wait: list[fx.Node]
    unpacks: dict[fx.Node, list[fx.Node]]


@dataclass
class _Part:
    """One tensor of one member."""

    source: fx.Node  # before a cast that the copy does
    given: Tensor  # what the collective was given: its dtype and shape
    waits: list[fx.Node]  # in graph order
    into: fx.Node | None = None  # the tensor that it writes to, if that is given
    names: list[fx.Node] = field(default_factory=list)  # what its result goes by in the graph
    others: list[fx.Node] = field(default_factory=list)  # that use the given tensor by those names
    splits: tuple[list[Size], list[Size]] | None = None  # all-to-all: sent and received, in rows
    size: Size = (
        0  # numbers (or bytes) of it in the flat tensor, for one rank where they interleave
    )
    piece: Any = None  # of the flat result

    @property
    def result(self) -> Tensor:
        value: Tensor = self.waits[0].meta["val"]
        return value


def why_not_copied(node: fx.Node, call: CollectiveCall) -> str:
    """Why a collective cannot be part of a copied bucket; empty if it can."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return "it has a backward of its own"
    parts = _parts(node, call, ())
    if parts is None:
        return "a result of it is used as it is, before any wait or without one"
    for part in parts:
        given, result = part.given, part.result
        if given.is_complex() or given.layout is not torch.strided:
            return "it is of complex numbers or not laid out plainly"
        if any(number(s) == 0 for s in given.stride()) and number(given.numel()) > 1:
            return "its input is expanded"
        if not result.is_contiguous() or number(result.numel()) == 0:
            return "its result is empty or not contiguous"
        if part.into is not None and not part.into.meta["val"].is_contiguous():
            return "it writes to a tensor that is not contiguous"
        if call.work.kind is _A2A and not given.is_contiguous():
            return "its input is not contiguous"
        if is_looked_at_otherwise(call, part.waits):
            return "its result is looked at as another dtype"
    return ""


def _parts(member: fx.Node, call: CollectiveCall, casts: Collection[fx.Node]) -> list[_Part] | None:
    """The tensors of a collective; None if a result is used by anything but waits."""
    arguments = named_arguments(member)
    names: list[list[fx.Node]] = [[] for _ in call.read]
    if not isinstance(member.meta["val"], list | tuple):
        names[0] = [member]
    else:
        for pick in member.users:
            if pick.target is not operator.getitem or not isinstance(pick.args[1], int):
                return None
            names[pick.args[1]].append(pick)
    parts = []
    for k, source in enumerate(call.read):
        (given,) = tensors_of(source)[:1]
        users = [user for name in names[k] for user in name.users]
        waits = sorted(user for user in users if is_wait(user))
        others = [user for user in users if not is_wait(user)]
        into = call.written[k] if k < len(call.written) else None
        if not waits or (others and into is None):
            return None
        if source in casts:
            source = source.all_input_nodes[0]
        part = _Part(source, given, waits, into, names[k], others)
        if call.work.kind is _A2A:
            sent, received = arguments["input_split_sizes"], arguments["output_split_sizes"]
            part.splits = (list(sent), list(received))
        parts.append(part)
    return parts


def is_looked_at_otherwise(call: CollectiveCall, waits: Sequence[fx.Node]) -> bool:
    """Whether a result that would be a view of the flat one is looked at as another dtype."""
    if call.work.kind not in (_RS, _AR):
        return False
    todo, seen = list(waits), set(waits)
    storages = {torch_api.storage_key(wait.meta["val"]): wait.meta["val"].dtype for wait in waits}
    while todo:
        for user in todo.pop().users:
            tensors = [x for x in tensors_of(user) if torch_api.storage_key(x) in storages]
            if any(x.dtype != storages[torch_api.storage_key(x)] for x in tensors):
                return True
            if tensors and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def copy_together(
    members: Sequence[fx.Node],
    casts: Collection[fx.Node],
    shared: Collection[fx.Node],
    storages: Storages,
    module: str,
) -> Written:
    """Make the first of `members` a collective on a flat tensor that does all of their work.

    `casts` are done by the copy and go, as do the other members; waits become what takes a result
    out, under their own name: a view for those in `shared`. The caller places the new nodes.
    """
    bucket = _Bucket(members, casts, storages, module)
    bucket.pack()
    bucket.start()
    bucket.land()
    for part in bucket.parts:
        bucket.unpack(part, part.waits[0] in shared)
    bucket.erase()
    return Written(bucket.made["pack"], bucket.made["wait"], bucket.unpacks)


@dataclass
class _Bucket:
    members: Sequence[fx.Node]
    casts: Collection[fx.Node]
    storages: Storages
    module: str
    made: dict[str, list[fx.Node]] = field(default_factory=lambda: {"pack": [], "wait": []})
    unpacks: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = self.members[0]
        self.graph = self.first.graph
        self.arguments = named_arguments(self.first)
        calls = [collective_call(member) for member in self.members]
        self.kind = calls[0].work.kind  # type: ignore[union-attr]
        self.parts: list[_Part] = []
        for member, call in zip(self.members, calls, strict=True):
            assert call is not None
            found = _parts(member, call, self.casts)
            assert found is not None
            self.parts += found
            for part in found:
                if part.into is not None:
                    for name in part.names:
                        self.storages.move(name.meta["val"], part.into.meta["val"])
        dtypes = [part.given.dtype for part in self.parts]
        self.mixed = len(set(dtypes)) > 1
        self.dtype = torch.uint8 if self.mixed else dtypes[0]
        if self.mixed:  # larger numbers first: then all are aligned
            self.parts.sort(key=lambda part: -part.given.dtype.itemsize)
        splits = self.parts[0].splits
        self.ranks = len(splits[0]) if splits else int(self.arguments.get("group_size", 1))
        self.uneven = self.kind is _A2A and not all(_is_even(part.splits) for part in self.parts)
        self.list = self.made["pack"]

    # -- nodes ------------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Any:
        """A new node; its value is what the operator makes of its arguments' unless given."""
        with self.graph.inserting_before(self.first):
            node = self.graph.call_function(target, args, kwargs)
        if value is None:
            values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
            make = partial(torch_api.view_of, target) if target in _VIEWS else target
            value = make(*values[0], **values[1])
        notes = {k: v for k, v in self.first.meta.items() if k in ("phase", "nn_module_stack")}
        node.meta = {**notes, "val": value, "module": self.module}
        self.list.append(node)
        return node

    def view(self, node: fx.Node, shape: Sequence[Size]) -> fx.Node:
        made: fx.Node = self.call(_aten.view.default, node, list(shape))
        return made

    def as_dtype(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        made: fx.Node = self.call(_aten.view.dtype, node, dtype)
        return made

    def split(self, node: fx.Node, sizes: list[Size], dim: int) -> list[fx.Node]:
        pieces = self.call(_aten.split_with_sizes.default, node, sizes, dim)
        return [self.call(operator.getitem, pieces, k) for k in range(len(sizes))]

    def dim(self, node: fx.Node, dim: int) -> Size:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.call(_aten.sym_size.int, node, dim)

    def numel(self, node: fx.Node) -> Size:
        count = node.meta["val"].numel()
        return count if isinstance(count, int) else self.call(_aten.sym_numel.default, node)

    def arithmetic(self, op: Any, a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return op(a, b)
        return self.call(op, a, b)

    def total(self, sizes: Sequence[Size]) -> Size:
        found: Size = sizes[0]
        for size in sizes[1:]:
            found = self.arithmetic(operator.add, found, size)
        return found

    def inner_shape(self, node: fx.Node) -> list[Size]:
        """The shape of a tensor but for its first dimension."""
        return [self.dim(node, d) for d in range(1, node.meta["val"].dim())]

    # -- packing ----------------------------------------------------------------------------------

    def pack(self) -> None:
        plain = all(
            p.given.is_contiguous()
            and p.source.meta["val"].dtype == p.given.dtype
            and p.source.meta["val"].is_contiguous()
            for p in self.parts
        )
        if self.uneven:
            self.pack_uneven()
        elif plain:
            self.pack_by_cat()
        else:
            self.pack_by_copies()

    def pack_by_cat(self) -> None:
        interleaved = self.kind in (_RS, _A2A)
        shape = [self.ranks, -1] if interleaved else [-1]
        flats = []
        for part in self.parts:
            flat = self.as_dtype(self.view(part.source, shape), self.dtype)
            part.size = self.dim(flat, len(shape) - 1)
            flats.append(flat)
        whole = self.call(_aten.cat.default, flats, len(shape) - 1)
        self.row: Size = self.dim(whole, 1) if self.kind is _A2A else 0
        self.flat = self.view(whole, [-1]) if interleaved else whole

    def pack_by_copies(self) -> None:
        """Into an empty tensor, each part in its own dtype: this is where casts are done."""
        rows = [self.ranks] if self.kind is _RS else []
        width = self.dtype.itemsize
        for part in self.parts:
            size = self.arithmetic(
                operator.mul, self.numel(part.source), part.given.dtype.itemsize // width
            )
            part.size = self.arithmetic(operator.floordiv, size, self.ranks) if rows else size
        total = self.total([part.size for part in self.parts])
        total = self.arithmetic(operator.mul, total, self.ranks) if rows else total
        sample = self.parts[0].given
        length = total if isinstance(total, int) else total.meta["val"]
        self.flat = self.call(
            _aten.empty.memory_format, [total], dtype=self.dtype, device=sample.device,
            pin_memory=False, value=torch_api.new_empty(sample, length, self.dtype),
        )  # fmt: skip
        whole = self.view(self.flat, [*rows, -1]) if rows else self.flat
        pieces = self.split(whole, [part.size for part in self.parts], len(rows))
        there, here = [], []
        for part, piece in zip(self.parts, pieces, strict=True):
            if rows:
                shape = [self.ranks, -1, *self.inner_shape(part.source)]
                here.append(self.view(part.source, shape))
            else:
                shape = [self.dim(part.source, d) for d in range(part.given.dim())]
                here.append(part.source)
            there.append(self.view(self.as_dtype(piece, part.given.dtype), shape))
        self.call(_aten._foreach_copy_.default, there, here, value=())

    def pack_uneven(self) -> None:
        """For each rank in turn, what every part sends to it."""
        sent: list[list[Any]] = []
        for part in self.parts:
            assert part.splits is not None
            part.size = self.row_size(part)
            pieces = self.split(part.source, part.splits[0], 0)
            sent.append([self.as_dtype(self.view(piece, [-1]), self.dtype) for piece in pieces])
        self.flat = self.call(
            _aten.cat.default, [pieces[r] for r in range(self.ranks) for pieces in sent], 0
        )
        sizes = [self.counts(part, 0) for part in self.parts]
        self.sends = [self.total([size[r] for size in sizes]) for r in range(self.ranks)]
        received = [self.counts(part, 1) for part in self.parts]
        self.arrives = [size[r] for r in range(self.ranks) for size in received]
        self.receives = [self.total([size[r] for size in received]) for r in range(self.ranks)]

    def row_size(self, part: _Part) -> Size:
        size: Size = part.given.dtype.itemsize // self.dtype.itemsize
        for length in self.inner_shape(part.source):
            size = self.arithmetic(operator.mul, size, length)
        return size

    def counts(self, part: _Part, which: int) -> list[Size]:
        assert part.splits is not None
        return [self.arithmetic(operator.mul, rows, part.size) for rows in part.splits[which]]

    # -- the collective ---------------------------------------------------------------------------

    def start(self) -> None:
        first, flat, group = self.first, self.flat, self.arguments["group_name"]
        value: Tensor = flat.meta["val"]
        args: tuple[Any, ...]
        if self.kind is _AG:
            target, args = _c10d.all_gather_into_tensor.default, (flat, self.ranks, group)
            value = torch_api.new_empty(value, value.shape[0] * self.ranks, value.dtype)
        elif self.kind is _RS:
            target = _c10d.reduce_scatter_tensor.default
            args = (flat, self.arguments["reduce_op"], self.ranks, group)
            value = torch_api.new_empty(value, value.shape[0] // self.ranks, value.dtype)
        elif self.kind is _AR:  # the flat tensor is nobody else's
            target, args = _c10d.all_reduce_.default, (flat, self.arguments["reduce_op"], group)
        else:
            target = _c10d.all_to_all_single.default
            sends = self.sends if self.uneven else [self.row] * self.ranks
            receives = self.receives if self.uneven else sends
            args = (flat, receives, sends, group)
            lengths = fx.map_arg(receives, lambda arg: arg.meta["val"])
            value = torch_api.new_empty(value, sum(lengths), value.dtype)
        self._retarget(first, target, args)
        for note in ("param", "tensor_meta", "eager_input_vals"):
            first.meta.pop(note, None)
        first.meta.update(val=value, module=self.module)

    def _retarget(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        if node is self.first:  # its picks are of the old results
            self.picks = [user for user in node.users if user.target is operator.getitem]
        node.target, node.args, node.kwargs = target, args, {}

    def land(self) -> None:
        self.list = self.made["wait"]
        landed = self.call(_c10d.wait_tensor.default, self.first, value=self.first.meta["val"])
        if self.uneven:
            pieces = self.split(landed, self.arrives, 0)
            for k, part in enumerate(self.parts):
                part.piece = pieces[k :: len(self.parts)]
            return
        is_row = self.kind in (_AG, _A2A)
        whole = self.view(landed, [self.ranks, -1]) if is_row else landed
        pieces = self.split(whole, [part.size for part in self.parts], int(is_row))
        for part, piece in zip(self.parts, pieces, strict=True):
            part.piece = piece

    # -- unpacking --------------------------------------------------------------------------------

    def unpack(self, part: _Part, shared: bool) -> None:
        """Make the first wait what gives the result, and the others views of that."""
        wait = part.waits[0]
        self.list = self.unpacks[wait] = []
        shape, value = self.result_shape(part), part.result
        is_row = self.kind in (_AG, _A2A)
        if part.into is not None:
            for user in part.others:
                for name in part.names:
                    user.replace_input_with(name, part.into)
        if part.into is not None and not is_row:
            self._retarget(wait, _aten.copy_.default, (part.into, self.view(part.piece, shape)))
            self.storages.move(value, part.into.meta["val"])
        elif part.into is not None:
            there = self.as_dtype(self.view(part.into, [self.ranks, -1]), self.dtype)
            done = self.call(_aten.copy_.default, there, part.piece, value=there.meta["val"])
            self._retarget(wait, _aten.view.default, (self.as_dtype(done, value.dtype), shape))
            self.storages.move(value, part.into.meta["val"])
        elif shared:
            self._retarget(wait, _aten.view.default, (part.piece, shape))
            self.storages.move(value, part.piece.meta["val"])
        else:
            self._retarget(wait, _aten.view.default, (self.copied(part, value), shape))
        self.list.append(wait)
        for other in part.waits[1:]:
            self._retarget(other, _aten.view.default, (wait, shape))
            self.storages.move(other.meta["val"], wait.meta["val"])
            self.unpacks[other] = [other]

    def copied(self, part: _Part, value: Tensor) -> fx.Node:
        """A copy of the part's piece, in the storage that the result's users know."""
        flat = value.view(-1) if value.dtype == self.dtype else value.view(-1).view(self.dtype)
        if self.uneven:
            made: fx.Node = self.call(_aten.cat.default, part.piece, 0, value=flat)
        else:
            flat = flat.view([self.ranks, -1]) if self.kind in (_AG, _A2A) else flat
            made = self.call(
                _aten.clone.default,
                part.piece,
                memory_format=torch.contiguous_format,
                value=flat,
            )
        return self.as_dtype(made, value.dtype)

    def result_shape(self, part: _Part) -> list[Size]:
        """Only the first dimension differs from the input's."""
        self.list, keep = self.made["pack"], self.list  # sizes are asked while the input is there
        shape = [
            size if isinstance(size, int) else (-1 if d == 0 else self.dim(part.source, d))
            for d, size in enumerate(part.result.shape)
        ]
        self.list = keep
        return shape

    def erase(self) -> None:
        """What nobody uses any more."""
        for member in self.members[1:]:
            self.picks += [user for user in member.users if user.target is operator.getitem]
        for node in [*self.picks, *self.members[1:], *self.casts]:
            self.graph.erase_node(node)


def _is_even(splits: tuple[list[Size], list[Size]] | None) -> bool:
    assert splits is not None
    sizes = {size if isinstance(size, int) else id(size) for size in (*splits[0], *splits[1])}
    return len(sizes) == 1
