"""Shared by the cost tests: a cluster, a device, and short ways to write a Program."""

from __future__ import annotations

import pytest

from undertow.cost.cluster import Cluster
from undertow.cost.device import Device


@pytest.fixture(scope="session")
def h100() -> Device:
    return Cluster.parse("h100").device


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    return Cluster.parse("2xh100x8")
