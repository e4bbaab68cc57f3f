"""Compiling generated C++ and keeping what was built.

A unit is named by the hash of its text, the compiler and the flags, so equal units are built once
and a warm start compiles nothing. Many processes may build at once: each does so in a folder of its
own and puts the result into the cache (`libraries` says what may be loaded from there). Large units
are compiled in parts, as many at once as this process has cores for, and linked to one library.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from undertow.cache import cache_dir
from undertow.codegen.libraries import Room
from undertow.errors import UndertowError
from undertow.notices import say_once
from undertow.workers import cores

_log = logging.getLogger(__name__)
FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp-simd",
    "-fno-exceptions",
    "-fno-rtti",
    "-std=c++17",
)
TIMEOUT = 600  # seconds
TRIAL = 'extern "C" int trial(void) { return 1; }\n'
_COMPILER_FAULTS = ("internal compiler error", "unrecognizable insn")


class NoCompilerError(UndertowError):
    """There is no C++ compiler on this machine."""


class BuildError(UndertowError):
    """The compiler refused what was generated."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        return "\0".join((*self.command, self.version, *self.flags))


@functools.cache
def find_compiler() -> Compiler:
    """The C++ compiler to use: of $CXX, g++, clang++ and the one in the ziglang package the first
    that builds a library which can be loaded."""
    tried = []
    for command in _candidates():
        try:
            found = _tested(command)
        except (OSError, subprocess.SubprocessError, BuildError) as error:
            tried.append(f"{shlex.join(command)}: {error}")
            continue
        if tried:
            passed = "; ".join(tried)
            say_once("compiler passed over", f"{found.version} compiles kernels; tried {passed}")
        return found
    extra = f" (tried {'; '.join(tried)})" if tried else ""
    raise NoCompilerError(
        f"no C++ compiler that works was found{extra}: install g++ or clang++, name one in $CXX, "
        "or install the Python package ziglang"
    )


def _tested(command: tuple[str, ...]) -> Compiler:
    """A compiler that has built a small library, now or when it was kept in the cache."""
    answer = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    version = answer.stdout.splitlines()[0] if answer.stdout else "unknown"
    compiler = Compiler(command, version, (*FLAGS, *_host_flags()))
    _load(compiler, TRIAL)
    return compiler


def _candidates() -> list[tuple[str, ...]]:
    own = os.environ.get("CXX")
    found = [tuple(shlex.split(own))] if own else []
    found += [(path,) for name in ("g++", "clang++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "c++"))
    return found


def _host_flags() -> tuple[str, ...]:
    """Full vectors where the host has 512-bit ones; compilers hold back by default."""
    try:
        wide = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        wide = False
    return ("-mprefer-vector-width=512",) if wide else ()


@functools.cache
def prelude() -> str:
    return (files("undertow.codegen") / "prelude.h").read_text(encoding="utf-8")


Parts = Callable[[], Sequence[str]]


def build(text: str, parts: Parts | None = None) -> ctypes.CDLL:
    """The shared library of a unit, from the cache if it has been built before. `parts` may give
    it in several, to be compiled at once and linked; the first has what they share."""

    def wholes() -> list[str]:
        found = list(parts()) if parts is not None else []
        marks = ["", *["#define UNDERTOW_PART\n"] * (len(found) - 1)]
        return [f"{mark}{prelude()}\n{part}" for mark, part in zip(marks, found, strict=False)]

    return _load(find_compiler(), prelude() + "\n" + text, wholes)


def compilers_at_once() -> int:
    """How many compilers this process should run: its share of the cores, with those of other
    ranks on this machine."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() and int(told) > 0 else 1
    return max(cores() // ranks, 1)


def build_whole(whole: str) -> str:
    """The path of the library built from a whole text, which other processes may load too."""
    return os.path.realpath(_built(find_compiler(), whole))


def load_whole(whole: str, loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """The library built from a whole text."""
    return _load(find_compiler(), whole, loader=loader)


def _load(
    compiler: Compiler, whole: str, parts: Parts = tuple, loader: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL:
    """Build a unit and load it, from a folder of our own if the cache's cannot be loaded: it may be
    on a file system from which nothing is executed."""
    path = _built(compiler, whole, parts)
    try:
        return loader(path)
    except OSError as error:
        first = error
    path = _built(compiler, whole, parts, is_kept=False)
    try:
        library = loader(path)
    except OSError as error:
        raise BuildError(
            f"{compiler.version} built a library that cannot be loaded: {error}"
        ) from error
    _tell_not_kept(first)
    return library


def _built(compiler: Compiler, whole: str, parts: Parts = tuple, is_kept: bool = True) -> str:
    """Where to load the library from that is built from a whole text, or from the same in parts."""
    made_with = "\0".join((compiler.key, _host()))
    unit = f"{_digest(made_with)} {_digest(whole)}"
    name = _digest(unit)[:40]
    room = _room() if is_kept else None
    if room is not None and room.has(name, unit):
        return room.library(name)
    own = Path(_private_folder()) / f"{name}.so"
    if not own.is_file():
        with tempfile.TemporaryDirectory(dir=own.parent, prefix="build-") as folder:
            built = Path(folder) / "unit.so"
            _compile(compiler, whole, built, parts())
            if room is not None and _is_now_in(room, name, unit, built):
                return room.library(name)
            built.replace(own)
    elif room is not None and _is_now_in(room, name, unit, own):
        return room.library(name)
    return str(own)


def _is_now_in(room: Room, name: str, unit: str, built: Path) -> bool:
    """Put what was built into the cache; whether it can be loaded from there."""
    try:
        room.keep(name, unit, built)
    except OSError as error:
        _tell_not_kept(error)
        return False
    return room.has(name, unit)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _host() -> str:
    """What -march=native means here, so that a shared cache is not used on another machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    wanted = [line for line in lines[:40] if line.startswith(("model name", "flags"))]
    return "\n".join(wanted)


def _room() -> Room | None:
    try:
        return Room.at(cache_dir() / "kernels")
    except OSError as error:
        _tell_not_kept(error)
        return None


def _tell_not_kept(error: Exception) -> None:
    sentence = f"kernels are compiled in every process, the cache cannot be used: {error}"
    say_once("kernels not kept", sentence)


@functools.cache
def _private_folder() -> str:
    """A folder of this process alone, for as long as it runs."""
    path, maker = tempfile.mkdtemp(prefix="undertow-kernels-"), os.getpid()

    def remove() -> None:  # a forked child leaves it to its parent
        if os.getpid() == maker:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{shlex.join(command)} did not run: {error}") from error


def _compile(compiler: Compiler, whole: str, built: Path, parts: Sequence[str] = ()) -> None:
    """Compile a unit to a library; what is needed for that is written beside it."""
    if len(parts) > 1:
        _compile_parts(compiler, parts, built)
    else:
        source = built.with_suffix(".cpp")
        source.write_text(whole, encoding="utf-8")
        _call(compiler, [*compiler.flags, str(source), "-o", str(built)])
    if not built.is_file():
        raise BuildError(f"{compiler.version} wrote no library, and told of no error")


def _compile_parts(compiler: Compiler, parts: Sequence[str], built: Path) -> None:
    """Compile parts at once, each by a process of its own, and link them."""
    sources = [built.with_name(f"part{k}.cpp") for k in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        objects = list(pool.map(compile_part, parts, sources))
    _call(compiler, ["-shared", *objects, "-o", str(built)])


def compile_part(text: str, source: Path) -> str:
    """Compile one part of a unit, writing its text to `source`; the path of its object file."""
    compiler = find_compiler()
    source.write_text(text, encoding="utf-8")
    made = source.with_suffix(".o")
    flags = [flag for flag in compiler.flags if flag != "-shared"]
    _call(compiler, [*flags, "-c", str(source), "-o", str(made)])
    return str(made)


def _call(compiler: Compiler, arguments: list[str]) -> None:
    command = [*compiler.command, *arguments]
    answer = _run(command)
    if answer.returncode and any(sign in answer.stderr for sign in _COMPILER_FAULTS):
        _log.warning("%s failed on its own account; trying less hard", compiler.version)
        answer = _run([*command, "-O1"])
    if answer.returncode:
        raise BuildError(f"{compiler.version} refused the generated code:\n{answer.stderr[:4000]}")
