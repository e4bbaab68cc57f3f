"""Brings the collectives of a graph into the form that costs least where they run.

That is before anything is decided on it: Plans, costs and Programs are of the adapted graph. So far
it is for gloo, whose threads share the cores with compute; what NCCL runs stays as it is.
"""

from __future__ import annotations

from torch import fx

from undertow.backend.options import BackendOptions
from undertow.graph.batches import batch_collectives
from undertow.graph.embedding_rows import gather_embedding_rows
from undertow.graph.exchange import scatter_by_exchange
from undertow.graph.flat_gradients import BUCKETS, flatten_gradients
from undertow.graph.sharded_rows import exchange_sharded_rows

_CARRIED_BUCKETS = 32
"""Where they go on during the next forward, which needs the last of them first: while a large one
is on the link, none that is needed sooner can pass it."""


def adapt(graph: fx.Graph, options: BackendOptions, *, is_carried: bool = False) -> int:
    """Adapt `graph`; how many collectives have changed. With `merge=False` each stays on its own,
    and tables of embeddings are reduced as they are. `is_carried` says that reductions are left to
    the next forward."""
    changed = 0
    if options.merge is True and options.embedding_rows:
        changed += exchange_sharded_rows(graph, options.embedding_rows)
        changed += gather_embedding_rows(graph, options.embedding_rows)
    changed += scatter_by_exchange(graph)
    if options.merge is True:
        changed += flatten_gradients(graph, buckets=_CARRIED_BUCKETS if is_carried else BUCKETS)
        changed += batch_collectives(graph, direct=True)
    if changed:
        graph.lint()
    return changed
