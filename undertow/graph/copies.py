"""Copies between devices that do not block, made to block before nodes change places.

Nothing in a graph says when such a copy is done; who reads its result relied on the work in
between, and that may be elsewhere after scheduling.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from undertow.capture.schema import named_arguments, nodes_in, parameter_names
from undertow.graph.nodes import tensors_of

_log = logging.getLogger(__name__)


def block_copies(graph: fx.Graph) -> int:
    """Make every copy from one kind of device to another block; how many did not."""
    changed = 0
    for node in graph.nodes:
        if node.op != "call_function" or "non_blocking" not in parameter_names(node.target):
            continue
        if named_arguments(node).get("non_blocking") and len(_kinds(node)) > 1:
            at = parameter_names(node.target).index("non_blocking")
            if at < len(node.args):
                node.args = (*node.args[:at], False, *node.args[at + 1 :])
            else:
                node.kwargs = {**node.kwargs, "non_blocking": False}
            changed += 1
    if changed:
        _log.warning(
            "%d copies between devices block now: nothing says when one that does not is done, and "
            "scheduling moves what its reader relied on",
            changed,
        )
    return changed


def _kinds(node: fx.Node) -> set[str]:
    """The kinds of device that a node's arguments and results are on."""
    nodes = [node, *nodes_in((node.args, node.kwargs))]
    return {t.device.type for one in nodes for t in tensors_of(one) if isinstance(t, torch.Tensor)}
