"""Runs command lines: most in this process, where it is fast, some in one of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.report.steps import TWO_LAYERS
from undertow.cli.main import exit_code
from undertow.program import parse_program, program_to_json


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def undertow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`undertow("devices", "--json")` as in a shell, in this process."""
    monkeypatch.setenv("COLUMNS", "140")  # sentences stay on one line

    def run(*argv: object) -> Result:
        code = exit_code([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def spawn(*argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "undertow.cli.main", *map(str, argv)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    path = tmp_path / "program.json"
    path.write_text(json.dumps(program_to_json(parse_program(TWO_LAYERS))))
    return path
