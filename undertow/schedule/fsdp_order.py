"""Sharded parameters: gather the next layer while this one runs, and no more than that.

Each layer's gathers may start only after the last use of the parameters gathered two layers before,
so at most two layers of unsharded parameters are alive. Gathers of parameters are known by what
they are (nothing but inputs behind them), layers by the module path where there is one, else by
which parameters are used together.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.program import (
    Collective,
    CollectiveKind,
    Kind,
    Lifetime,
    OpClass,
    Order,
    Program,
    Task,
    Work,
)
from undertow.schedule.limits import Limits, keeps_limits
from undertow.schedule.ready import Ready, order_by
from undertow.schedule.simple import shortest


@dataclass(frozen=True, slots=True)
class GatheredLayer:
    """The gathers of one layer's parameters and the tasks that use what they gather."""

    starts: tuple[int, ...]
    users: tuple[int, ...]  # in the order that the layers were found in


def fsdp_two_layers(program: Program, order: Order, limits: Limits) -> Order:
    """At most two layers of unsharded parameters alive; the next layer is gathered ahead where the
    limits allow it. The incoming order stays where hazards or limits forbid the bound."""
    layers = gathered_layers(program, order)
    place: list[int] = order.positions().tolist()
    edges = _two_layers(program, layers, place)
    if not edges:
        return order
    delayed = order_by(program, Ready(program, order, extra=edges), place)
    if delayed is None:
        return order
    gathers = {start for layer in layers for start in layer.starts}
    early = sorted(range(len(program)), key=lambda task: (task not in gathers, place[task]))
    ranks = [0] * len(program)
    for rank, task in enumerate(early):
        ranks[task] = rank
    ahead = order_by(program, Ready(program, order, extra=edges), ranks)
    fitting = [
        found
        for found in (delayed, ahead)
        if found is not None and keeps_limits(program, found, order, limits)
    ]
    return shortest(program, *fitting) if fitting else order


def gathered_layers(program: Program, order: Order) -> list[GatheredLayer]:
    """Layers in the sequence of their first use."""
    place: list[int] = order.positions().tolist()
    uses = []
    for start in parameter_gathers(program):
        users = _users(program, start, place)
        if users:
            uses.append((place[users[0]], start, users))
    layers: list[tuple[str, list[int], set[int]]] = []
    last_use = -1
    for first, start, users in sorted(uses):
        name = layer_name(program.tasks[start].module)
        together = name == layers[-1][0] if layers and name else first <= last_use
        if layers and together:
            layers[-1][1].append(start)
            layers[-1][2].update(users)
            last_use = max(last_use, place[users[-1]])
        else:
            layers.append((name, [start], set(users)))
            last_use = place[users[-1]]
    return [
        GatheredLayer(tuple(starts), tuple(sorted(users, key=place.__getitem__)))
        for _, starts, users in layers
    ]


def parameter_gathers(program: Program) -> list[int]:
    """Starts that gather parameters: a new buffer from inputs of the step, or from copies of
    them."""
    roots = input_roots(program)
    return [i for i, task in enumerate(program.tasks) if roots[i] and _is_gather(task)]


def input_roots(program: Program) -> list[frozenset[int]]:
    """Per task, the inputs of the step that all it reads are, or are copies of; empty if it reads
    anything else, or nothing."""
    nothing: frozenset[int] = frozenset()
    of_buffer = [
        frozenset((k,)) if buffer.lifetime is Lifetime.INPUT else nothing
        for k, buffer in enumerate(program.buffers)
    ]
    found = []
    for task in program.tasks:
        read = [of_buffer[buffer] for buffer in task.reads]
        roots = nothing.union(*read) if read and all(read) else nothing
        found.append(roots)
        for buffer in task.writes:
            of_buffer[buffer] = roots if _is_copy(task) else nothing
    return found


def _is_gather(task: Task) -> bool:
    if task.kind is not Kind.START:
        return False
    if isinstance(task.work, Collective):
        return task.work.kind is CollectiveKind.ALL_GATHER
    return set(task.reads).isdisjoint(task.writes)  # not described: at least nothing in place


def _is_copy(task: Task) -> bool:
    """A cast or a copy of a shard, or of several into one: no arithmetic between inputs."""
    if task.kind is not Kind.COMPUTE:
        return False
    if not isinstance(task.work, Work):  # not described: one in, one out
        return len(task.reads) == 1
    is_elementwise = task.work.op_class is OpClass.POINTWISE and len(task.reads) == 1
    return task.work.op_class is OpClass.COPY or is_elementwise


def layer_name(module: str) -> str:
    """The path up to the first number in it: what repeats in a model; the whole path without one.

    >>> layer_name("model.layers.3.attention.wq"), layer_name("model.norm")
    ('model.layers.3', 'model.norm')
    """
    parts = module.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else module


def _users(program: Program, start: int, place: list[int]) -> list[int]:
    """Tasks other than views and waits that read what `start` gathers before it is overwritten."""
    made, users = set(program.tasks[start].writes), set()
    for wait in program.waits_of[start]:
        for task in program.successors[wait]:
            reads = not made.isdisjoint(program.tasks[task].reads)
            if reads and program.tasks[task].kind is not Kind.VIEW:
                users.add(task)
    return sorted(users, key=place.__getitem__)


def _two_layers(
    program: Program, layers: list[GatheredLayer], place: list[int]
) -> dict[int, list[int]]:
    """Users of each layer before the gathers of the next but one.

    Users that come after those gathers' own (a parameter kept for the backward pass) cannot be
    waited for and are left out. The first gather on each stream stands for the others, which keep
    their sequence behind it.
    """
    edges: dict[int, list[int]] = {}
    for layer, after in zip(layers, layers[2:], strict=False):
        first_use = place[after.users[0]]
        first_on: dict[int, int] = {}
        for start in sorted(after.starts, key=place.__getitem__):
            first_on.setdefault(program.tasks[start].stream, start)
        for user in layer.users:
            if place[user] < first_use:
                edges.setdefault(user, []).extend(first_on.values())
    return edges
