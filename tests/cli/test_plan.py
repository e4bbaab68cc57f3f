"""`undertow plan`: every model and parallelism by name, files of the user, errors, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run, spawn
from undertow.cli.plan import parse_mesh
from undertow.errors import UndertowError
from undertow.program import load_program

MLP = """
import torch
from torch import nn

def build(batch=1):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, torch.ones(batch, 64), lambda y: y.square().mean()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def mlp(tmp_path: Path) -> str:
    (tmp_path / "mlp.py").write_text(MLP)
    return f"{tmp_path / 'mlp.py'}:build"


def test_a_step_is_summarised(undertow: Run) -> None:
    result = undertow("plan", "llama3-debug", "--cluster", "2xh100x8")
    assert (result.code, result.err) == (0, "")
    for piece in (
        "lower bound", "model flops utilisation", "all_gather", "reduce_scatter", "dp 16", "why",
    ):  # fmt: skip
        assert piece in result.out


def test_json_has_what_scripts_need(undertow: Run) -> None:
    data = undertow("plan", "llama3-debug", "--cluster", "h100x8", "--json").json
    names = ("step", "compute", "communication", "exposed", "bound")
    assert all(data[f"{name}_seconds"] > 0 for name in names)
    assert data["step_seconds"] >= data["bound_seconds"]
    assert data["peak_bytes"] > 0
    assert data["tasks"] > data["collectives"] > 0
    assert sum(row["count"] for row in data["communication"]) == data["collectives"]


@pytest.mark.parametrize(
    ("model", "parallel", "kinds"),
    [
        ("llama3-debug", "ddp", {"all_reduce"}),
        ("llama3-debug", "hsdp", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("llama3-debug", "tp", {"all_reduce", "all_gather"}),  # the head's logits are gathered
        ("llama3-debug", "fsdp+tp", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("gpt2-debug", "fsdp", {"all_gather", "reduce_scatter"}),
        ("vit-debug", "fsdp", {"all_gather", "reduce_scatter"}),
        ("deepseek-moe-debug", "ep", {"all_to_all", "all_reduce"}),
    ],
)
def test_models_and_parallelisms_plan(
    undertow: Run, model: str, parallel: str, kinds: set[str]
) -> None:
    cluster = "h100x4" if parallel == "tp" else "2xh100x4"
    data = undertow("plan", model, "--cluster", cluster, "--parallel", parallel, "--json").json
    assert {row["kind"] for row in data["communication"]} == kinds


def test_a_file_of_the_users_is_planned_and_never_cached(undertow: Run, mlp: str) -> None:
    for _ in range(2):
        data = undertow("plan", mlp, "--cluster", "h100x8", "--json").json
        assert not data["cached"]
        assert data["parameters"] == 64 * 256 * 2 + 256 + 64


def test_a_second_plan_for_another_cluster_comes_from_the_cache(undertow: Run) -> None:
    first = undertow("plan", "llama3-debug", "--cluster", "h100x8", "--json").json
    second = undertow("plan", "llama3-debug", "--cluster", "a100x8", "--json").json
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["tasks"] == second["tasks"]
    assert second["step_seconds"] > first["step_seconds"]


def test_a_cached_plan_needs_no_torch(undertow: Run) -> None:
    assert undertow("plan", "llama3-debug", "--json").code == 0
    code = (
        "import sys; from undertow.cli.main import exit_code; "
        "exit_code(['plan', 'llama3-debug', '--json']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_broken_cache_entry_is_made_again(undertow: Run, tmp_path: Path, caplog) -> None:
    undertow("plan", "llama3-debug", "--json")
    (entry,) = (tmp_path / "cache" / "steps").iterdir()
    entry.write_bytes(entry.read_bytes()[:100])
    data = undertow("plan", "llama3-debug", "--json").json
    assert not data["cached"]
    assert "cannot be read" in caplog.text


def test_trace_and_program_are_written(undertow: Run, tmp_path: Path) -> None:
    trace, saved = tmp_path / "t.json", tmp_path / "p.json"
    step = undertow("plan", "gpt2-debug", "--trace", trace, "--save", saved, "--json").json
    assert json.loads(trace.read_text())["traceEvents"]
    assert len(load_program(saved)) == step["tasks"]
    again = undertow("simulate", saved, "--json").json
    assert again["step_seconds"] == step["step_seconds"]


def gathered(step: dict) -> int:
    return sum(row["bytes"] for row in step["communication"] if row["kind"] == "all_gather")


def test_options_change_the_step(undertow: Run) -> None:
    def plan(*options: str) -> dict:
        return undertow("plan", "llama3-debug", "--seq", "128", *options, "--json").json

    plain = plan()
    assert plan("--checkpoint")["peak_bytes"] < plain["peak_bytes"]
    assert plan("--keep-gathered")["collectives"] < plain["collectives"]
    assert plan("--optimizer", "adamw")["tasks"] > plain["tasks"]
    assert plan("--batch", "2")["tokens"] == 2 * plain["tokens"]
    single = plan("--dtype", "float32")
    assert gathered(single) == 2 * gathered(plain)
    assert not plan("--device-memory", "1KiB")["fits"]
    assert plan("--parallel", "fsdp+tp", "--mesh", "dp=4,tp=2")["settings"]["mesh"] == {
        "dp": 4, "tp": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama3-8"], "did you mean 'llama3-8b'"),
        (["gpt2-debug", "--cluster", "h10x8"], "did you mean 'h100'"),
        (["gpt2-debug", "--parallel", "fdsp"], "did you mean 'fsdp'"),
        (["gpt2-debug", "--optimizer", "adam"], "did you mean 'adamw'"),
        (["gpt2-debug", "--dtype", "bfloat8"], "bfloat8"),
        (["gpt2-debug", "--mesh", "dp"], "not the size of a dimension"),
        (["gpt2-debug", "--mesh", "dp=4"], "4 ranks and the cluster has 8"),
        (["gpt2-debug", "--device-memory", "much"], "is not a size"),
        (["gpt2-debug", "--batch", "0"], "at least 1"),
        (["absent.py:build"], "there is no file absent.py"),
        (["gpt2-debug", "--trace", "/nowhere/t.json"], "cannot write /nowhere/t.json"),
    ],
)
def test_mistakes_get_a_sentence(undertow: Run, arguments: list[str], sentence: str) -> None:
    result = undertow("plan", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert sentence in result.err
    assert result.err.count("\n") == 1


def test_a_script_that_fails_shows_its_own_traceback(undertow: Run, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("def helper():\n    return 1 / 0\n\ndef build():\n    return helper()\n")
    result = undertow("plan", f"{script}:build")
    assert result.code == 2
    assert f'File "{script}", line 2, in helper' in result.err
    assert "ZeroDivisionError" in result.err
    assert "planner.py" not in result.err


def test_parse_mesh_refuses_nonsense() -> None:
    with pytest.raises(UndertowError, match="'tp=x' is not the size"):
        parse_mesh("dp=2,tp=x")


@pytest.mark.slow
def test_interrupting_leaves_nothing_half_written(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    command = [sys.executable, "-m", "undertow.cli.main", "plan", "llama3-8b", "--trace", trace]
    environment = {**os.environ, "UNDERTOW_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_read_only_cache_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a folder cannot be made below a file, not even by root
    result = spawn(
        "plan", "gpt2-debug", "--json", env={**os.environ, "UNDERTOW_CACHE": str(tmp_path / "file")}
    )
    assert result.returncode == 0
    assert "nothing is kept in the cache" in result.stderr
