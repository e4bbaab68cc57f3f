"""`undertow show` and `undertow calibrate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.program import load_program, save_json, simulate
from undertow.program.serialize import timeline_to_json

PROGRAM = Path(__file__).parents[2] / "undertow" / "cli" / "data" / "fsdp_step.json"


def test_the_module_of_a_step_is_python_with_starts_waits_and_frees(undertow: Run) -> None:
    result = undertow("show", "llama3-debug", "--cluster", "h100x2", "--parallel", "fsdp")
    assert result.code == 0, result.err
    compile(result.out, "module", "exec")
    assert "# start on dp" in result.out
    assert "c10d.wait_tensor.default(" in result.out
    assert "\n    del " in result.out


def test_a_cluster_file_is_fitted_to_a_measured_timeline(undertow: Run, tmp_path: Path) -> None:
    measured = simulate(price(load_program(PROGRAM), Cluster.parse("8xa100x8")).program)
    save_json(tmp_path / "t.measured.json", timeline_to_json(measured))
    out = tmp_path / "mine.toml"
    result = undertow(
        "calibrate", tmp_path / "t.measured.json", "--cluster", "8xh100x8", "--out", out, "--json"
    )
    assert result.code == 0, result.err
    after = json.loads(result.out)["after"]
    assert all(0.8 < ratio < 1.25 for ratio in after.values()), after
    assert Cluster.parse(str(out)).world_size == 64


def test_calibrate_refuses_what_is_no_timeline(undertow: Run, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    result = undertow("calibrate", tmp_path / "x.json", "--cluster", "h100")
    assert result.code == 2
    assert "error:" in result.err
