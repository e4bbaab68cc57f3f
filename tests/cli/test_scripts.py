"""`scripts/debian.sh` installs what is absent and nothing else; the package tools are stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOOLS = {
    # Of all packages, "there" is installed.
    "dpkg-query": 'case "$*" in *" there") echo -n "install ok installed";; *) exit 1;; esac',
    "apt-get": 'echo "apt-get $*" >> "$LOG"',
    "id": 'echo "${FAKE_UID:-0}"',
    "sudo": "exit 1",
}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    for name, body in TOOLS.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
    return tmp_path


def debian(
    tools: Path, *packages: str, uid: int = 0
) -> tuple[subprocess.CompletedProcess[str], str]:
    log = tools / "log"
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "LOG": str(log),
        "FAKE_UID": str(uid),
    }
    command = [str(ROOT / "scripts" / "debian.sh"), *packages]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    return result, log.read_text() if log.exists() else ""


def test_an_empty_list_does_nothing(tools: Path) -> None:
    result, done = debian(tools)
    assert (result.returncode, result.stdout, done) == (0, "", "")


def test_what_is_installed_is_left_alone(tools: Path) -> None:
    result, done = debian(tools, "there")
    assert (result.returncode, done) == (0, "")


def test_what_is_absent_is_installed(tools: Path) -> None:
    result, done = debian(tools, "there", "absent")
    assert result.returncode == 0
    assert done.splitlines()[-1] == "apt-get install -y -qq --no-install-recommends absent"


def test_without_rights_it_says_what_to_run(tools: Path) -> None:
    result, done = debian(tools, "absent", uid=1000)
    assert (result.returncode, done) == (1, "")
    assert "sudo apt-get install absent" in result.stderr
