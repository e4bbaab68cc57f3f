"""Several calls at once, each in a process of its own kind: answers in order, one failure alone.

A worker is a fresh interpreter (spawned, so that no thread or lock of ours is copied into it) that
answers one call after the other. One that dies costs the call it was at, and is replaced. Ctrl-C
and every other way out end all workers at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from undertow.errors import UndertowError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """What a call gave, or the sentence of its error."""

    value: R | None
    error: str = ""


def cores() -> int:
    """How many processes can work at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    function: Callable[[T], R],
    arguments: Sequence[T],
    jobs: int | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> list[Outcome[R]]:
    """`function` of each argument, in their order; `done` hears how many there are so far.

    `function` is one of a module, and arguments and answers can be pickled. With one job, or one
    argument, all is done in this process.
    """
    jobs = min(jobs or cores(), len(arguments))
    if jobs <= 1:
        outcomes = []
        for count, argument in enumerate(arguments):
            outcomes.append(_attempt(function, argument))
            done(count + 1)
        return outcomes
    found: dict[int, Outcome[R]] = {}
    for index, outcome in _in_processes(function, arguments, jobs):
        found[index] = outcome
        done(len(found))
    return [found[index] for index in range(len(arguments))]


def _attempt(function: Callable[[T], R], argument: T) -> Outcome[R]:
    try:
        return Outcome(function(argument))
    except UndertowError as error:
        return Outcome(None, str(error))
    except Exception as error:  # noqa: BLE001 -- shown, and the other calls go on
        traceback.print_exc()
        return Outcome(None, f"unexpected {type(error).__name__}: {error}")


class _Worker:
    """One process and our end of the pipe to it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is the end of the pipe

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    """A worker's life: one call after the other until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    sys.stdout = sys.stderr  # the answer goes through the pipe, and stdout is not ours
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        pipe.send(_attempt(function, argument))


def _in_processes(
    function: Callable[[T], R], arguments: Sequence[T], jobs: int
) -> Iterator[tuple[int, Outcome[R]]]:
    waiting = iter(range(len(arguments)))
    busy: dict[Connection, tuple[_Worker, int]] = {}

    def give(worker: _Worker) -> None:
        index = next(waiting, None)
        if index is None:
            worker.end()
            return
        busy[worker.pipe] = worker, index
        with suppress(OSError):  # a worker that is gone is found out when its answer is read
            worker.pipe.send(arguments[index])

    try:
        for _ in range(jobs):
            give(_Worker(function))
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker, index = busy.pop(pipe)
                try:
                    outcome = pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    code = worker.process.exitcode
                    how = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
                    outcome = Outcome(
                        None, f"the process that worked on it ended with {how} (out of memory?)"
                    )
                    worker.end()
                    worker = _Worker(function)
                yield index, outcome
                give(worker)
    finally:
        for worker, _ in busy.values():
            worker.end()
