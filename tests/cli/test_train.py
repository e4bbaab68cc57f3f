"""`undertow train` and its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from undertow.cli import train
from undertow.cli.train_worker import Setup
from undertow.cli.training import Place, Team, TrainingError

MODEL = {"vocab": 64, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "hidden": 32}


def setup(**changes: Any) -> Setup:
    fields = {
        "variant": "compute", "rank": 0, "world": 1, "store": "", "model": MODEL, "batch": 2,
        "seq": 8, "options": {},
    }  # fmt: skip
    return Setup(**(fields | changes))


@pytest.mark.slow
def test_a_team_trains_and_is_gone_afterwards() -> None:
    with Team([setup()], [Place()]) as team:
        (answer,) = team.steps(3)
        (worker,) = team._workers
    assert answer["losses"][0] > answer["losses"][-1]
    assert len(answer["seconds"]) == 3
    assert answer["peak_nbytes"] > 0
    assert worker.poll() is not None


@pytest.mark.slow
def test_a_worker_that_fails_says_why() -> None:
    wrong = setup(model={"width": 16})
    team = Team([wrong], [Place()])
    with pytest.raises(TrainingError, match=r"rank 0 of 'compute' failed(.|\n)*missing"):
        team.__enter__()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("when", ["at the start", "in a collective"])
def test_no_worker_outlives_the_command(tmp_path: Path, when: str, number: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "undertow.cli.main", "train", "--steps", "100000"]
    command += ["--variants", "undertow ddp", "--layers", "1", "--out", str(out)]
    environment = {**os.environ, "UNDERTOW_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    workers: list[int] = []
    try:
        assert wait_for(lambda: len(children(process.pid)) == 2, 60)
        workers = children(process.pid)
        if when == "in a collective":
            assert wait_for(lambda: list(out.rglob("*.measured.json")), 100)
            os.kill(workers[1], signal.SIGSTOP)
            time.sleep(1)  # the other is waiting for it now
        process.send_signal(number)
        code = process.wait(10)
        assert wait_for(lambda: not any(map(is_running, workers)), 10)
        assert code == (128 + number if number == signal.SIGTERM else -number)
        if number == signal.SIGTERM:
            assert b"Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    finally:
        process.kill()
        process.communicate()
        for pid in workers:
            with contextlib.suppress(OSError):
                if b"train_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_two_ranks_of_ours_and_of_pytorch_have_the_same_losses(
    undertow: Run, tmp_path: Path
) -> None:
    """One of PyTorch's stands for both: that ours agree with each is tested with the backend."""
    page = tmp_path / "page.html"
    few = ["--steps", "1", "--rounds", "1", "--layers", "1"]
    chosen = ["--variants", "fsdp2, undertow ddp, undertow fsdp"]
    result = undertow("train", *few, *chosen, "--html", page, "--json")
    assert result.code == 0, result.err
    assert list(result.json["variants"]) == ["fsdp2", "undertow ddp", "undertow fsdp"]
    assert result.json["losses_agree"] is True
    assert result.json["variants"]["undertow fsdp"]["measured"]["communication_ns"] > 0
    assert "measured, rank1" in page.read_text()


@pytest.mark.parametrize("variants", ["", "undertow dpp", "fsdp2, ddp"])
def test_variants_that_there_are_not_are_told(undertow: Run, tmp_path: Path, variants: str) -> None:
    page = tmp_path / "page.html"
    result = undertow("train", "--variants", variants, "--html", page)
    assert result.code != 0
    assert "variant" in result.err
    assert not page.exists()


def results(last: float) -> dict[str, Any]:
    other = {"seconds": [0.1], "peak_nbytes": 2, "idle_nbytes": 1, "measured": {}}
    losses = {"ddp": [2.0, 1.0], "undertow ddp": [2.0, 1.0 + 1e-6], "undertow fsdp": [2.0, last]}
    return {name: {"losses": found, **other} for name, found in losses.items()}


@pytest.mark.parametrize("json", [False, True])
def test_losses_that_agree_are_told(
    undertow: Run, monkeypatch: pytest.MonkeyPatch, json: bool
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: results(1.0))
    found = undertow("train", *["--json"] * json)
    assert found.code == 0
    assert not found.err
    if json:
        assert found.json["losses_agree"] is True
    else:
        assert "agree, in each of 2 steps" in found.out


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("last", [1.01, float("nan"), float("inf")])
def test_losses_that_differ_end_the_command_with_a_sentence(
    undertow: Run, monkeypatch: pytest.MonkeyPatch, last: float, json: bool
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: results(last))
    found = undertow("train", *["--json"] * json)
    assert found.code == 1
    assert f"in step 2 'ddp' has 1.000000 and 'undertow fsdp' {last:.6f}" in found.err
    assert "agree, in" not in found.out
    if json:
        assert found.json["losses_agree"] is False
