"""Libraries that were built, kept in a folder; which of them may be executed.

Nothing is loaded from there unless this user alone can have written it: the folder, a library and
its sum belong to the user, nobody else may write to them, and none of them is a symbolic link. The
sum is of the library and of the unit that it was built from, so that the library of another unit
does not pass for it. The folder is held open and reached through its descriptor: who can rename it
cannot put another in its place between the look and the load.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from undertow.notices import say_once

_HANDLES: dict[tuple[int, int], int] = {}  # descriptors of folders, by device and inode
_BY_DESCRIPTOR = "/proc/self/fd"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Room:
    """A folder of libraries that this user alone may write to."""

    path: Path
    handle: int

    @staticmethod
    def at(path: Path) -> Room:
        """The folder of that name, made if it is not there; an OSError says why it cannot be used.

        Folders above it may be anybody's: see the top.
        """
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            handle = os.open(path, _READ | os.O_DIRECTORY)
        except OSError as error:
            _refuse_link(error, path)
            raise
        status = os.fstat(handle)
        if fault := _fault(status, stat.S_ISDIR):
            os.close(handle)
            raise PermissionError(f"{path} {fault}")
        return Room(path, _kept_open(handle, (status.st_dev, status.st_ino)))

    def library(self, name: str) -> str:
        """The path by which this process loads a library."""
        own = f"{_BY_DESCRIPTOR}/{self.handle}"
        return f"{own if os.path.isdir(own) else self.path}/{name}.so"

    def has(self, name: str, unit: str) -> bool:
        """Whether the library of a unit is there and may be loaded; what may not is told once."""
        try:
            expected = self._read(f"{name}.sha256")
            content = self._read(f"{name}.so")
        except FileNotFoundError:
            return False
        except OSError as error:
            _refuse(str(error))
            return False
        if _sum(unit, content) != expected:
            _refuse(f"{self.path / name}.so is not what was built")
            return False
        return True

    def keep(self, name: str, unit: str, built: Path) -> None:
        """Put a library there, under its name at once: others may do the same."""
        content = built.read_bytes()
        # the sum first: a library without its sum is built again, one with a stale sum too
        self._write(f"{name}.sha256", _sum(unit, content), 0o600)
        self._write(f"{name}.so", content, 0o700)

    def _read(self, name: str) -> bytes:
        try:
            handle = os.open(name, _READ, dir_fd=self.handle)
        except OSError as error:
            _refuse_link(error, self.path / name)
            raise
        with open(handle, "rb") as file:
            if fault := _fault(os.fstat(handle), stat.S_ISREG):
                raise PermissionError(f"{self.path / name} {fault}")
            return file.read()

    def _write(self, name: str, content: bytes, mode: int) -> None:
        temporary = f".{name}.{secrets.token_hex(8)}"
        handle = os.open(temporary, _WRITE, mode, dir_fd=self.handle)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except BaseException:  # Ctrl-C included: leave nothing half-written
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.handle)
            raise


def _kept_open(handle: int, place: tuple[int, int]) -> int:
    """The descriptor of a folder for as long as this process runs: one that it has, or this one."""
    known = _HANDLES.get(place)
    if known is not None:
        with contextlib.suppress(OSError):  # somebody may have closed all descriptors
            status = os.fstat(known)
            if (status.st_dev, status.st_ino) == place:
                os.close(handle)
                return known
    _HANDLES[place] = handle
    return handle


def _sum(unit: str, content: bytes) -> bytes:
    return f"{unit} {hashlib.sha256(content).hexdigest()}\n".encode()


def _fault(status: os.stat_result, is_right: Callable[[int], bool]) -> str:
    """Why somebody else may have written this; empty if nobody can have."""
    if not is_right(status.st_mode):
        return "is of another kind than was made there"
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users (chmod go-w ends that)"
    return ""


def _refuse_link(error: OSError, path: Path) -> None:
    """A sentence where `open` failed since the path is a link, which is not followed."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
        raise PermissionError(f"{path} is a symbolic link") from error


def _refuse(why: str) -> None:
    say_once("kernel refused", f"a kernel in the cache is not used but built again: {why}")
