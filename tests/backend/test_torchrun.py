"""torchrun launches a script that knows the backend by name alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("user_script.py")


def test_the_backend_has_a_name_by_entry_point() -> None:
    (point,) = entry_points(group="torch_dynamo_backends", name="undertow")
    assert point.value == "undertow.backend:undertow"


@pytest.mark.slow
def test_torchrun_trains_with_the_backend_by_name(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "UNDERTOW_CACHE": str(tmp_path / "cache"),
    }
    # A rendezvous at port 0 takes a free one.
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        str(SCRIPT), str(tmp_path),
    ]  # fmt: skip
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        try:
            said, _ = job.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    assert job.returncode == 0, said
    for rank in range(2):
        found = json.loads((tmp_path / f"losses{rank}.json").read_text())
        assert found["world"] == 2
        assert found["compiled"] == pytest.approx(found["alone"], rel=2e-6)
        assert found["compiled"][0] > found["compiled"][-1]
    modules = [path.read_text() for path in tmp_path.glob("*.rank0.py")]
    assert any("c10d.all_reduce" in module for module in modules)  # it is in our graph
