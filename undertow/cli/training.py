"""Starts the workers of small training runs on this machine, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Any

from undertow.cli.train_worker import Setup
from undertow.errors import UndertowError

_TERMINATED = 128 + signal.SIGTERM  # the exit code, as shells give it


class TrainingError(UndertowError):
    """A worker that failed or did not answer in time; the message has what it said last."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: a command to put before its own, and variables of its environment."""

    before: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Within it SIGTERM is an exit like others, on which contexts are left, with 143; not where
    another thread than the first asks, which may not have signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Team:
    """The ranks of one variant. Use as a context: all processes are gone on the way out, at once if
    it is an error or an exit. A worker ends with the thread that started it, too (Linux)."""

    def __init__(
        self, setups: Sequence[Setup], places: Sequence[Place], timeout: float = 300.0
    ) -> None:
        self._timeout = timeout
        self._workers: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._setups, self._places = setups, places

    def __enter__(self) -> Team:
        try:
            for setup, place in zip(self._setups, self._places, strict=True):
                self._start(setup, place)
            self._answers()
        except BaseException:
            self._kill()
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Run so many steps on every rank; what each reports."""
        for worker in self._workers:
            _send(worker, {"steps": count})
        return self._answers()

    def warm(self, count: int = 3, most: int = 60) -> list[dict[str, Any]]:
        """Steps until every graph is compiled, measured and scheduled as it stays: `count` at
        least. What each rank reports of the last few."""
        answers = self.steps(count)
        for _ in range(count, most, 2):
            if not any(answer["unsettled"] for answer in answers):
                return answers
            answers = self.steps(2)
        raise TrainingError(f"{self._setups[0].variant!r} still measures after {most} steps")

    def _kill(self) -> None:
        """End workers that may be waiting for each other."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        for worker in self._workers:
            if worker.stdin is not None and not worker.stdin.closed:
                with contextlib.suppress(OSError):  # it may be gone already
                    worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for log in self._logs:
            log.close()
        self._workers, self._logs = [], []

    def _start(self, setup: Setup, place: Place) -> None:
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by close()
        self._logs.append(log)
        worker = subprocess.Popen(
            [*place.before, sys.executable, "-m", "undertow.cli.train_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **place.environment},
        )
        self._workers.append(worker)
        _send(worker, asdict(setup))

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(rank) for rank in range(len(self._workers))]

    def _answer(self, rank: int) -> dict[str, Any]:
        out = self._workers[rank].stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], self._timeout)
        line = out.readline() if ready else ""
        answer: dict[str, Any] = json.loads(line) if line else {}
        if answer and "error" not in answer:
            return answer
        said = answer.get("error") or self._last_words(rank)
        why = "failed" if ready else f"did not answer in {self._timeout:g} s"
        raise TrainingError(f"rank {rank} of {self._setups[rank].variant!r} {why}: {said}")

    def _last_words(self, rank: int) -> str:
        self._logs[rank].seek(0)
        return self._logs[rank].read()[-2000:].strip() or "it said nothing"


def _send(worker: subprocess.Popen[str], data: Any) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(json.dumps(data) + "\n")
        worker.stdin.flush()
    except BrokenPipeError:
        pass  # its answer says why


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
