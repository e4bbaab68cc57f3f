"""Undertow hides the communication of distributed PyTorch training behind its compute.

What is exported here is the public API; all of it is imported when it is first used, so that
`import undertow` costs next to nothing and torch comes in only where it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from undertow.errors import UndertowError

if TYPE_CHECKING:
    from undertow.backend import compiled_backward
    from undertow.capture.carry import carry_over
    from undertow.capture.clip import clip_grad_norm_
    from undertow.capture.full_state import (
        full_optimizer_state_dict,
        full_state_dict,
        load_full_optimizer_state_dict,
        load_full_state_dict,
    )
    from undertow.capture.mesh import Mesh
    from undertow.capture.parallelize import parallelize
    from undertow.cost.cluster import Cluster
    from undertow.cost.price import price
    from undertow.graph.schedule_graph import schedule_graph
    from undertow.planner import PlannedStep, plan
    from undertow.program import (
        Order,
        Program,
        ProgramBuilder,
        Timeline,
        load_program,
        lower_bounds,
        parse_program,
        simulate,
        verify,
    )
    from undertow.schedule.limits import Limits
    from undertow.schedule.plan import Plan

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "undertow.cost.cluster",
    "carry_over": "undertow.capture.carry",
    "clip_grad_norm_": "undertow.capture.clip",
    "compiled_backward": "undertow.backend",
    "full_optimizer_state_dict": "undertow.capture.full_state",
    "full_state_dict": "undertow.capture.full_state",
    "load_full_optimizer_state_dict": "undertow.capture.full_state",
    "load_full_state_dict": "undertow.capture.full_state",
    "Mesh": "undertow.capture.mesh",
    "PlannedStep": "undertow.planner",
    "parallelize": "undertow.capture.parallelize",
    "plan": "undertow.planner",
    "schedule_graph": "undertow.graph.schedule_graph",
    "Limits": "undertow.schedule.limits",
    "Plan": "undertow.schedule.plan",
    "price": "undertow.cost.price",
    "Order": "undertow.program",
    "Program": "undertow.program",
    "ProgramBuilder": "undertow.program",
    "Timeline": "undertow.program",
    "load_program": "undertow.program",
    "lower_bounds": "undertow.program",
    "parse_program": "undertow.program",
    "simulate": "undertow.program",
    "verify": "undertow.program",
}
"""Public name -> the module that has it."""

__all__ = [
    "Cluster",
    "Limits",
    "Mesh",
    "Order",
    "Plan",
    "PlannedStep",
    "Program",
    "ProgramBuilder",
    "Timeline",
    "UndertowError",
    "__version__",
    "carry_over",
    "clip_grad_norm_",
    "compiled_backward",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_program",
    "lower_bounds",
    "parallelize",
    "parse_program",
    "plan",
    "price",
    "schedule_graph",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
