"""How long work tells others that it goes on, and notes where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


class Clock:
    """Seconds per stage, in the order in which they ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage ends here; it began where the last one ended."""
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now
