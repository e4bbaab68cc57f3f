"""`undertow doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from undertow.cli import doctor
from undertow.cli.doctor import CHECKS, Check
from undertow.codegen import cpp_build
from undertow.codegen.cpp_build import find_compiler


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


def test_the_compiler_is_the_one_that_kernels_are_built_with(
    undertow: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "my-c++"
    own.write_text("#!/bin/sh\necho 99.1\n")  # it answers, and builds nothing
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    find_compiler.cache_clear()
    try:
        assert "99.1" not in str(doctor._compiler())
        monkeypatch.setattr(cpp_build, "_candidates", lambda: [(str(own),)])
        find_compiler.cache_clear()
        assert doctor._compiler() is None
    finally:
        find_compiler.cache_clear()


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNDERTOW_CACHE", raising=False)
    assert doctor.cache_dir() == tmp_path / "undertow"
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "here"))
    assert doctor.cache_dir() == tmp_path / "here"
