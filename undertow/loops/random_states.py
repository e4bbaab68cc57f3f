"""Random operators that an activation checkpoint runs twice, with the same numbers.

Forward keeps the state of the generator beside the result, backward runs the operator from that
state and leaves the generator as it was. AOTAutograd writes this as two operators of higher order
whose nodes say nothing of their results. Here each becomes a call of a function with known results,
so that the graph around it can be lowered; the operator itself stays ATen's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from undertow.capture.torch_api import FakeTensor

SAVING = "run_and_save_rng_state"
RESTORING = "run_with_rng_state"


def run_and_save(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The state of the generator, and the results of an operator that draws from it."""
    state = torch.get_rng_state()
    made = op(*args, **kwargs)
    return (state, *made) if isinstance(made, tuple | list) else (state, made)


def run_with(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The results of an operator that draws from a generator in this state."""
    kept = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        made = op(*args, **kwargs)
    finally:
        torch.set_rng_state(kept)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def with_states(gm: fx.GraphModule) -> fx.GraphModule | None:
    """A copy of a graph whose checkpoints call functions of ours; the graph itself if it has none
    that draw, and None if one of them is used in a way that is not known."""
    if not any(str(node.target) in (SAVING, RESTORING) for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        name = str(node.target)
        if name == SAVING and not _replace_saving(graph, node):
            return None
        if name == RESTORING and not _replace_restoring(graph, node):
            return None
    graph.lint()
    return fx.GraphModule(gm, graph)


def _replace_saving(graph: fx.Graph, node: fx.Node) -> bool:
    results = _results(node.args[0], node.args[1:], node.kwargs)
    state = _state_like(results)
    if results is None or state is None:
        return False
    with graph.inserting_before(node):
        call = graph.call_function(run_and_save, node.args, node.kwargs)
        parts = _parts(graph, call, [state, *results])
    call.meta = {**node.meta, "val": (state, *results)}
    for user in list(node.users):
        if not _is_item(user):
            return False
        if user.args[1] == 0:
            user.replace_all_uses_with(parts[0])
        elif not _replace_made(user, parts[1:]):
            return False
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _replace_restoring(graph: fx.Graph, node: fx.Node) -> bool:
    state, op, *args = node.args
    results = _results(op, args, node.kwargs)
    known = _state_like(results)
    if results is None or known is None or not isinstance(state, fx.Node):
        return False
    if state.op == "placeholder":  # of a size that nobody else asks for
        state.meta["val"] = known
    with graph.inserting_before(node):
        call = graph.call_function(run_with, node.args, node.kwargs)
        parts = _parts(graph, call, results)
    call.meta = {**node.meta, "val": tuple(results)}
    if not _replace_made(node, parts):
        return False
    graph.erase_node(node)
    return True


def _replace_made(node: fx.Node, parts: list[fx.Node]) -> bool:
    """Put the results of an operator where a node stands for them, one or several."""
    if len(parts) == 1 and not any(_is_item(user) for user in node.users):
        node.replace_all_uses_with(parts[0])
        return True
    for user in list(node.users):
        if not _is_item(user):
            return False
        place: Any = user.args[1]
        user.replace_all_uses_with(parts[place])
        user.graph.erase_node(user)
    return True


def _parts(graph: fx.Graph, call: fx.Node, values: list[Any]) -> list[fx.Node]:
    found = []
    for k, value in enumerate(values):
        part = graph.call_function(operator.getitem, (call, k))
        part.meta["val"] = value
        found.append(part)
    return found


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _results(op: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """What an operator gives on the fake values of its arguments."""
    given = fx.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta.get("val"))
    fakes = [value for value in given[0] if isinstance(value, FakeTensor)]
    if not fakes:
        return None
    with fakes[0].fake_mode:
        made = op(*given[0], **given[1])
    return list(made) if isinstance(made, tuple | list) else [made]


def _state_like(results: list[Any] | None) -> torch.Tensor | None:
    """A generator's state as fake: its size is the machine's, not a symbol's."""
    fake = next((value for value in results or () if isinstance(value, FakeTensor)), None)
    if fake is None:
        return None
    size = torch.get_rng_state().numel()
    with fake.fake_mode:
        return torch.empty(size, dtype=torch.uint8)
