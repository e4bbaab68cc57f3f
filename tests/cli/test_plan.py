"""`undertow plan`: every model and parallelism by name, files of the user, errors, interruption."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run, spawn
from undertow.cli.step import parse_mesh
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


def test_every_collective_is_there_before_and_after(undertow: Run) -> None:
    data = undertow("plan", "llama3-debug", "--cluster", "2xh100x8", "--json").json
    rows, planned = data["each_collective"], data["planned"]
    assert len(rows) == data["collectives"]
    for side, figures in (("before", data), ("after", planned)):
        for what in ("communication", "exposed"):
            total = sum(row[side][f"{what}_seconds"] for row in rows)
            assert total == pytest.approx(figures[f"{what}_seconds"])
    exposed = {row["name"]: row for row in planned["exposed"]}
    for row in rows:
        names = [run["name"] for run in row["runs"]]
        assert names
        if row["after"]["exposed_seconds"] > 0:
            assert row["limited_by"] in {exposed[name]["reason"] for name in names}
            assert row["sentence"] in {exposed[name]["sentence"] for name in names}
    merged = [row for row in rows if row["runs"][0]["collectives"] > 1]
    assert len(merged) == planned["merged_collectives"] > 0
    assert any(row["start_moved_up"] > 0 for row in rows)


def test_every_collective_is_shown_where_that_is_asked_for(undertow: Run) -> None:
    plain = undertow("plan", "llama3-debug", "--cluster", "2xh100x8")
    shown = undertow("plan", "llama3-debug", "--cluster", "2xh100x8", "--collectives")
    assert "runs as" not in plain.out
    for piece in ("runs as", "all_gather_into_tensor_38", "bucket of", "alone", " up", "in place"):
        assert piece in shown.out


def test_without_a_plan_no_collective_is_compared(undertow: Run) -> None:
    data = undertow("plan", "llama3-debug", "--captured-only", "--json").json
    assert data["each_collective"] == []
    for other in (("--captured-only",), ("--pareto",), ("--sweep", "batch=1,2")):
        result = undertow("plan", "llama3-debug", "--collectives", *other)
        assert result.code == 2
        assert "--collectives" in result.err


def test_collectives_that_the_memory_limit_holds_back_say_so(undertow: Run) -> None:
    data = undertow("plan", "llama3-debug", "--memory", "1KiB", "--json").json["planned"]
    found = [row for row in data["exposed"] if row["reason"] == "memory"]
    assert found
    for row in found:
        assert row["missing_bytes"] >= data["peak_bytes"] - 1024
        assert "the limit of 1 KiB" in row["sentence"]


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
    entry.write_bytes(gzip.compress(b"{}"))  # well formed, and of the wrong form
    assert not undertow("plan", "llama3-debug", "--json").json["cached"]
    assert "of the wrong form" in caplog.text


def test_nodes_of_another_size_use_the_same_captured_step(undertow: Run) -> None:
    undertow("plan", "llama3-debug", "--cluster", "2xh100x8", "--json")
    assert undertow("plan", "llama3-debug", "--cluster", "4xa100x4", "--json").json["cached"]


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
        (["gpt2-debug", "--dtype", "bfloat61"], "did you mean 'bfloat16'"),
        (["gpt2-debug", "--dtype", "tf32"], "unknown dtype 'tf32'"),
        (["gpt2-debug", "--device-memory", "0"], "must be more than nothing"),
        (["gpt2-debug", "--mesh", "dp=8,dp=8"], "two sizes for dimension 'dp'"),
        (["gpt2-debug", "--mesh", "dp"], "not the size of a dimension"),
        (["gpt2-debug", "--mesh", "dp=4"], "4 ranks and the cluster has 8"),
        (["gpt2-debug", "--device-memory", "much"], "is not a size"),
        (["gpt2-debug", "--batch", "0"], "at least 1"),
        (["gpt2-debug", "--memory", "lots"], "is not a memory limit"),
        (["gpt2-debug", "--plan", "absent.json"], "cannot read absent.json"),
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


def test_what_a_script_prints_is_not_among_the_json(undertow: Run, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('hello')\n" + MLP)
    result = undertow("plan", f"{tmp_path / 'loud.py'}:build", "--json")
    assert result.json["tasks"] > 0
    assert "hello" in result.err


def test_a_script_may_import_what_lies_beside_it(undertow: Run, tmp_path: Path) -> None:
    (tmp_path / "sizes_of_mine.py").write_text("WIDTH = 64\n")
    (tmp_path / "mine.py").write_text("from sizes_of_mine import WIDTH\n" + MLP)
    assert undertow("plan", f"{tmp_path / 'mine.py'}:build", "--json").code == 0


def test_a_script_that_needs_a_length_says_so(undertow: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MLP.replace("batch=1", "batch, seq"))
    result = undertow("plan", f"{tmp_path / 'mine.py'}:build")
    assert (result.code, "give --seq" in result.err) == (2, True)
    assert undertow("plan", f"{tmp_path / 'mine.py'}:build", "--seq", "8", "--json").code == 0


@pytest.mark.parametrize("error", ["raise ValueError('mine')", "import sys; sys.exit(3)"])
def test_a_script_that_fails_in_backward_or_leaves_is_told_apart(
    undertow: Run, tmp_path: Path, error: str
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Odd(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        f"    @staticmethod\n    def backward(ctx, grad):\n        {error}\n\n"
        "def build():\n    return nn.Linear(4, 4), torch.ones(2, 4), lambda y: Odd.apply(y).sum()\n"
    )
    result = undertow("plan", f"{script}:build")
    assert result.code == 2
    assert f'File "{script}"' in result.err
    assert "undertow/planner" not in result.err


def test_a_script_that_fails_shows_its_own_traceback(undertow: Run, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("def helper():\n    return 1 / 0\n\ndef build():\n    return helper()\n")
    result = undertow("plan", f"{script}:build")
    assert result.code == 2
    assert f'File "{script}", line 2, in helper' in result.err
    assert "ZeroDivisionError" in result.err
    assert "undertow/planner" not in result.err


def test_captured_and_planned_are_shown_side_by_side(undertow: Run) -> None:
    result = undertow("plan", "llama3-debug", "--cluster", "2xh100x8")
    assert "captured" in result.out
    assert "planned" in result.out
    data = undertow("plan", "llama3-debug", "--cluster", "2xh100x8", "--json").json
    assert data["planned"]["step_seconds"] < data["step_seconds"]
    assert data["planned"]["peak_bytes"] <= data["peak_bytes"]
    assert data["planned"]["step_seconds"] >= data["planned"]["bound_seconds"]


def test_a_saved_plan_is_applied_again_and_refused_for_another_step(
    undertow: Run, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    first = undertow("plan", "llama3-debug", "--save-plan", saved, "--json").json["planned"]
    again = undertow("plan", "llama3-debug", "--plan", saved, "--json").json["planned"]
    assert again == first
    refused = undertow("plan", "gpt2-debug", "--plan", saved)
    assert refused.code == 2
    assert "made for another step" in refused.err


def test_options_that_contradict_a_plan_are_refused(undertow: Run, tmp_path: Path) -> None:
    saved, again = tmp_path / "plan.json", tmp_path / "again.json"
    step = ("plan", "llama3-debug", "--seq", 128)
    undertow(*step, "--memory", "+50%", "--save-plan", saved)
    for option in (["--memory", "1MiB"], ["--bucket", "1MiB"], ["--no-merge"], ["--manual", "x"]):
        refused = undertow(*step, "--plan", saved, *option, "--save-plan", again)
        assert (refused.code, again.exists()) == (2, False)
        assert option[0] in refused.err
        assert "leave out" in refused.err
    refused = undertow(*step, "--plan", saved, "--memory", "1MiB")
    assert "--memory contradicts the plan, which was made under +50%" in refused.err
    assert undertow(*step, "--plan", saved, "--memory", "+50%").code == 0
    assert undertow(*step, "--plan", saved, "--save-plan", again).code == 0
    assert json.loads(again.read_text()) == json.loads(saved.read_text())
    refused = undertow(*step, "--pareto", "--memory", "1MiB")
    assert (refused.code, "--memory is for one step" in refused.err) == (2, True)


def test_a_plan_that_is_applied_on_a_faster_cluster_is_not_below_its_bound(
    undertow: Run, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    step = ("plan", "llama3-debug", "--json", "--cluster")
    saving = ("2xl40sx8", "--set", "bandwidth=0.1", "--save-plan", saved)
    slow = undertow(*step, *saving).json["planned"]
    fast = undertow(*step, "2xb200x8", "--plan", saved).json["planned"]
    assert fast["step_seconds"] < slow["step_seconds"]
    assert fast["bound_seconds"] <= fast["step_seconds"]
    assert fast["digest"] == slow["digest"]


def test_the_memory_limit_is_kept(undertow: Run) -> None:
    def planned(*options: str) -> dict:
        return undertow("plan", "llama3-debug", *options, "--json").json["planned"]

    free, tight = planned("--memory", "none"), planned()
    assert free["step_seconds"] <= tight["step_seconds"]
    assert planned("--memory", "+100%")["step_seconds"] <= tight["step_seconds"]
    assert planned("--no-merge")["buckets"] == 0


def test_a_memory_limit_that_cannot_be_met_is_told(undertow: Run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    step = ("plan", "llama3-debug", "--seq", 128)
    result = undertow(*step, "--memory", "1KiB", "--save-plan", saved)
    assert result.code == 1
    sentence = r"note: the memory limit of 1 KiB is not met: the captured order takes .*iB at its"
    assert re.search(sentence, " ".join(result.out.split()))
    for options in (("--memory", "1KiB"), ("--plan", saved)):
        result = undertow(*step, *options, "--json")
        planned = result.json["planned"]
        assert (result.code, planned["limit_bytes"], len(planned["shortfalls"])) == (1, 1024, 1)
        assert planned["peak_bytes"] <= result.json["peak_bytes"]
    result = undertow(*step, "--json")
    assert (result.code, result.json["planned"]["shortfalls"]) == (0, [])
    assert result.json["planned"]["limit_bytes"] == result.json["peak_bytes"]
    swept = undertow(*step, "--sweep", "memory=1KiB,none")
    assert swept.code == 0
    assert "note: memory=1KiB: the memory limit of 1 KiB is not met" in swept.out
    checked = undertow("check", *step[1:], "--memory", "1KiB", "--max-step", "1s")
    assert "note: the memory limit of 1 KiB is not met" in checked.out


def test_the_page_shows_the_captured_and_the_planned_step(undertow: Run, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    result = undertow("plan", "llama3-debug", "--cluster", "2xh100x8", "--html", html)
    assert f"wrote {html}" in result.out
    page = html.read_text()
    assert "<h1>llama3-debug on 2xh100x8</h1>" in page
    assert page.count('<div class="track"') == 2
    assert "model flops utilisation" in page
    undertow("plan", "llama3-debug", "--captured-only", "--html", html)
    assert html.read_text().count('<div class="track"') == 1
    result = undertow("plan", "llama3-debug", "--html", tmp_path / "no" / "page.html")
    assert (result.code, "cannot write" in result.err) == (2, True)


def test_the_captured_order_alone(undertow: Run, tmp_path: Path) -> None:
    assert undertow("plan", "gpt2-debug", "--captured-only", "--json").json["planned"] is None
    result = undertow("plan", "gpt2-debug", "--captured-only", "--save-plan", tmp_path / "p")
    assert (result.code, "makes no plan" in result.err) == (2, True)


def test_parse_mesh_refuses_nonsense() -> None:
    with pytest.raises(UndertowError, match="'tp=x' is not the size"):
        parse_mesh("dp=2,tp=x")


@pytest.mark.slow
def test_interrupting_leaves_nothing_half_written(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    command = [sys.executable, "-m", "undertow.cli.main", "plan", "llama3-8b", "--trace", trace]
    environment = {**os.environ, "UNDERTOW_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    libraries = Path(f"/proc/{process.pid}/maps")
    until = time.monotonic() + 60
    while "libtorch" not in libraries.read_text() and time.monotonic() < until:
        time.sleep(0.1)  # Python itself, which dies of a signal, may take seconds to begin
    time.sleep(2)
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


def test_a_manual_plan_replaces_the_solver(undertow: Run) -> None:
    result = undertow("plan", "llama3-debug", "--manual", "layers.*", "--memory", "none")
    assert (result.code, result.err) == (0, "")
    assert "54 collectives are merged into 6." in result.out
    refused = undertow("plan", "llama3-debug", "--manual", "blocks.*")
    assert refused.code == 2
    assert "unknown module path 'blocks.*'" in refused.err
