"""Real ranks on this machine: processes in one gloo group that run cases sent to them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.processes import start_rank

TIMEOUT = 120  # seconds for one case


class Ranks:
    """A running group; `run(case, argument)` gives the result of `case(argument)` on each rank."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def run(self, case: Callable[[Any], Any], argument: Any, timeout: float = TIMEOUT) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((case, argument))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer in {timeout} s")
            ok, result = pipe.recv()
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{result}")
            results.append(result)
        return results


@contextmanager
def gloo_ranks(world: int) -> Iterator[Ranks]:
    """Start `world` processes in one group, and end them on the way out."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world):
                ours, theirs = multiprocessing.Pipe()
                store = str(Path(folder) / "store")
                processes.append(start_rank(rank, _serve, rank, world, store, theirs))
                pipes.append(ours)
                theirs.close()
            yield Ranks(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join(5)


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world))
    while True:
        try:
            case, argument = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            pipe.send((True, case(argument)))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
