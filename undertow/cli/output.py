"""How commands write: tables for people, JSON for programs, files that are whole or not there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from undertow.errors import FileError

_PIPED_WIDTH = 110  # columns where there is no terminal to ask


def console() -> Console:
    """A console for stdout: colours only on a terminal, and never with NO_COLOR."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def show(renderables: Iterable[RenderableType]) -> None:
    """Print tables to fit the width, and sentences as they are: paths in them can be copied."""
    out = console()
    for renderable in renderables:
        out.print(renderable, soft_wrap=isinstance(renderable, str))


def show_json(data: Any) -> None:
    """Nothing but JSON on stdout."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def check_outputs(*paths: Path | None) -> None:
    """Refuse, before the work starts, outputs that could not be written or that are one file."""
    seen: set[Path] = set()
    for path in paths:
        check_writable(path)
        if path is None:
            continue
        if path.resolve() in seen:
            raise FileError(f"two outputs would be written to {path}; give each its own file")
        seen.add(path.resolve())


def check_writable(path: Path | None) -> None:
    """Refuse, before the work starts, an output that could not be written after it."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        # Files are replaced whole, which would put a file in the place of a device.
        raise FileError(f"cannot write {path}: it is not a regular file")
    try:
        handle, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error
    os.close(handle)
    os.unlink(probe)
