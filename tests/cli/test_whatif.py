"""`plan --sweep` and `--pareto`, `explain`, `diff` and `check`, on a small model captured once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import undertow as undertow_package
from tests.cli.conftest import Run
from undertow.cli.step import StepOptions
from undertow.errors import UndertowError
from undertow.schedule.limits import Limits

MODEL = ("llama3-debug", "--seq", "64", "--cluster", "2xh100x8")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(cache))


@pytest.fixture
def saved(undertow: Run, tmp_path: Path) -> Path:
    """A plan of the small model."""
    path = tmp_path / "plan.json"
    assert undertow("plan", *MODEL, "--save-plan", path, "--json").code == 0
    return path


def sweep(undertow: Run, *axes: str, model: tuple[str, ...] = MODEL) -> list[dict[str, Any]]:
    texts = [part for axis in axes for part in ("--sweep", axis)]
    return undertow("plan", *model, *texts, "--jobs", "1", "--json").json["rows"]


# -- sweeps ---------------------------------------------------------------------------------------


def test_every_combination_has_a_row_as_if_planned_alone(undertow: Run) -> None:
    rows = sweep(undertow, "bandwidth=10,48", "bucket=auto,none")
    assert [tuple(row["settings"].values()) for row in rows] == [
        ("10", "auto"), ("10", "none"), ("48", "auto"), ("48", "none"),
    ]  # fmt: skip
    alone = undertow("plan", *MODEL, "--set", "bandwidth=10", "--no-merge", "--json").json
    assert rows[1]["step_seconds"] == alone["planned"]["step_seconds"]
    assert rows[1]["captured_seconds"] == alone["step_seconds"]
    assert rows[1]["buckets"] == 0
    assert rows[0]["captured_seconds"] >= rows[2]["captured_seconds"]


def test_a_figure_of_the_cluster_shares_one_capture_and_batches_do_not(
    undertow: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "fresh"))
    rows = sweep(undertow, "latency=1,2,3")
    assert len(rows) == 3
    assert len(list((tmp_path / "fresh" / "steps").iterdir())) == 1
    sweep(undertow, "batch=1,2")
    assert len(list((tmp_path / "fresh" / "steps").iterdir())) == 2


def test_a_row_that_fails_does_not_lose_the_others(undertow: Run) -> None:
    rows = sweep(undertow, "parallel=fsdp,pp", "memory=+0%,none")
    assert ["error" in row for row in rows] == [False, False, True, True]
    assert "pp" in rows[2]["error"]
    shown = undertow("plan", *MODEL, "--sweep", "parallel=fsdp,pp", "--jobs", "1")
    assert shown.code == 0
    assert "failed: parallel=pp:" in shown.out
    assert undertow("plan", *MODEL, "--sweep", "parallel=pp").code == 2


def test_a_sweep_that_changes_nothing_says_why(undertow: Run) -> None:
    result = undertow("plan", "llama3-debug", "--seq", "64", "--sweep", "bandwidth=10", "--json")
    assert "this cluster has one node" in result.json["notes"][0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--sweep", "bandwidht=1"], "did you mean 'bandwidth'"),
        (["--sweep", "tokens=1"], "what can be swept: batch, seq"),
        (["--sweep", "nodes"], "has no values"),
        (["--sweep", "nodes=1,1"], "a value twice"),
        (["--sweep", "nodes=1,x"], "'x' is not a whole number"),
        (["--sweep", "batch=0"], "not a whole number"),
        (["--sweep", "bucket=big"], "is not a size"),
        (["--sweep", "nodes=1", "--sweep", "nodes=2"], "given twice"),
        (["--sweep", "nodes=1", "--pareto"], "--pareto is for one step"),
        (["--sweep", "nodes=1", "--trace", "t.json"], "--trace is for one step"),
        (["--pareto", "--captured-only"], "--captured-only is for one step"),
        (["--pareto", "--points", "1"], "at least 4"),
        (["--set", "nodes"], "is not a figure and its value"),
        (["--no-merge", "--bucket", "1MiB"], "leave out --bucket"),
    ],
)
def test_mistakes_get_a_sentence(undertow: Run, options: list[str], sentence: str) -> None:
    result = undertow("plan", *MODEL, *options)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err
    assert result.err.count("\n") == 1


def test_plots_and_the_best_step_are_on_the_page(undertow: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = undertow("plan", *MODEL, "--sweep", "bandwidth=10,48", "--jobs", "1", "--html", page)
    assert f"wrote {page}" in result.out
    text = page.read_text()
    assert "planned step over bandwidth" in text
    assert "2xh100x8, bandwidth=" in text


@pytest.mark.slow
def test_two_processes_give_what_one_gives_and_ctrl_c_ends_them(
    undertow: Run, tmp_path: Path
) -> None:
    axes = ["--sweep", "bandwidth=10,48", "--sweep", "batch=1,2"]
    one, two = (
        undertow("plan", *MODEL, *axes, "--jobs", jobs, "--json").json["rows"] for jobs in "12"
    )
    assert one == two
    command = [sys.executable, "-m", "undertow.cli.main", "plan", "llama3-8b", *axes, "--jobs", "2"]
    environment = {**os.environ, "UNDERTOW_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(children := _children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    assert len(children) >= 2
    deadline = time.monotonic() + 10
    while (left := [child for child in children if _is_alive(child)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not left


def _is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- time against memory --------------------------------------------------------------------------


def test_pareto_plans_are_saved_and_can_be_applied(undertow: Run, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    data = undertow(
        "plan", *MODEL, "--pareto", "--points", "5", "--jobs", "1", "--save-plan", folder, "--json"
    ).json
    points = data["points"]
    peaks, times = ([point[key] for point in points] for key in ("peak_bytes", "step_seconds"))
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert len(list(folder.iterdir())) == len(points)
    last = sorted(folder.iterdir())[-1]
    again = undertow("plan", *MODEL, "--plan", last, "--json").json["planned"]
    assert again["step_seconds"] == times[-1]
    assert json.loads(last.read_text())["origin"]["memory"] in (
        "none",
        str(points[-1]["limit_bytes"]),
    )


def test_the_curve_is_on_the_page(undertow: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--pareto", "--points", "4", "--jobs", "1", "--html", page)
    result = undertow("plan", *MODEL, *options)
    assert "solved limits are not beaten" in result.out
    assert "Step time against peak memory" in page.read_text()


def test_plans_need_a_folder(undertow: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = undertow("plan", *MODEL, "--pareto", "--save-plan", tmp_path / "file")
    assert (result.code, "this is a folder" in result.err) == (2, True)


# -- what a plan was made from --------------------------------------------------------------------


def test_a_plan_remembers_what_it_was_made_from(saved: Path) -> None:
    origin = json.loads(saved.read_text())["origin"]
    assert origin == {"model": "llama3-debug", "seq": 64, "cluster": "2xh100x8"}
    assert StepOptions.from_origin(origin) == StepOptions("llama3-debug", "2xh100x8", seq=64)


def test_a_plan_made_in_python_remembers_it_too() -> None:
    def origin(**options: Any) -> StepOptions:
        step = undertow_package.plan("llama3-debug", "2xh100x8", seq=64, **options)
        assert step.solution is not None
        return StepOptions.from_origin(step.solution.plan.origin)

    assert origin() == StepOptions("llama3-debug", "2xh100x8", seq=64)
    given = origin(
        mesh={"dp": 16}, merge=False, limits=Limits(peak_ratio=1.05), reshard_after_forward=False
    )
    assert given == StepOptions(
        "llama3-debug", "2xh100x8", seq=64, mesh="dp=16", no_merge=True, memory="+5%",
        keep_gathered=True,
    )  # fmt: skip


def test_an_origin_of_files_and_figures_comes_back_as_it_was() -> None:
    options = StepOptions("m", set=["nodes=2"], table=[Path("a.csv")], devices_file=Path("d.toml"))
    origin = json.loads(json.dumps(options.to_origin()))
    assert StepOptions.from_origin(origin) == options


@pytest.mark.parametrize("origin", [{}, {"cluster": "h100"}])
def test_an_origin_that_says_nothing_is_refused(origin: dict[str, str]) -> None:
    with pytest.raises(UndertowError, match="does not say which step"):
        StepOptions.from_origin(origin)


@pytest.mark.parametrize(
    "more", [{"colour": "red"}, {"batch": "2"}, {"batch": True}, {"set": "nodes=2"}, {"seq": 1.5}]
)
def test_an_origin_of_another_kind_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UndertowError, match="does not understand; make the plan anew"):
        StepOptions.from_origin({"model": "m"} | more)


# -- explain --------------------------------------------------------------------------------------


def test_a_task_of_a_plan_is_explained_from_the_plan_alone(undertow: Run, saved: Path) -> None:
    name = "all_gather_into_tensor_3"
    data = undertow("explain", saved, name, "--jobs", "1", "--json").json
    assert data["task"] == name
    assert {remedy["kind"] for remedy in data["remedies"]} >= {"memory", "bandwidth", "bucket"}
    assert all("gain_seconds" in remedy for remedy in data["remedies"])
    short = undertow("explain", saved, name, "--only-why")
    assert short.code == 0
    assert "It is number" in short.out
    assert "what would help" not in short.out


def test_a_plan_can_be_explained_with_its_program(
    undertow: Run, saved: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.json"
    undertow("plan", *MODEL, "--save", program, "--json")
    arguments = ("explain", saved, "all_gather_into_tensor", "--only-why", "--json")
    own = undertow(*arguments).json
    given = undertow(*arguments, "--program", program, "--cluster", "2xh100x8").json
    assert given == own


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["all_gather_into_tensr"], "did you mean 'all_gather_into_tensor'"),
        (["layers.0.attention.wq.weight"], "is a module with 2 collectives; name one of them"),
        (["mm", "--cluster", "h100"], "--cluster needs --program"),
        (["mm", "--program", "p.json"], "--program needs --cluster"),
    ],
)
def test_explain_says_what_is_wrong(
    undertow: Run, saved: Path, arguments: list[str], sentence: str
) -> None:
    result = undertow("explain", saved, *arguments)
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err


# -- diff -----------------------------------------------------------------------------------------


def test_two_plans_are_compared(undertow: Run, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    undertow("plan", *MODEL, "--no-merge", "--save-plan", other, "--json")
    data = undertow("diff", saved, other, "--json").json
    assert data["same_step"]
    assert data["unmerged"]
    assert data["b"]["buckets"] == 0
    assert data["step_seconds"] > 0
    shown = undertow("diff", saved, other)
    assert "no longer merged" in shown.out
    assert "They are the same." in undertow("diff", saved, saved).out


def test_two_programs_are_compared(undertow: Run, program_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(program_file.read_text().replace("90000", "80000"))
    data = undertow("diff", program_file, other, "--json").json
    assert {change["name"] for change in data["changed"]} == {"layer1", "layer2"}
    assert data["step_seconds"] < 0


def test_files_that_are_neither_are_refused(undertow: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    result = undertow("diff", other, other)
    assert (result.code, "neither a Plan" in result.err) == (2, True)
    assert undertow("diff", tmp_path / "absent.json", other).code == 2


# -- check ----------------------------------------------------------------------------------------


def test_limits_that_are_kept_exit_with_0_and_others_with_1(undertow: Run, saved: Path) -> None:
    kept = undertow("check", "--max-exposed", "90%", "--max-peak", "60GiB", "--baseline", saved)
    assert (kept.code, kept.err) == (0, "")
    broken = undertow("check", *MODEL, "--max-exposed", "0.1%", "--max-step", "1s", "--json")
    assert broken.code == 1
    assert not broken.json["passed"]
    assert [check["passed"] for check in broken.json["checks"]] == [True, False]
    shown = undertow("check", "--plan", saved, "--max-step", "1us")
    assert (shown.code, "failed: the step takes" in shown.out) == (1, True)


def test_a_step_that_got_worse_than_its_baseline_fails(undertow: Run, saved: Path) -> None:
    result = undertow("check", *MODEL, "--no-merge", "--baseline", saved)
    assert result.code == 1
    assert "more than the baseline's" in result.out
    other = undertow("check", *MODEL, "--keep-gathered", "--baseline", saved, "--tolerance", "900%")
    assert (other.code, "made for another step" in other.out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to check"),
        (["--max-exposed", "many"], "neither a share"),
        (["--max-peak", "1GiB"], "name a MODEL to plan"),
        (["--batch", "2", "--baseline", "SAVED"], "options of the step need a MODEL"),
        (["--baseline", "absent.json"], "cannot read absent.json"),
    ],
)
def test_check_says_what_is_wrong(
    undertow: Run, saved: Path, arguments: list[str], sentence: str
) -> None:
    result = undertow("check", *[str(saved) if a == "SAVED" else a for a in arguments])
    assert (result.code, result.out) == (2, "")
    assert sentence in result.err
