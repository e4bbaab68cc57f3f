"""What the job looks like, on machines with and without an accelerator."""

from __future__ import annotations

import pytest
import torch

from undertow.notices import counts
from undertow.runtime import job

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def with_accelerator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if this machine had one accelerator that calls itself `name`."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


def test_a_host_alone_is_a_cpu_of_as_many_cores_as_threads() -> None:
    cluster = job.guess_cluster(CPU)
    assert cluster.device.backend == "gloo"
    assert cluster.device.units == torch.get_num_threads()


def test_an_accelerator_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with_accelerator(monkeypatch, "NVIDIA A100-SXM4-80GB")
    assert "A100" in job.guess_cluster(GPU).device.title
    assert job.device_name() == "NVIDIA A100-SXM4-80GB"


def test_what_computes_on_the_host_is_no_job_of_the_accelerator_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_accelerator(monkeypatch, "NVIDIA A100-SXM4-80GB")
    assert job.guess_cluster(CPU).device.backend == "gloo"


def test_an_unknown_accelerator_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_accelerator(monkeypatch, "Graphics 9000")
    monkeypatch.setitem(counts, "unknown device", 0)
    assert "H100" in job.guess_cluster(GPU).device.title
    assert counts["unknown device"] == 1


def test_a_graph_computes_where_its_first_tensor_off_the_host_is() -> None:
    assert job.device_of([torch.ones(1), 3, torch.ones(1, device="meta")]).type == "meta"
    assert job.device_of([torch.ones(1), "text"]) == CPU
    assert job.device_of([]) == CPU
