"""Threads that send and receive: how Linux runs them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from undertow.runtime.yielding import let_compute_go_first

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="the system has no threads for batch work"
)


@contextmanager
def waiting(name: str) -> Iterator[int]:
    """A thread of this name, known to the system by it."""
    ends, begun = threading.Event(), threading.Event()

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        begun.set()
        ends.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert thread.native_id is not None
    try:
        yield thread.native_id
    finally:
        ends.set()
        thread.join()


def test_gloos_threads_become_batch_work_and_others_stay():
    with waiting("gloo_tcp_loop") as loop, waiting("pt_gloo_runloop") as runs, waiting("x") as own:
        assert let_compute_go_first() >= 2
        assert os.sched_getscheduler(loop) == os.SCHED_BATCH
        assert os.sched_getscheduler(runs) == os.SCHED_BATCH
        assert os.sched_getscheduler(own) == os.SCHED_OTHER
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        assert let_compute_go_first() == 0  # they are already


def test_what_somebody_else_has_chosen_stays():
    with waiting("gloo_tcp_loop") as loop:
        os.sched_setscheduler(loop, os.SCHED_IDLE, os.sched_param(0))
        let_compute_go_first()
        assert os.sched_getscheduler(loop) == os.SCHED_IDLE
