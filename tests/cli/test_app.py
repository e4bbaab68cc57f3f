"""The command as a whole: help, version, exit codes, pipes and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import undertow as package
from tests.cli.conftest import Run, spawn
from undertow.cli import devices
from undertow.cli.app import COMMANDS


def test_no_arguments_show_the_help(undertow: Run) -> None:
    result = undertow()
    assert result.code == 0
    assert "Usage: undertow" in result.out


def test_help_lists_every_command_with_its_purpose(undertow: Run) -> None:
    out = undertow("--help").out
    for name, entry in COMMANDS.items():
        assert name in out
        assert entry.purpose in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_a_help_page_of_its_own(undertow: Run, name: str) -> None:
    result = undertow(name, "--help")
    assert result.code == 0
    assert f"Usage: undertow {name}" in result.out
    assert "--json" in result.out
    assert len(result.out.splitlines()) > 6


def test_version_is_the_package_version(undertow: Run) -> None:
    assert undertow("--version").out == f"undertow {package.__version__}\n"


def test_an_unknown_command_suggests_the_nearest(undertow: Run) -> None:
    result = undertow("simulat")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: unknown command 'simulat'; did you mean 'simulate'?")


def test_an_unknown_option_is_one_sentence(undertow: Run) -> None:
    result = undertow("cost", "all_gather", "--bytez", "1")
    assert result.code == 2
    assert result.err.startswith("error: no such option: --bytez")
    assert len(result.err.splitlines()) == 1


def test_something_unexpected_shows_its_traceback(
    undertow: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(devices, "load_devices", broken)
    result = undertow("devices")
    assert result.code == 1
    assert "Traceback" in result.err
    assert "a bug of ours" in result.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_quiet(options: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "undertow.cli.main", "devices", *options],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert err == ""


@pytest.mark.parametrize(
    "interrupted",
    [
        "app.invoke = lambda argv: exec('raise KeyboardInterrupt')",
        "app.app = app.typer.Typer()\n"  # which catches it
        "app.app.command()(lambda word: exec('raise KeyboardInterrupt'))",
    ],
)
def test_ctrl_c_in_generated_code_exits_with_130_too(tmp_path: Path, interrupted: str) -> None:
    lines = ("from undertow.cli import app, main", interrupted, "main.run()")
    (tmp_path / "interrupted.py").write_text("\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    command = [sys.executable, "-m", "interrupted", "stop"]
    assert subprocess.run(command, env=environment, check=False).returncode == 130


def test_ctrl_c_exits_with_130_and_leaves_nothing_behind(tmp_path: Path) -> None:
    fifo = tmp_path / "program.json"
    os.mkfifo(fifo)
    command = ["simulate", str(fifo), "--trace", str(tmp_path / "trace.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "undertow.cli.main", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with fifo.open("w"):  # opens when the command has begun to read, and keeps it waiting
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["program.json"]


def test_no_colour_and_a_sane_width_when_piped() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    result = spawn("devices", env=environment)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert 80 <= max(map(len, result.stdout.splitlines())) <= 110


def test_no_color_wins_over_forced_colour() -> None:
    environment = os.environ | {"FORCE_COLOR": "1", "NO_COLOR": "1"}
    result = spawn("doctor", env=environment)
    assert "\x1b[3" not in result.stdout


def test_a_narrow_terminal_keeps_names_and_paths_whole(
    undertow: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    assert "dgx-h100-superpod" in undertow("clusters").out
    trace = tmp_path / ("long" * 20 + ".json")
    result = undertow(
        "demo", "--model", "llama3-debug", "--trace", trace, "--html", tmp_path / "page.html"
    )
    assert f"wrote {trace}\n" in result.out
