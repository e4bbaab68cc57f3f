"""The roofline: what share of the peak kernels of a size reach, and that time never falls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.cost.device import Device, load_devices
from undertow.cost.roofline import estimate_work
from undertow.errors import CostError
from undertow.program.model import OpClass, Work

GIB = 1 << 30


def matmul(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16") -> Work:
    read, written = 2 * batch * (m * k + k * n), 2 * batch * m * n
    flops = 2 * batch * m * n * k
    return Work("aten.bmm", OpClass.MATMUL, flops, read, written, dtype, (batch, m, n, k))


def pointwise(nbytes: int, flops: int = 0, dtype: str = "bfloat16") -> Work:
    return Work("aten.gelu", OpClass.POINTWISE, flops, nbytes // 2, nbytes - nbytes // 2, dtype)


def test_a_large_matmul_reaches_what_cublas_reaches(h100: Device) -> None:
    estimate = estimate_work(h100, matmul(8192, 8192, 8192))
    assert 0.60 < estimate.efficiency < 0.80
    assert estimate.limit == "flops"


def test_a_tiny_matmul_is_far_below_the_peak(h100: Device) -> None:
    work = matmul(128, 128, 128)
    estimate = estimate_work(h100, work)
    assert work.flops / 989.4e12 / (estimate.ns / 1e9) < 0.01
    assert estimate.limit == "latency"


def test_one_tile_more_than_a_full_wave_costs_another_wave(h100: Device) -> None:
    full = estimate_work(h100, matmul(256 * 132, 128, 8192)).flops_ns
    one_more = estimate_work(h100, matmul(256 * 132 + 1, 128, 8192)).flops_ns
    assert one_more > 1.05 * full


def test_short_k_runs_at_a_lower_rate(h100: Device) -> None:
    def share(k: int) -> float:
        work = matmul(8192, 8192, k)
        return work.flops / estimate_work(h100, work).flops_ns

    assert share(64) < 0.5 * share(8192)


def test_long_k_with_a_small_output_is_split_over_the_units(h100: Device) -> None:
    work = matmul(128, 128, 1 << 16)
    without_split = work.flops / (4 / 132 * 0.72 * 989.4e12) * 1e9
    assert estimate_work(h100, work).flops_ns < without_split / 2


def test_a_decoding_matmul_is_bound_by_memory(h100: Device) -> None:
    assert estimate_work(h100, matmul(1, 8192, 8192)).limit == "memory"


def test_a_matmul_without_a_shape_nears_the_same_rate_when_large(h100: Device) -> None:
    work = matmul(8192, 8192, 8192)
    shapeless = estimate_work(h100, replace(work, shape=()))
    assert abs(shapeless.ns / estimate_work(h100, work).ns - 1) < 0.1
    small = replace(matmul(256, 256, 256), shape=())
    assert estimate_work(h100, small).efficiency < 0.02


def test_elementwise_work_of_a_gigabyte_reaches_most_of_the_bandwidth(h100: Device) -> None:
    estimate = estimate_work(h100, pointwise(GIB))
    assert 0.85 < estimate.efficiency < 0.95
    assert estimate.limit == "memory"


def test_elementwise_work_of_a_megabyte_does_not(h100: Device) -> None:
    estimate = estimate_work(h100, pointwise(1 << 20))
    assert estimate.efficiency < 0.2
    assert estimate.limit == "latency"


def test_given_bytes_replace_those_of_the_description(h100: Device) -> None:
    half = estimate_work(h100, pointwise(GIB), GIB // 2)
    assert half == estimate_work(h100, pointwise(GIB // 2))


def test_a_fused_task_has_no_fixed_time(h100: Device) -> None:
    assert estimate_work(h100, pointwise(GIB), 0, fused=True).ns == 0
    alone, fused = (estimate_work(h100, pointwise(1 << 20), fused=f).ns for f in (False, True))
    assert alone - fused == 3000  # kernel_seconds and half of it


def test_a_matmul_in_a_dtype_the_device_lacks_is_refused() -> None:
    with pytest.raises(CostError, match=r"a100.*float8_e4m3fn.*add"):
        estimate_work(load_devices()["a100"], matmul(512, 512, 512, dtype="float8_e4m3fn"))


def test_arithmetic_on_integers_needs_no_peak_of_its_own(h100: Device) -> None:
    ints = estimate_work(h100, pointwise(GIB, flops=GIB // 16, dtype="int64"))
    assert ints == estimate_work(h100, pointwise(GIB, flops=GIB // 16, dtype="float32"))


def test_negative_counts_are_refused(h100: Device) -> None:
    with pytest.raises(CostError, match=r"aten\.gelu has negative"):
        estimate_work(h100, pointwise(GIB), -1)


dims = st.integers(1, 20_000)


@given(batch=st.integers(1, 64), m=dims, n=dims, k=dims, grow=st.integers(1, 3000))
def test_time_never_falls_when_a_dimension_grows(
    batch: int, m: int, n: int, k: int, grow: int
) -> None:
    device = load_devices()["h100"]
    before = estimate_work(device, matmul(m, n, k, batch)).ns
    for grown in (
        matmul(m + grow, n, k, batch),
        matmul(m, n + grow, k, batch),
        matmul(m, n, k + grow, batch),
        matmul(m, n, k, batch + grow),
    ):
        assert estimate_work(device, grown).ns >= before


@given(
    op_class=st.sampled_from(list(OpClass)),
    flops=st.integers(0, 10**15),
    nbytes=st.integers(0, 10**12),
    more=st.integers(0, 10**12),
    device=st.sampled_from(sorted(load_devices())),
)
def test_time_never_falls_when_flops_or_bytes_grow(
    op_class: OpClass, flops: int, nbytes: int, more: int, device: str
) -> None:
    work = Work("op", op_class, flops, nbytes, 0, "float32")
    known = load_devices()[device]
    before = estimate_work(known, work)
    assert estimate_work(known, replace(work, flops=flops + more)).ns >= before.ns
    assert estimate_work(known, replace(work, nbytes_read=nbytes + more)).ns >= before.ns
    assert 0.0 <= before.efficiency <= 1.0
