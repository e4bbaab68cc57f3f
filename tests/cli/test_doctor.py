"""`undertow doctor`."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from undertow.cli import doctor
from undertow.cli.doctor import CHECKS, Check


def test_every_check_is_shown_with_what_it_is_for(undertow: Run) -> None:
    result = undertow("doctor")
    assert result.code == 0
    for check in CHECKS:
        assert check.name in result.out
        assert check.purpose in result.out


def test_json_has_a_status_for_each(undertow: Run) -> None:
    findings = undertow("doctor", "--json").json
    assert [finding["name"] for finding in findings] == [check.name for check in CHECKS]
    assert {finding["status"] for finding in findings} <= {"ok", "absent", "missing"}
    assert findings[0]["status"] == "ok"


def test_something_required_and_missing_exits_with_1(
    undertow: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Check("torch", "running models", lambda: None, is_required=True)
    monkeypatch.setattr(doctor, "CHECKS", (gone,))
    result = undertow("doctor")
    assert result.code == 1
    assert "missing" in result.out


def test_something_optional_and_absent_is_no_failure(
    undertow: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (Check("triton", "GPUs", lambda: None),))
    result = undertow("doctor")
    assert result.code == 0
    assert "absent" in result.out


def test_the_compiler_of_the_environment_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "my-c++"
    own.write_text("#!/bin/sh\necho 99.1\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    assert doctor._compiler() == f"{own} 99.1"


def test_without_a_compiler_the_wheel_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(metadata, "version", lambda name: {"ziglang": "0.13"}[name])
    assert doctor._compiler() == "ziglang 0.13"


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNDERTOW_CACHE", raising=False)
    assert doctor.cache_dir() == tmp_path / "undertow"
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "here"))
    assert doctor.cache_dir() == tmp_path / "here"
