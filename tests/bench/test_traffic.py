"""Plain traffic beside a team that trains."""

from __future__ import annotations

from typing import Any

import pytest

from bench.traffic import BesideTraffic
from undertow.cli.training import Place, free_port


class Steps:
    """A team that says how many steps it was asked for."""

    def steps(self, count: int) -> list[dict[str, Any]]:
        return [{"seconds": [0.1] * count}]


def test_bytes_go_both_ways_while_the_team_works_and_processes_are_gone_after_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    with BesideTraffic(Steps(), [Place(), Place()], address, 3_000_000) as traffic:  # type: ignore[arg-type]
        assert traffic.warm() == [{"seconds": [0.1]}]
        assert traffic.steps(4) == [{"seconds": [0.1] * 4}]
        senders = traffic._senders
        assert [sender.poll() for sender in senders] == [None, None]
    assert all(sender.poll() is not None for sender in senders)


def test_a_sender_that_is_gone_is_an_error_and_no_hang() -> None:
    address = f"127.0.0.1:{free_port()}"
    with BesideTraffic(Steps(), [Place(), Place()], address, 1_000) as traffic:  # type: ignore[arg-type]
        traffic.warm()
        traffic._senders[1].kill()
        traffic._senders[1].wait()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            traffic.steps(1)
