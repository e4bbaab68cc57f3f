"""What can be asked of the loop compiler for one graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from undertow.codegen.user_passes import After, Before


@dataclass(frozen=True, slots=True)
class Settings:
    """How to compile a graph, beside what it is."""

    # inputs that maybe nobody else holds, whose memory is used again, and whether that is sure
    spare: Mapping[str, bool] = field(default_factory=dict)
    # order kernels for the fewest partitions, of so many steps at least; None: as they come
    partition: int | None = None
    before_fusion: Before | None = None  # passes of the user's
    after_fusion: After | None = None
    check_memory: str = ""  # "raise" or "log" where memory is not as planned; empty: do not look


DEFAULT = Settings()
