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
from undertow.graph.flat_gradients import flatten_gradients


def adapt(graph: fx.Graph, options: BackendOptions) -> int:
    """Adapt `graph`; how many collectives have changed. With `merge=False` each stays on its own,
    and tables of embeddings are reduced as they are."""
    changed = scatter_by_exchange(graph)
    if options.merge is True:
        if options.embedding_rows:
            changed += gather_embedding_rows(graph, options.embedding_rows)
        changed += flatten_gradients(graph)
        changed += batch_collectives(graph, direct=True)
    if changed:
        graph.lint()
    return changed
