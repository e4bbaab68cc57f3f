"""Rows of embedding tables that are sharded over ranks: sent to who looks them up.

FSDP gathers a table before it is read, and scatters a gradient that is full of zeros after; the
first is the one gather that no work hides, the second the one scatter. If the tokens of all ranks
are fewer than the rows of the table, it is less to tell all ranks the tokens: each sends the rows
that it has, and zeros for the others, which makes one sum; in backward all get the gradients of all
tokens, and each adds up those of its own rows. As in `embedding_rows`, batches are filled up to a
number of tokens that is given, so that ranks issue the same whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.graph.collectives import GLOO, is_wait, runs_on
from undertow.graph.convert import convert
from undertow.graph.embedding_rows import (
    SUMMED,
    check_tokens,
    filled,
    flat,
    gather,
    is_unchanged,
    wait_for,
)
from undertow.graph.in_table import in_table
from undertow.graph.nodes import insert_call, notes_of

_aten, _ops = torch.ops.aten, torch_api.collectives
_LEAST_SAVED = 1.5  # times the traffic of the rows that the table's must be: there are more calls
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup in a table, or its backward, and the collective that the table is for."""

    call: fx.Node  # `embedding`, or `embedding_dense_backward`
    start: fx.Node  # the gather before it, or the reduce-scatter after it
    rows: int  # of the table
    width: int
    ranks: tuple[int, ...]

    @property
    def shard_rows(self) -> int:
        return self.rows // len(self.ranks)

    @property
    def first_row(self) -> int:
        """The first that this rank has."""
        return self.ranks.index(torch.distributed.get_rank()) * self.shard_rows


def exchange_sharded_rows(graph: fx.Graph, most: int, backends: Sequence[str] = GLOO) -> int:
    """Exchange up to `most` rows of each rank in place of gathering or scattering a table, where
    that is two thirds of the traffic or less; how many lookups there are, forward or backward.

    Of groups that gloo runs, and of tables whose shards are whole rows. Forward gets the same
    numbers; the last bits of a sum over ranks may differ from those of a reduce-scatter. A batch of
    more tokens, or of a size that is not fixed, is an UndertowError.
    """
    starts = [node for node in graph.nodes if runs_on(node, backends)]
    found: list[tuple[_Lookup, Callable[[_Lookup, int], None]]] = []
    for start in starts:
        for lookup, write in ((_lookup(start), _write_lookup), (_backward(start), _write_backward)):
            if lookup is not None and _saves(lookup, most):
                found.append((lookup, write))
    if not found:
        return 0
    converted = convert(graph)
    found = [
        (lookup, write)
        for lookup, write in found
        if is_unchanged(converted, lookup.call) and is_unchanged(converted, lookup.start)
    ]
    for one, write_it in found:
        check_tokens(one.call, most)
        write_it(one, most)
    return len(found)


def _lookup(start: fx.Node) -> _Lookup | None:
    """A gathered table, in which one lookup reads and nobody else."""
    if start.target is not _ops.all_gather_into_tensor.default:
        return None
    wait = _only_user(start)
    view = None if wait is None or not is_wait(wait) else _only_user(wait)
    call = None if view is None or view.target not in _VIEWS else _only_user(view)
    if view is None or call is None or call.target is not _aten.embedding.default:
        return None
    return _of(call, start, view.meta["val"]) if call.args[0] is view else None


def _backward(start: fx.Node) -> _Lookup | None:
    """A table of gradients, made by one lookup's backward, of which each rank gets its part."""
    if start.target is not _ops.reduce_scatter_tensor.default:
        return None
    given = named_arguments(start)
    view = given["input"]
    if given["reduce_op"] != "sum" or view.target not in _VIEWS or len(view.users) != 1:
        return None
    call, wait = view.args[0], _only_user(start)
    is_backward = call.target is _aten.embedding_dense_backward.default and len(call.users) == 1
    if not is_backward or wait is None or not is_wait(wait):
        return None
    value = call.meta["val"]
    if named_arguments(call)["scale_grad_by_freq"] or value.dtype not in SUMMED:
        return None
    return _of(call, start, value)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _of(call: fx.Node, start: fx.Node, table: torch.Tensor) -> _Lookup | None:
    """If the shards are whole rows of a table of fixed size, in ranks' order."""
    ranks = torch_api.ranks_of_group(named_arguments(start)["group_name"])
    if table.dim() != 2 or not all(isinstance(size, int) for size in table.shape):
        return None
    rows, width = table.shape
    part = named_arguments(start)["input"].meta["val"].numel()
    if start.target is _ops.reduce_scatter_tensor.default:
        part = start.meta["val"].numel()
    is_whole = len(ranks) > 1 and part * len(ranks) == rows * width and rows % len(ranks) == 0
    return _Lookup(call, start, rows, width, ranks) if is_whole else None


def _saves(lookup: _Lookup, most: int) -> bool:
    """Each rank sends rows, or its shard of the table, to all others."""
    index = named_arguments(lookup.call)["indices"].meta["val"]
    itemsize = lookup.start.meta["val"].itemsize
    rows_nbytes = most * (lookup.width * itemsize + index.itemsize)
    shard_nbytes = lookup.shard_rows * lookup.width * itemsize
    return bool(_LEAST_SAVED * rows_nbytes <= shard_nbytes)


# -- writing it -----------------------------------------------------------------------------------


def _write_lookup(lookup: _Lookup, most: int) -> None:
    call, graph = lookup.call, lookup.call.graph
    indices, value = named_arguments(call)["indices"], call.meta["val"]
    shard, tokens = named_arguments(lookup.start)["input"], indices.meta["val"].numel()
    with graph.inserting_before(lookup.start if indices < lookup.start else call):
        # Zeros in place of a row that no rank has would be no error.
        known = insert_call(in_table, flat(indices, [tokens]), lookup.rows)
        index = gather(filled(known, most), lookup.start)
    with graph.inserting_before(call):
        place, is_own = _own_rows(wait_for(index), lookup)
        own = flat(shard, [lookup.shard_rows, lookup.width])
        rows = _or_zero(insert_call(_aten.embedding.default, own, place), is_own)
        # Each row comes from one rank, and zeros from the others.
        came = wait_for(_summed(rows, lookup.start))
        mine = insert_call(_aten.slice.Tensor, came, 0, 0, tokens)
        result = insert_call(_aten.view.default, mine, list(value.shape))
    call.replace_all_uses_with(result)
    view = named_arguments(call)["weight"]
    for node in (call, view, view.args[0], lookup.start):
        graph.erase_node(node)


def _summed(rows: fx.Node, like: fx.Node) -> fx.Node:
    """The start of a sum of all ranks' rows, of which each gets its part, in the group of the
    collective `like`. On gloo it becomes an exchange (`exchange`)."""
    group = named_arguments(like)["group_name"]
    value, size = rows.meta["val"], len(torch_api.ranks_of_group(group))
    start = rows.graph.call_function(_ops.reduce_scatter_tensor.default, (rows, "sum", size, group))
    result = value.new_empty([value.shape[0] // size, *value.shape[1:]])
    start.meta = {**notes_of(like), "val": result}
    return start


def _write_backward(lookup: _Lookup, most: int) -> None:
    call, start, graph = lookup.call, lookup.start, lookup.call.graph
    given, tokens = named_arguments(call), named_arguments(call)["indices"].meta["val"].numel()
    with graph.inserting_before(call):
        rows = filled(flat(given["grad_output"], [tokens, lookup.width]), most)
        index = filled(flat(given["indices"], [tokens]), most)
        starts = [gather(rows, start), gather(index, start)]
    wait = _only_user(start)
    assert wait is not None
    with graph.inserting_before(wait):
        rows, index = (wait_for(one) for one in starts)
        place, is_own = _own_rows(index, lookup)
        if given["padding_idx"] >= 0:
            others = insert_call(_aten.ne.Scalar, index, given["padding_idx"])
            is_own = insert_call(_aten.logical_and.default, is_own, others)
        added = insert_call(
            _aten.embedding_dense_backward.default,
            _or_zero(rows, is_own), place, lookup.shard_rows, -1, False,
        )  # fmt: skip
        result = insert_call(_aten.view.default, added, list(wait.meta["val"].shape))
    wait.replace_all_uses_with(result)
    view = named_arguments(start)["input"]
    for node in (wait, start, view, call):
        graph.erase_node(node)


def _own_rows(index: fx.Node, lookup: _Lookup) -> tuple[fx.Node, fx.Node]:
    """Where tokens are in this rank's shard (0 for others), and which of them are in it."""
    place = insert_call(_aten.sub.Tensor, index, lookup.first_row)
    is_own = insert_call(
        _aten.logical_and.default,
        insert_call(_aten.ge.Scalar, place, 0),
        insert_call(_aten.lt.Scalar, place, lookup.shard_rows),
    )
    return insert_call(_aten.mul.Tensor, place, is_own), is_own


def _or_zero(rows: fx.Node, is_own: fx.Node) -> fx.Node:
    mask, value = insert_call(_aten.unsqueeze.default, is_own, -1), rows.meta["val"]
    # Not `full_like`, which Inductor takes apart before a graph is cut and does not know after.
    how = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    zero = rows.graph.call_function(_aten.full.default, ([], 0), how)
    zero.meta = {**notes_of(rows), "val": value.new_zeros([])}
    return insert_call(_aten.where.self, mask, rows, zero)
