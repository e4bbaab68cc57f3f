"""Plain traffic over a link, for what it costs on its own: `compute+traffic` of bench.slow_link.

Two processes with one connection, which send each other as many bytes as they are told, both ways
at once, with nothing but sockets. What compute takes meanwhile is what no way of training that
sends as much can be faster than: the system does its part of the sending on the same cores.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from undertow.cli.training import Place, Team

_CHUNK = 1 << 20
_PATIENCE = 30.0  # seconds for the two to find each other


class BesideTraffic:
    """A team that trains while as many bytes go over the link as training would send; to be used
    as a Team, and as a context."""

    def __init__(self, team: Team, places: Sequence[Place], address: str, nbytes: int) -> None:
        self._team, self._nbytes = team, nbytes  # of one step, each way
        self._places, self._address = places, address
        self._senders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> BesideTraffic:
        for rank, place in enumerate(self._places):
            command = [*place.before, sys.executable, "-m", "bench.traffic", str(rank)]
            self._senders.append(
                subprocess.Popen(
                    [*command, self._address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **place.environment},
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._senders:
            sender.kill()
            sender.wait()

    def warm(self) -> list[dict[str, Any]]:
        return self.steps(1)

    def steps(self, count: int) -> list[dict[str, Any]]:
        for sender in self._senders:
            assert sender.stdin is not None
            sender.stdin.write(f"{count * self._nbytes}\n")
            sender.stdin.flush()
        answers = self._team.steps(count)
        for sender in self._senders:
            assert sender.stdout is not None
            if not sender.stdout.readline():
                raise RuntimeError("a process that sends plain traffic has ended")
        return answers


def _connected(rank: int, host: str, port: int) -> socket.socket:
    if rank == 0:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.settimeout(_PATIENCE)
            listening.listen()
            made, _ = listening.accept()
            return made
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((host, port), _PATIENCE)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _send(connection: socket.socket, nbytes: int) -> None:
    chunk = bytes(_CHUNK)
    for begin in range(0, nbytes, _CHUNK):
        connection.sendall(chunk[: nbytes - begin])


def main() -> None:
    host, _, port = sys.argv[2].rpartition(":")
    connection = _connected(int(sys.argv[1]), host, int(port))
    connection.settimeout(None)
    place = memoryview(bytearray(_CHUNK))
    for line in sys.stdin:
        left = int(line)
        sending = threading.Thread(target=_send, args=(connection, left))
        sending.start()
        while left:
            received = connection.recv_into(place, min(left, _CHUNK))
            if not received:
                sys.exit("error: the other end has closed the connection")
            left -= received
        sending.join()
        print("done", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
