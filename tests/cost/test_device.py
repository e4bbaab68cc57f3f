"""Devices: what ships, what a user's file can add or change, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.cost.device import find_device, load_devices
from undertow.errors import CostError
from undertow.program.model import OpClass

COMPLETE = """
[devices.toy]
title = "Toy"
backend = "nccl"
generation = "hopper"
units = 4
memory_bandwidth = 1e9
memory_nbytes = 1e9
launch_seconds = 0
kernel_seconds = 1e-6
[devices.toy.peak_flops]
float32 = 1e12
[devices.toy.efficiency]
matmul = 0.5
attention = 0.5
convolution = 0.5
pointwise = 0.5
reduction = 0.5
copy = 0.5
gather = 0.5
other = 0.5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(CostError) as caught:
        load_devices(write(tmp_path, text))
    return str(caught.value)


@pytest.mark.parametrize("name", list(load_devices()))
def test_every_shipped_device_has_all_classes_and_sane_figures(name: str) -> None:
    device = load_devices()[name]
    assert set(device.efficiency) == set(OpClass)
    assert all(0 < share <= 1 for share in device.efficiency.values())
    assert device.peak("bfloat16") >= device.peak("float32") >= device.peak("float64") > 0
    assert 1e10 < device.memory_bandwidth < 2e13
    assert device.compute_slowdown == device.communication_slowdown == 1.0


def test_float32_means_tf32_only_where_asked() -> None:
    h100 = load_devices()["h100"]
    assert h100.peak("float32") == 66.9e12
    assert h100.peak("float32", tf32=True) == 494.7e12
    assert load_devices()["cpu"].peak("float32", tf32=True) == load_devices()["cpu"].peak("float32")


def test_missing_dtype_names_those_that_exist() -> None:
    with pytest.raises(CostError, match=r"'a100' has no peak for 'float8_e4m3fn'.*bfloat16"):
        load_devices()["a100"].peak("float8_e4m3fn")


def test_unknown_device_suggests_the_nearest() -> None:
    with pytest.raises(CostError, match=r"did you mean 'h100'"):
        find_device("h10", load_devices())


def test_devices_can_be_hashed_and_compared() -> None:
    assert load_devices()["h100"] == load_devices()["h100"]
    assert len(set(load_devices().values())) == len(load_devices())


def test_file_adds_a_complete_device(tmp_path: Path) -> None:
    devices = load_devices(write(tmp_path, COMPLETE))
    assert devices["toy"].units == 4
    assert devices["toy"].share(OpClass.COPY) == 0.5
    assert "h100" in devices


def test_file_changes_some_figures_of_a_shipped_device(tmp_path: Path) -> None:
    text = "[devices.h100]\nmemory_bandwidth = 3e12\n[devices.h100.peak_flops]\nint8 = 1e15\n"
    h100 = load_devices(write(tmp_path, text))["h100"]
    assert h100.memory_bandwidth == 3e12
    assert h100.peak("int8") == 1e15
    assert h100.peak("bfloat16") == 989.4e12


def test_device_like_another_keeps_its_links_and_the_other_figures(tmp_path: Path) -> None:
    text = '[devices.h800]\nlike = "h100"\ntitle = "H800"\n'
    h800 = load_devices(write(tmp_path, text))["h800"]
    assert (h800.name, h800.title, h800.links, h800.units) == ("h800", "H800", "h100", 132)


def test_misspelt_key_is_refused_with_file_device_and_nearest_key(tmp_path: Path) -> None:
    message = refusal(
        tmp_path, COMPLETE.replace("[devices.toy.peak", "nvsl = true\n[devices.toy.peak")
    )
    assert "devices.toml" in message
    assert "'toy'" in message
    assert "did you mean 'nvls'" in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("units = 4\n", "", "'units' is missing"),
        ("units = 4\n", "unit = 4\n", "there is 'unit'"),
        ("units = 4", "units = 0", "'units' must be a whole number of at least 1"),
        ("units = 4", 'units = "four"', "'units' must be a whole number"),
        ("units = 4", "units = true", "'units' must be a whole number"),
        ("memory_bandwidth = 1e9", "memory_bandwidth = -1", "'memory_bandwidth' must be"),
        ("memory_bandwidth = 1e9", "memory_bandwidth = 0", "a number above 0"),
        ("memory_bandwidth = 1e9", "memory_bandwidth = inf", "'memory_bandwidth' must be"),
        ("copy = 0.5", "copy = 1.5", "at most 1"),
        ("copy = 0.5", "", "'copy' is missing"),
        ("copy = 0.5", "copy = 0.5\ncopi = 0.5", "unknown key 'copi'; did you mean 'copy'"),
        ("float32 = 1e12", "", "'peak_flops' is empty"),
        ('backend = "nccl"', 'backend = "ncl"', "did you mean 'nccl'"),
        ('generation = "hopper"', 'generation = "hoper"', "did you mean 'hopper'"),
        ("[devices.toy]", '[devices.toy]\nlike = "h10"', "did you mean 'h100'"),
        ("[devices.toy]", "[device.toy]", "did you mean 'devices'"),
        ("[devices.toy]", "[devices.toy", "is not valid TOML"),
    ],
)
def test_wrong_field_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in COMPLETE
    text = COMPLETE.replace(old, new, 1)
    if new.startswith("[device.toy]"):
        text = new + "\nunits = 1\n"
    assert expected in refusal(tmp_path, text)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot read"):
        load_devices(tmp_path / "none.toml")
