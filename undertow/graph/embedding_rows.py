"""Gradients of embedding tables by the rows of all ranks' tokens, where tables are all-reduced.

Few rows of a table have a gradient: those of the tokens of this batch. Gathering these rows and
their indices, and adding them up on every rank, sends less than reducing a table full of zeros.
Gathers need as many rows from every rank, whose batches may have other sizes and may change while
others' do not: each rank therefore fills up its rows to a number that is given. What is issued then
depends on that number and on the table alone, never on a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from undertow.capture import torch_api
from undertow.capture.schema import named_arguments
from undertow.errors import UndertowError
from undertow.graph.collectives import GLOO, runs_on
from undertow.graph.convert import Converted, convert
from undertow.graph.gradients import Gradient, find_gradients
from undertow.graph.nodes import insert_call, notes_of

_aten, _ops = torch.ops.aten, torch_api.collectives
SUMMED = (torch.float32, torch.float64)  # in others the sum of many rows loses digits
_LEAST_SAVED = 2  # times the traffic of the rows that the table's must be


def gather_embedding_rows(graph: fx.Graph, most: int, backends: Sequence[str] = GLOO) -> int:
    """Gather up to `most` rows of each rank where that is at most half of the traffic of reducing
    the table, in place; how many tables there are.

    Of groups that gloo runs. All ranks add up the same rows in the same order, that of ranks, and
    get the same bits; these may differ in the last from those of an all-reduce. A batch of more
    tokens, or of a size that is not fixed, is an UndertowError: other ranks may gather already.
    """
    if not any(runs_on(node, backends) for node in graph.nodes):
        return 0
    converted = convert(graph)
    gradients = [
        gradient
        for gradient in find_gradients(converted).values()
        if runs_on(gradient.start, backends)
        and _is_of_table(gradient)
        and _saves_half(gradient, most)
        and is_unchanged(converted, gradient.value)
    ]
    for gradient in gradients:
        check_tokens(gradient.value, most)
        _write(gradient, most)
    return len(gradients)


def _is_of_table(gradient: Gradient) -> bool:
    """A sum over ranks of what one lookup alone gives a table."""
    table = gradient.value
    if table.target is not _aten.embedding_dense_backward.default or len(table.users) != 1:
        return False
    is_sum = named_arguments(gradient.start)["reduce_op"] == "sum"
    given, value = named_arguments(table), table.meta["val"]
    is_fixed = all(isinstance(size, int) for size in value.shape)
    return is_sum and is_fixed and value.dtype in SUMMED and not given["scale_grad_by_freq"]


def _saves_half(gradient: Gradient, most: int) -> bool:
    """On n ranks, each sends its rows n - 1 times, and 2 (n - 1) / n of a table that is reduced."""
    ranks = len(_ranks(gradient))
    given, value = named_arguments(gradient.value), gradient.value.meta["val"]
    row_nbytes = value.shape[1] * value.itemsize
    rows_nbytes = (ranks - 1) * most * (row_nbytes + given["indices"].meta["val"].itemsize)
    table_nbytes = 2 * (ranks - 1) * value.shape[0] * row_nbytes // max(ranks, 1)
    return ranks > 1 and _LEAST_SAVED * rows_nbytes <= table_nbytes


def _ranks(gradient: Gradient) -> tuple[int, ...]:
    return torch_api.ranks_of_group(named_arguments(gradient.start)["group_name"])


def is_unchanged(converted: Converted, table: fx.Node) -> bool:
    """Whether nobody writes to what a table's gradient is made of: it is read for longer now."""
    program = converted.program
    at = program.index[table.name]
    later = {buffer for task in program.tasks[at + 1 :] for buffer in task.writes}
    return later.isdisjoint(program.tasks[at].reads)


def check_tokens(table: fx.Node, most: int) -> None:
    """UndertowError if a lookup, or its backward, is of more rows than that or of who knows."""
    tokens = named_arguments(table)["indices"].meta["val"].numel()
    if not isinstance(tokens, int):
        raise UndertowError(
            "embedding_rows needs batches of fixed sizes, and this one's is symbolic; compile with "
            "torch.compile(..., dynamic=False), or leave the option out"
        )
    if tokens > most:
        raise UndertowError(
            f"embedding_rows is {most}, but this batch looks up {tokens} rows of a table; give the "
            "most tokens that a batch of any rank has"
        )


# -- writing it -----------------------------------------------------------------------------------


def _write(gradient: Gradient, most: int) -> None:
    table, given = gradient.value, named_arguments(gradient.value)
    tokens, width = given["indices"].meta["val"].numel(), table.meta["val"].shape[1]
    with table.graph.inserting_before(table):
        rows = flat(given["grad_output"], [tokens, width])
        if gradient.divisor != 1:
            rows = insert_call(_aten.div.Tensor, rows, gradient.divisor)  # while they are few
        # Those that fill up add zeros to the first row of the table.
        index = filled(flat(given["indices"], [tokens]), most)
        starts = [gather(filled(rows, most), gradient.start), gather(index, gradient.start)]
    with table.graph.inserting_before(gradient.wait):
        gathered = [wait_for(start) for start in starts]
        options = (given["num_weights"], given["padding_idx"], False)
        added = insert_call(_aten.embedding_dense_backward.default, *gathered, *options)
    added.meta |= notes_of(table)
    gradient.result.replace_all_uses_with(added)
    for node in (gradient.after, gradient.wait, gradient.start, gradient.before, table):
        if node is not None:
            table.graph.erase_node(node)


def flat(node: fx.Node, shape: list[int]) -> fx.Node:
    """A view of it in another shape, of a copy if it is not contiguous."""
    if not node.meta["val"].is_contiguous():
        node = insert_call(_aten.clone.default, node, memory_format=torch.contiguous_format)
    return insert_call(_aten.view.default, node, shape)


def filled(node: fx.Node, most: int) -> fx.Node:
    """With zeros after it, up to `most` of its rows."""
    value = node.meta["val"]
    missing = most - value.shape[0]
    if not missing:
        return node
    around = [0, 0] * (value.dim() - 1) + [0, missing]
    return insert_call(_aten.constant_pad_nd.default, node, around)


def gather(node: fx.Node, like: fx.Node) -> fx.Node:
    """The start of a gather of `node` in the group of the collective `like`."""
    group = named_arguments(like)["group_name"]
    value, size = node.meta["val"], len(torch_api.ranks_of_group(group))
    args: Any = (node, size, group)
    start = node.graph.call_function(_ops.all_gather_into_tensor.default, args)
    result = value.new_empty([size * value.shape[0], *value.shape[1:]])
    start.meta = {**notes_of(like), "val": result}
    return start


def wait_for(start: fx.Node) -> fx.Node:
    wait = start.graph.call_function(_ops.wait_tensor.default, (start,))
    wait.meta = {**notes_of(start), "val": start.meta["val"]}
    return wait
