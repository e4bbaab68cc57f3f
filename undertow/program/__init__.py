"""What runs, how long it takes and how much memory it needs: the model everything else stands
on."""

from undertow.program.bounds import Bound, BoundKind, Bounds, lower_bounds
from undertow.program.builder import ProgramBuilder
from undertow.program.memory import Liveness, MemoryProfile, MovableMemory, liveness, profile_memory
from undertow.program.model import (
    COMPUTE_STREAM,
    HOST_STREAM,
    Buffer,
    Collective,
    CollectiveKind,
    Hazard,
    HazardKind,
    Join,
    Kind,
    Lifetime,
    Machine,
    OpClass,
    Order,
    Program,
    Stream,
    Task,
    Work,
    renumbered,
    retimed,
)
from undertow.program.serialize import (
    load_program,
    program_from_json,
    program_to_json,
    save_json,
    timeline_from_json,
    timeline_to_json,
)
from undertow.program.simulate import simulate
from undertow.program.text import format_program, parse_program
from undertow.program.timeline import Exposure, Timeline
from undertow.program.verify import Rule, Violation, find_violations, stream_sequences, verify

__all__ = [
    "COMPUTE_STREAM",
    "HOST_STREAM",
    "Bound",
    "BoundKind",
    "Bounds",
    "Buffer",
    "Collective",
    "CollectiveKind",
    "Exposure",
    "Hazard",
    "HazardKind",
    "Join",
    "Kind",
    "Lifetime",
    "Liveness",
    "Machine",
    "MemoryProfile",
    "MovableMemory",
    "OpClass",
    "Order",
    "Program",
    "ProgramBuilder",
    "Rule",
    "Stream",
    "Task",
    "Timeline",
    "Violation",
    "Work",
    "find_violations",
    "format_program",
    "liveness",
    "load_program",
    "lower_bounds",
    "parse_program",
    "profile_memory",
    "program_from_json",
    "program_to_json",
    "renumbered",
    "retimed",
    "save_json",
    "simulate",
    "stream_sequences",
    "timeline_from_json",
    "timeline_to_json",
    "verify",
]
