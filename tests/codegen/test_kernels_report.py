"""What became of a graph: fallbacks with reasons, and why nodes are apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from undertow.codegen.kernels_report import KernelReport, report_on
from undertow.errors import UndertowError
from undertow.loops.decompose import decompositions


def report(function: Any, *args: torch.Tensor) -> KernelReport:
    gm = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*args)
    found = report_on(gm)
    again = KernelReport.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    return found


def function(x, w):  # type: ignore[no-untyped-def]
    y = x.exp().sin()
    z = y @ w
    return [z.cos(), y.sort().values, x.view(-1), torch.randn(3).tan()]


@pytest.fixture(scope="module")
def made() -> KernelReport:
    return report(function, torch.randn(4, 6), torch.randn(6, 5))


def test_what_remains_is_counted_with_a_reason(made: KernelReport) -> None:
    found = {item.operator: (item.count, item.reason) for item in made.fallbacks}
    assert found["aten.mm.default"] == (1, "a matrix product, for which ATen's is used")
    assert found["aten.sort.default"] == (1, "it has no loop form")
    assert len(found) == 3


def test_nodes_of_one_kernel_are_told_so(made: KernelReport) -> None:
    assert "are in one kernel" in made.why("exp", "sin")


def test_a_call_of_aten_is_told_with_its_reason(made: KernelReport) -> None:
    assert made.why("sin", "mm") == (
        "mm is a call of ATen: a matrix product, for which ATen's is used"
    )
    assert "in no kernel: it is a view" in made.why("view", "sin")


def test_nothing_in_common_and_what_runs_between(made: KernelReport) -> None:
    assert "touch no memory in common" in made.why("sin", "tan")


def test_a_refusal_has_its_reason() -> None:
    def apart(x):  # type: ignore[no-untyped-def]
        y = x.exp()
        return [y, y.flip(0) * 2]

    found = report(apart, torch.randn(4, 6))
    assert found.refusals
    told = found.why("exp", "flip")
    assert "flip did not join exp" in told or "in one kernel" in told


def test_an_unknown_name_is_an_error_with_the_nearest(made: KernelReport) -> None:
    with pytest.raises(UndertowError, match="unknown node 'snn'; did you mean 'sin'"):
        made.why("exp", "snn")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "not a report"),
        ({"format": "undertow kernels", "version": 9}, "version 9"),
        ({"format": "undertow kernels", "version": 1, "steps": [{}]}, "spoilt"),
    ],
)
def test_a_spoilt_report_is_refused_with_a_sentence(data: Any, said: str) -> None:
    with pytest.raises(UndertowError, match=said):
        KernelReport.from_json(data)
