"""Processes that have PyTorch loaded when they start, for the ranks of tests.

Loading it takes four seconds of a core, which is more than most cases take. Each process is the
fork of a server that has loaded it and has done nothing else. There are two servers, and the ranks
of a job take turns between them: strings hash differently in the two, as in the processes of a real
job, so that ranks that decide by the order of a set still disagree.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest import mock

_servers = [forkserver.ForkServer() for _ in range(2)]  # type: ignore[attr-defined]
for _server in _servers:
    _server.set_forkserver_preload(["tests.loaded"])
_starting = threading.Lock()


def start_rank(rank: int, target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that runs `target(*args)` in the environment that this one has now."""
    call = (dict(os.environ), target, args)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=call, daemon=True)
    with _starting:
        for server in _servers:
            server.ensure_running()  # all of them, so that they load at the same time
        # multiprocessing knows one server only
        connect = _servers[rank % len(_servers)].connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            process.start()
    return process


def _run(
    environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
