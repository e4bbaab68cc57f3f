"""Reductions of gradients in a graph, and the divisions that average them.

A gradient is known by what becomes of it: no matmul needs the reduced value. Its division by the
number of ranks is a division by a number, right before its all-reduce or right after its wait, that
nobody else uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from undertow.graph.collectives import collective_call, is_wait
from undertow.graph.convert import Converted
from undertow.program import CollectiveKind
from undertow.schedule.manual import gradient_reductions

_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


@dataclass(frozen=True, slots=True)
class Gradient:
    """One all-reduce of one gradient: `value` is reduced by `start` and awaited by `wait`.

    `before` and `after` are the divisions around it, if there are any, and `divisor` their number.
    """

    start: fx.Node
    wait: fx.Node
    value: fx.Node
    before: fx.Node | None = None
    after: fx.Node | None = None
    divisor: int | float = 1

    @property
    def result(self) -> fx.Node:
        """What the rest of the graph uses."""
        return self.after or self.wait

    def key(self) -> tuple[Any, ...]:
        """What gradients must have in common to be reduced as one, and divided once."""
        call = collective_call(self.start)
        assert call is not None
        tensor = self.value.meta["val"]
        where = (self.before is not None, self.after is not None, self.divisor)
        return call.group, call.work.reduce_op, tensor.dtype, tensor.device, where


def find_gradients(converted: Converted) -> dict[int, Gradient]:
    """Start (as a task) -> the gradient that it reduces, in captured order."""
    last_writer: dict[int, int] = {}
    for task, one in enumerate(converted.program.tasks):
        for buffer in one.writes:
            last_writer[buffer] = task
    found = {}
    for task in gradient_reductions(converted.program):
        gradient = _gradient(converted.nodes[task])
        if gradient is None:
            continue
        if gradient.before is not None:
            # The dividend is read where all are reduced: it must not have changed until then.
            at = converted.program.index[gradient.before.name]
            if any(last_writer.get(b, -1) > at for b in converted.program.tasks[at].reads):
                value = gradient.before
                gradient = Gradient(gradient.start, gradient.wait, value)
        found[task] = gradient
    return found


def _gradient(start: fx.Node) -> Gradient | None:
    """The gradient of a plain all-reduce with one wait; None for any other form."""
    call = collective_call(start)
    assert call is not None
    is_plain = call.work.kind is CollectiveKind.ALL_REDUCE and not call.written
    result = start.meta["val"]
    if not is_plain or not isinstance(result, torch.Tensor) or result.is_complex():
        return None
    users = list(start.users)
    if len(users) != 1 or not is_wait(users[0]):
        return None
    (wait,), (value,) = users, call.read
    if len(value.users) == 1 and _is_division(value):
        dividend, divisor = value.args
        assert isinstance(dividend, fx.Node)
        return Gradient(start, wait, dividend, before=value, divisor=_number(divisor))
    after = list(wait.users)
    if len(after) == 1 and _is_division(after[0]):
        return Gradient(start, wait, value, after=after[0], divisor=_number(after[0].args[1]))
    return Gradient(start, wait, value)


def _is_division(node: fx.Node) -> bool:
    """By a number, of a tensor whose dtype it keeps."""
    if node.target not in _DIVISIONS or node.kwargs or not isinstance(node.args[1], int | float):
        return False
    dividend = node.args[0]
    if not isinstance(dividend, fx.Node):
        return False
    value = dividend.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == node.meta["val"].dtype


def _number(value: Any) -> int | float:
    assert isinstance(value, int | float)
    return value
