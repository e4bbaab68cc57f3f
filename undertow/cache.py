"""What undertow can make again, kept on disk: compressed JSON named by what it was made from.

Entries are data and nothing in them is executed. One that cannot be read or written is as good as
none: the work is done again, and the log says why.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from undertow.errors import FileError
from undertow.program.serialize import write_bytes_whole

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where undertow keeps what it can make again: $UNDERTOW_CACHE, else the user's cache."""
    own = os.environ.get("UNDERTOW_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "undertow"


def cache_key(*parts: Any) -> str:
    """A name for what depends on `parts` (plain data) and on nothing else."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def source_digest(places: Iterable[Path]) -> str:
    """A digest of these Python files and of all in these folders: what they make changes when they
    do."""
    digest = hashlib.sha256()
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        for path in files:
            name = path.relative_to(place.parent).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_entry(room: str, key: str) -> Any | None:
    """The entry of that name, or None."""
    path = _path(room, key)
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        _log.warning("ignoring the cache entry %s, which cannot be read: %s", path, error)
        return None


def write_entry(room: str, key: str, data: Any) -> bool:
    """Keep an entry; whether that worked."""
    path = _path(room, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_whole(path, gzip.compress(json.dumps(data).encode(), compresslevel=3, mtime=0))
    except (OSError, FileError) as error:
        _log.warning("nothing is kept in the cache %s: %s", cache_dir(), error)
        return False
    return True


def _path(room: str, key: str) -> Path:
    return cache_dir() / room / f"{key}.json.gz"
