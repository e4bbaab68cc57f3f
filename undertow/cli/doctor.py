"""`undertow doctor`: what this machine has of what undertow uses, and what each is for.

Versions are read from package metadata, so that nothing heavy is imported; `--deep` imports torch
and asks it.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated

import typer
from rich.text import Text

from undertow.cache import cache_dir
from undertow.cli.app import subcommand
from undertow.cli.output import show, show_json
from undertow.cli.pricing import JsonOption
from undertow.report.text import table
from undertow.units import format_nbytes

app = subcommand()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look for: `find` says what was found, or None."""

    name: str
    purpose: str
    find: Callable[[], str | None]
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    found: str | None
    purpose: str
    is_required: bool

    @property
    def status(self) -> str:
        return "ok" if self.found is not None else "missing" if self.is_required else "absent"


def _python() -> str | None:
    return platform.python_version() if sys.version_info >= (3, 11) else None


def _package(name: str) -> Callable[[], str | None]:
    def find() -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return find


def _torch() -> str | None:
    version = _package("torch")()
    return version if version and version.startswith("2.13.") else None


def _program(*names: str) -> Callable[[], str | None]:
    def find() -> str | None:
        # Debian keeps ip and tc where only root's PATH looks.
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        return next(filter(None, (shutil.which(name, path=path) for name in names)), None)

    return find


def _compiler() -> str | None:
    """What kernels are compiled with; a small library has been built with it."""
    from undertow.codegen.cpp_build import NoCompilerError, find_compiler

    try:
        found = find_compiler()
    except NoCompilerError as error:
        _log.warning("%s", error)
        return None
    command = "ziglang" if "ziglang" in found.command else shlex.join(found.command)
    numbers = re.findall(r"\d+\.[\d.]*\d", found.version)
    return f"{command} {numbers[-1] if numbers else found.version}"


def _native() -> str | None:
    """Whether the solver's loops run natively; else they do in Python."""
    from undertow import native

    return None if native.extension is None else "built"


def _cores() -> str | None:
    has_affinity = hasattr(os, "sched_getaffinity")
    return str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count())


def _memory() -> str | None:
    try:
        return format_nbytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return None


def _cache() -> str | None:
    there = cache_dir()
    while not there.exists():
        there = there.parent
    return str(cache_dir()) if os.access(there, os.W_OK) else None


CHECKS = (
    Check("python", "3.11 or later", _python, is_required=True),
    Check("torch", "2.13: capturing and running models", _torch, is_required=True),
    Check("numpy", "arrays of the simulator", _package("numpy"), is_required=True),
    Check("c++ compiler", "compiling kernels for the CPU", _compiler),
    Check("native core", "solving in half the time; without it Python does the same", _native),
    Check("triton", "compiling kernels for GPUs", _package("triton")),
    Check("ortools", "exact schedules of small programs", _package("ortools")),
    Check("transformers", "planning Hugging Face models", _package("transformers")),
    Check("chromium", "testing the report page", _program("chromium", "chromium-browser")),
    Check("ip", "network namespaces: measuring collectives on a slowed link", _program("ip")),
    Check("tc", "slowing that link", _program("tc")),
    Check("cores", "sweeps and compilers run on them", _cores),
    Check("memory", "capturing large models takes some", _memory),
    Check("cache", "captured graphs and compiled kernels", _cache),
)


def _deep() -> tuple[Check, ...]:
    def works() -> str | None:
        import torch

        accelerator = "with CUDA" if torch.cuda.is_available() else "no GPU"
        return f"{torch.__version__}, {accelerator}, {torch.get_num_threads()} threads"

    def distributed() -> str | None:
        import torch.distributed as dist

        names = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
        there = [name for name, is_there in names.items() if dist.is_available() and is_there()]
        return ", ".join(there) or None

    return (
        Check("import torch", "torch loads", works, is_required=True),
        Check("process groups", "running collectives", distributed, is_required=True),
    )


@app.command("doctor")
def command(
    deep: Annotated[bool, typer.Option("--deep", help="Also import torch and ask it.")] = False,
    json: JsonOption = False,
) -> None:
    """Check what this machine has of what undertow uses, and what each is for.

    Exits with 1 if something is missing that undertow cannot do without.
    """
    checks = CHECKS + (_deep() if deep else ())
    findings = [Finding(c.name, c.find(), c.purpose, c.is_required) for c in checks]
    if json:
        show_json(
            [
                {"name": f.name, "status": f.status, "found": f.found, "purpose": f.purpose}
                for f in findings
            ]
        )
    else:
        _show(findings)
    if any(finding.status == "missing" for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    styles = {"ok": "green", "absent": "dim", "missing": "red"}
    rows = table("=", "=", "found", "for")
    for finding in findings:
        status = Text(finding.status, style=styles[finding.status])
        rows.add_row(finding.name, status, Text(finding.found or ""), finding.purpose)
    show([rows])
    if any(finding.status == "absent" for finding in findings):
        show(["absent: undertow works without it, except for what it is listed for"])
