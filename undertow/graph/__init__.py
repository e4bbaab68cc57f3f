"""FX graphs and Programs: what a graph's nodes are, what they cost, and how they depend."""

from undertow.graph.collectives import CollectiveCall, collective_call, is_wait
from undertow.graph.convert import Converted, GroupRanks, convert

__all__ = ["CollectiveCall", "Converted", "GroupRanks", "collective_call", "convert", "is_wait"]
