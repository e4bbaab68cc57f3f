"""Calibration finds the machine that a Timeline was made on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from undertow.cost.calibrate import calibrate, to_toml
from undertow.cost.cluster import Cluster
from undertow.cost.price import price
from undertow.errors import CostError
from undertow.program import Program, Timeline, load_program, parse_program, simulate

PROGRAM = Path(__file__).parents[2] / "undertow" / "cli" / "data" / "fsdp_step.json"


def run_on(cluster: Cluster) -> tuple[Program, Timeline]:
    program = price(load_program(PROGRAM), cluster, regions=False).program
    return program, simulate(program)


def slower(cluster: Cluster) -> Cluster:
    """A machine with half the matmul rate, a third of the pointwise one, and a slow link."""
    device = cluster.device
    shares = {kind: share / 2.5 for kind, share in device.efficiency.items()}
    assert cluster.inter is not None
    return replace(
        cluster,
        device=replace(device, efficiency=shares),
        inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth / 5),
    )


def test_a_slower_machine_is_found_from_its_timeline() -> None:
    nominal = Cluster.parse("8xh100x8")
    real = slower(nominal)
    _, measured = run_on(real)
    fit = calibrate(nominal, [measured])
    assert min(fit.before.values()) < 0.6
    for name, ratio in fit.after.items():
        assert ratio == pytest.approx(1.0, abs=0.05), name
    _, predicted = run_on(fit.cluster)
    assert predicted.total_ns == pytest.approx(measured.total_ns, rel=0.05)


def test_a_machine_faster_than_its_peaks_gets_higher_peaks() -> None:
    nominal = Cluster.parse("8xh100x8")
    device = nominal.device
    fast = replace(
        device,
        memory_bandwidth=4 * device.memory_bandwidth,
        peak_flops={dtype: 4 * flops for dtype, flops in device.peak_flops.items()},
    )
    _, measured = run_on(replace(nominal, device=fast))
    fitted = calibrate(nominal, [measured]).cluster.device
    assert fitted.peak("bfloat16") > 2 * device.peak("bfloat16")
    assert max(fitted.efficiency.values()) <= 1.0


def test_the_written_file_is_the_fitted_cluster(tmp_path: Path) -> None:
    fitted = calibrate(Cluster.parse("8xh100x8"), [run_on(slower(Cluster.parse("8xh100x8")))[1]])
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(fitted.cluster, "mine"))
    read = Cluster.parse(str(path))
    assert run_on(read)[1].total_ns == pytest.approx(run_on(fitted.cluster)[1].total_ns, rel=1e-3)
    assert read.world_size == 64


def test_timelines_without_descriptions_are_refused() -> None:
    program = parse_program("input a 1MiB\nbuffer b 1MiB\nx compute 5us reads a writes b\n")
    with pytest.raises(CostError, match="no task with a description"):
        calibrate(Cluster.parse("h100"), [simulate(program)])
