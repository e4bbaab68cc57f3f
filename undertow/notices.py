"""What a user should know once: each sentence is logged the first time, and counted every time."""

from __future__ import annotations

import logging
from collections import Counter

_log = logging.getLogger("undertow")

counts: Counter[str] = Counter()
"""How often each thing happened in this process, by its short name: fallbacks, graphs compiled."""


def say_once(name: str, sentence: str) -> None:
    """Count `name`, and log `sentence` if it is the first time."""
    counts[name] += 1
    if counts[name] == 1:
        _log.warning("%s", sentence)
