"""Plans the step of a model for a cluster: capture (or the cache), price, simulate, schedule."""

from undertow.planner.capturing import Capture, CapturedProgram, capture_step
from undertow.planner.settings import DTYPES, StepSettings, settings_for
from undertow.planner.step import (
    PlannedStep,
    origin_of_applied,
    plan,
    predict,
    summarise_solution,
    with_origin,
)

__all__ = [
    "DTYPES",
    "Capture",
    "CapturedProgram",
    "PlannedStep",
    "StepSettings",
    "capture_step",
    "origin_of_applied",
    "plan",
    "predict",
    "settings_for",
    "summarise_solution",
    "with_origin",
]
