"""Clean-ups of graphs with sharded parameters: what they do only for the sake of eager memory.

- An unsharded parameter that is a graph input, grown, filled, used and shrunk again, is the value
  that it was filled with: copies and resizes go.
- A gather whose result is copied into a buffer, or whose input is a part of one, writes there.
- Equal reductions are one; sums of reductions are reductions of sums, where rounding may change.

Everything is recognised by operators, storages and hazards. What does not fit exactly stays as it
is, with a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments, nodes_in, written_nodes
from undertow.graph.collectives import collective_call, is_wait
from undertow.program import CollectiveKind

_aten = torch.ops.aten
_ops = torch_api.collectives
_RESIZE = "inductor::resize_storage_bytes_"
_COPIES = ("fsdp::copy_", "aten::copy_")
_LINEAR = ("sum", "avg")
_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)


@dataclass
class Cleaned:
    """What was removed, and why other things were not."""

    copies: int = 0  # copies into unsharded parameters that are gone, with their resizes
    in_place: int = 0  # gathers that write where their result was copied to
    reductions: int = 0  # collectives that are gone because another does their work
    reasons: list[str] = field(default_factory=list)


def clean_fsdp(gm: fx.GraphModule, *, change_rounding: bool = False) -> Cleaned:
    """All clean-ups on `gm`, in place; numbers stay the same bit for bit unless `change_rounding`
    allows sums of reductions to become reductions of sums.

    cleaned = clean_fsdp(gm)
    """
    done = Cleaned()
    remove_unsharded_copies(gm.graph, done)
    gather_in_place(gm.graph, done)
    merge_equal_reductions(gm.graph, done)
    if change_rounding:
        merge_summed_reductions(gm.graph, done)
    gm.graph.lint()
    gm.recompile()
    return done


# -- unsharded parameters -------------------------------------------------------------------------


def remove_unsharded_copies(graph: fx.Graph, done: Cleaned) -> None:
    """Use what unsharded parameters are filled with instead of the parameters."""
    touched = _Touched(graph)
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        resizes = [user for user in touched.by(node) if _is(user, _RESIZE)]
        if not resizes:
            continue
        reason = _replace_parameter(touched, node)
        if reason:
            done.reasons.append(f"the copies into {node.name} stay: {reason}")
        else:
            done.copies += len(resizes) // 2


@dataclass(slots=True)
class _Filling:
    """One time that a parameter is grown, filled, used and shrunk."""

    grow: fx.Node
    copy: fx.Node | None = None
    uses: list[fx.Node] = field(default_factory=list)
    shrink: fx.Node | None = None


def _replace_parameter(touched: _Touched, parameter: fx.Node) -> str:
    """Replace all fillings of a parameter, or say why that would not be right."""
    fillings: list[_Filling] = []
    names = {parameter}  # a copy gives what it filled under a new name
    for node in touched.by(parameter):
        reason = _next_event(names, node, fillings)
        if reason:
            return reason
    if not fillings or fillings[-1].shrink is None:
        return "it stays unsharded after the graph"
    for filling in fillings:
        reason = _not_replaceable(touched, parameter, filling)
        if reason:
            return reason
    for filling in fillings:
        assert filling.copy is not None
        assert filling.shrink is not None
        value = _data(filling.copy)
        for user in filling.uses:
            for name in names & set(user.all_input_nodes):
                user.replace_input_with(name, value)
    for filling in reversed(fillings):  # a copy goes after all that know its name
        for event in (filling.shrink, filling.copy, filling.grow):
            assert event is not None
            parameter.graph.erase_node(event)
    return ""


def _next_event(names: set[fx.Node], node: fx.Node, fillings: list[_Filling]) -> str:
    """Put what touches a parameter where it belongs: grow, copy, uses, shrink, and again."""
    is_open = bool(fillings) and fillings[-1].shrink is None
    if node.op == "output":
        return "it is an output of the graph"
    if _is(node, _RESIZE):
        to_nothing = node.args[1] == 0
        if to_nothing != is_open:
            return "it does not grow and shrink in turns"
        if is_open:
            fillings[-1].shrink = node
        else:
            fillings.append(_Filling(node))
        return ""
    if not is_open:
        return "it is used while it is sharded"
    filling = fillings[-1]
    if _is(node, *_COPIES) and node.args[0] in names:
        if filling.copy is not None or len(node.args) > 2:
            return "it is filled twice"
        filling.copy = node
        names.add(node)
        return ""
    if filling.copy is None:
        return "it is used before it is filled"
    filling.uses.append(node)
    return ""


def _not_replaceable(touched: _Touched, parameter: fx.Node, filling: _Filling) -> str:
    if filling.copy is None:
        return "it is never filled"
    value = _data(filling.copy)
    if not _are_alike(parameter, value):
        return "it differs from what it is filled with in shape, strides or dtype"
    assert filling.shrink is not None
    if touched.is_written_between(parameter, filling.copy, filling.shrink):
        return "it is written to while it is unsharded"
    if touched.is_written_between(value, filling.copy, filling.shrink):
        return "what it is filled with changes while it is used"
    return ""


def _data(copy: fx.Node) -> fx.Node:
    data = copy.args[1]
    assert isinstance(data, fx.Node)
    return data


# -- gathers in place -----------------------------------------------------------------------------


def gather_in_place(graph: fx.Graph, done: Cleaned) -> None:
    """Let gathers write where their result goes, instead of to a tensor of their own."""
    touched = _Touched(graph)
    for node in list(graph.nodes):
        call = collective_call(node)
        if call is None or call.written or node.target is not _GATHER:
            continue
        target = _copied_to(touched, node) or _gathered_around(touched, node)
        if isinstance(target, str):
            done.reasons.append(f"{node.name} does not gather in place: {target}")
        elif target is not None:
            buffer, copy = target
            _write_to(node, buffer, copy)
            done.in_place += 1


_GATHER = _ops.all_gather_into_tensor.default
_Target = tuple[fx.Node, fx.Node | None] | str | None


def _copied_to(touched: _Touched, gather: fx.Node) -> _Target:
    """The buffer that the result, once awaited, is copied into and not used otherwise."""
    waits = list(gather.users)
    if len(waits) != 1 or not is_wait(waits[0]) or len(waits[0].users) != 1:
        return None
    (copy,) = waits[0].users
    if not _is(copy, *_COPIES) or len(copy.args) > 2 or _data(copy) is not waits[0]:
        return None
    buffer = copy.args[0]
    assert isinstance(buffer, fx.Node)
    if buffer not in touched.place or touched.place[buffer] > touched.place[gather]:
        return "its buffer is made after it starts"
    if not _are_alike(buffer, gather) or not _value(buffer).is_contiguous():
        return "its buffer has another shape, stride or dtype"
    if any(touched.between(buffer, gather, copy)):
        return "its buffer is used between its start and the copy"
    key = torch_api.storage_key(_value(buffer))
    if key in {torch_api.storage_key(_value(arg)) for arg in gather.all_input_nodes}:
        return "it gathers from its own buffer"
    return buffer, copy


def _gathered_around(touched: _Touched, gather: fx.Node) -> _Target:
    """The buffer of which this rank's part is what is gathered: FSDP's copy-in makes both."""
    (part,) = gather.all_input_nodes[:1]
    source = part.args[0] if part.args else None
    if part.target is not _PICK or not isinstance(source, fx.Node) or part.args[1] != 0:
        return None
    if not _is(source, "fsdp::all_gather_copy_in"):
        return None
    wholes = [user for user in source.users if user.target is _PICK and user.args[1] == 1]
    if any(user.users for user in wholes):
        return "its buffer is used by others"
    for spare in wholes[1:]:
        gather.graph.erase_node(spare)
    if wholes:
        return wholes[0], None
    with gather.graph.inserting_after(source):
        whole = gather.graph.call_function(_PICK, (source, 1))
    whole.meta = {**source.meta, "val": source.meta["val"][1]}
    return whole, None


_PICK = operator.getitem


def _write_to(gather: fx.Node, buffer: fx.Node, copy: fx.Node | None) -> None:
    arguments = named_arguments(gather)
    gather.target = _ops.all_gather_into_tensor_out.default
    gather.args = (arguments["input"], arguments["group_size"], arguments["group_name"])
    gather.kwargs = {"out": buffer}
    (wait,) = gather.users
    gather.meta["val"] = wait.meta["val"] = _value(buffer)
    if copy is not None:
        copy.replace_all_uses_with(wait)
        copy.graph.erase_node(copy)


# -- reductions -----------------------------------------------------------------------------------


def merge_equal_reductions(graph: fx.Graph, done: Cleaned) -> None:
    """Reduce the same values once."""
    touched = _Touched(graph)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_plain_reduction(node):
            continue
        key = (node.target, *map(_hashable, named_arguments(node).values()))
        first = known.setdefault(key, node)
        if first is node:
            continue
        if touched.is_written_between(node.all_input_nodes[0], first, node):
            known[key] = node
        elif any(touched.is_written(result) for result in (*first.users, *node.users)):
            done.reasons.append(f"{node.name} repeats {first.name}: a result is written to")
        else:
            (kept,), (gone,) = first.users, node.users
            if touched.place[kept] > touched.place[gone]:
                gone.prepend(kept)
                touched.place[kept] = touched.place[gone]
            gone.replace_all_uses_with(kept)
            graph.erase_node(gone)
            graph.erase_node(node)
            done.reductions += 1


def merge_summed_reductions(graph: fx.Graph, done: Cleaned) -> None:
    """`reduce(a) + reduce(b)` as `reduce(a + b)`, again and again: half the communication, and
    another rounding."""
    touched = _Touched(graph)
    for node in list(graph.nodes):
        if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        pair = [_sole_reduction(arg) for arg in node.args]
        if pair[0] is None or pair[1] is None or pair[0] is pair[1]:
            continue
        starts = sorted((start for start in pair if start), key=touched.place.__getitem__)
        reason = _not_summable(touched, *starts)
        if reason:
            done.reasons.append(f"{starts[0].name} and {starts[1].name} stay two: {reason}")
            continue
        _sum_first(touched, node, *starts)
        done.reductions += 1


def _is_plain_reduction(node: fx.Node) -> bool:
    """A reduction with a result of its own, and one wait."""
    call = collective_call(node)
    if call is None or call.written or call.work.kind not in _REDUCTIONS:
        return False
    users = list(node.users)
    is_single = isinstance(node.meta.get("val"), torch.Tensor)
    return is_single and len(users) == 1 and is_wait(users[0])


def _sole_reduction(value: Any) -> fx.Node | None:
    """The reduction whose awaited result is used only here."""
    if not isinstance(value, fx.Node) or not is_wait(value) or len(value.users) != 1:
        return None
    (source,) = value.all_input_nodes
    return source if _is_plain_reduction(source) else None


def _not_summable(touched: _Touched, first: fx.Node, second: fx.Node) -> str:
    calls = [collective_call(start) for start in (first, second)]
    assert calls[0] is not None
    assert calls[1] is not None
    if first.target is not second.target or calls[0].group != calls[1].group:
        return "they are of two kinds or groups"
    if calls[0].work.reduce_op != calls[1].work.reduce_op:
        return "they reduce differently"
    if calls[0].work.reduce_op not in _LINEAR:
        return f"{calls[0].work.reduce_op} of a sum is not the sum of both"
    (a,), (b,) = calls[0].read, calls[1].read
    if _value(a).shape != _value(b).shape or _value(a).dtype != _value(b).dtype:
        return "their inputs differ in shape or dtype"
    if touched.is_written_between(a, first, second):
        return "the first one's input changes before the second starts"
    return ""


def _sum_first(touched: _Touched, total: fx.Node, first: fx.Node, second: fx.Node) -> None:
    """`second` reduces both inputs, and its wait is what `total` was."""
    (a,), (b,) = first.all_input_nodes[:1], second.all_input_nodes[:1]
    with second.graph.inserting_before(second):
        added = second.graph.call_function(_aten.add.Tensor, (a, b))
    added.meta = {**b.meta, "val": _value(a) + _value(b)}
    touched.place[added] = touched.place[second]
    second.replace_input_with(b, added)
    (old,), (wait,) = first.users, second.users
    total.replace_all_uses_with(wait)
    for node in (total, old, first):
        total.graph.erase_node(node)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- who touches what -----------------------------------------------------------------------------


class _Touched:
    """Which nodes read or write a storage, and where they stand."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: at for at, node in enumerate(graph.nodes)}
        self._readers: dict[int, list[fx.Node]] = {}
        self._writers: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for arg in dict.fromkeys(nodes_in((node.args, node.kwargs))):
                for key in self.storages(arg):
                    self._readers.setdefault(key, []).append(node)
            call = collective_call(node) if node.op == "call_function" else None
            for arg in (*written_nodes(node), *(call.written if call else ())):
                for key in self.storages(arg):
                    self._writers.setdefault(key, []).append(node)

    @staticmethod
    def storages(node: fx.Node) -> set[int]:
        values = node.meta.get("val")
        found = values if isinstance(values, list | tuple) else [values]
        return {torch_api.storage_key(v) for v in found if isinstance(v, torch.Tensor)}

    def by(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that are given this value or an alias of it, in order."""
        found = {user for key in self.storages(node) for user in self._readers.get(key, ())}
        return sorted(found, key=self.place.__getitem__)

    def between(self, node: fx.Node, first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
        """Nodes strictly between two others that are given this value or an alias."""
        low, high = self.place[first], self.place[last]
        return (user for user in self.by(node) if low < self.place[user] < high)

    def _writing(self, node: fx.Node) -> Sequence[fx.Node]:
        return [w for key in self.storages(node) for w in self._writers.get(key, ())]

    def is_written(self, node: fx.Node) -> bool:
        return bool(self._writing(node))

    def is_written_between(self, node: fx.Node, first: fx.Node, last: fx.Node) -> bool:
        low, high = self.place[first], self.place[last]
        return any(low < self.place[writer] < high for writer in self._writing(node))


def _is(node: fx.Node, *names: str) -> bool:
    """Whether a node calls one of these operators, by the name in its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in names


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _are_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = _value(one), _value(other)
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
