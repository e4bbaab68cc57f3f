"""Says once what parallel wrappers do outside of the graph, where nothing can be scheduled."""

from __future__ import annotations

from undertow.capture import torch_api
from undertow.notices import say_once


def tell_of_ddp() -> None:
    """If what is compiled is within a DistributedDataParallel module, which reduces in C++."""
    if torch_api.active_ddp() is not None and not torch_api.uses_python_reducer():
        say_once(
            "ddp outside the graph",
            "DistributedDataParallel reduces gradients outside of the compiled graph, where "
            "undertow cannot schedule it: set torch._dynamo.config.optimize_ddp = "
            '"python_reducer" before wrapping the model and run backward within '
            'undertow.compiled_backward(), or use undertow.parallelize(model, mesh, "ddp")',
        )


def watch_for_fully_shard() -> None:
    """Look for modules of `fully_shard` now, and whenever Dynamo takes up a frame from now on.

    They may be made at any time, and around their hooks Dynamo leaves frames to eager execution,
    perhaps all of them: then the backend itself is never called.
    """
    _tell_of_fully_shard()
    torch_api.before_compilations(_tell_of_fully_shard)


def _tell_of_fully_shard() -> None:
    if torch_api.has_fully_sharded_modules():
        say_once(
            "fully_shard outside the graph",
            "fully_shard gathers and reduces in hooks outside of the compiled graph, where "
            'undertow cannot schedule them: use undertow.parallelize(model, mesh, "fsdp") instead',
        )
