"""FX graphs and Programs: what a graph's nodes are, what they cost, how they depend, and how what
was decided is written back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undertow.graph.collectives import CollectiveCall, collective_call, is_wait
from undertow.graph.convert import Converted, GroupRanks, convert
from undertow.graph.rewrite import rewrite

if TYPE_CHECKING:
    from undertow.graph.inductor_bridge import as_inductor_pass

__all__ = [
    "CollectiveCall",
    "Converted",
    "GroupRanks",
    "as_inductor_pass",
    "collective_call",
    "convert",
    "is_wait",
    "rewrite",
]


def __getattr__(name: str) -> Any:
    """Inductor is imported when the bridge to it is first used."""
    if name == "as_inductor_pass":
        from undertow.graph.inductor_bridge import as_inductor_pass

        return as_inductor_pass
    raise AttributeError(f"module 'undertow.graph' has no attribute {name!r}")
