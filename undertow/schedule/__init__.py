"""Decides in which order a Program runs: the schedulers, each by its name, and what they report."""

from undertow.schedule.collective_order import pin_collectives, restore_sequences
from undertow.schedule.limits import Limits
from undertow.schedule.moves import LimitedBy, Move, Moved
from undertow.schedule.passes import (
    ITERATIVE_PIPELINE,
    SCHEDULERS,
    PassStep,
    PipelineResult,
    Scheduler,
    find_scheduler,
    run_pipeline,
)
from undertow.schedule.statistics import Statistics, collective_statistics, plan_statistics

__all__ = [
    "ITERATIVE_PIPELINE",
    "SCHEDULERS",
    "LimitedBy",
    "Limits",
    "Move",
    "Moved",
    "PassStep",
    "PipelineResult",
    "Scheduler",
    "Statistics",
    "collective_statistics",
    "find_scheduler",
    "pin_collectives",
    "plan_statistics",
    "restore_sequences",
    "run_pipeline",
]
