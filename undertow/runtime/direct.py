"""Gathers and exchanges on gloo from rank to rank, each part sent from where it is to where it
belongs.

Gloo's own all-gather copies what it is given together, hands it round, and copies all of it out
again, on cores that compute needs. Its all-to-all sends before it says that it can receive, on the
one connection that two ranks have: that message waits behind the data, and for large parts the two
take turns, in twice the time. Here the parts of others are received in their place in the result,
and asked for before anything is sent. Results are the same, ranks issue the same collectives in the
same order, and a rank that is gone ends the others' waits as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from undertow.capture import torch_api
from undertow.cost.gloo import DIRECT_RANKS

_ops = torch_api.collectives
STAND_IN = "stand_in"
"""What a node's notes call the function that runs in its place."""
_TAG = 0x75746F77  # of all our messages: those between two ranks arrive as they were issued


class Exchanges:
    """The messages of one gather or exchange as one work, whose end a thread sees: these works do
    not tell whether they are done until somebody has waited, and nobody may wait twice."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._done = threading.Event()
        self._error: Exception | None = None
        _watch(self)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for all messages; the watching thread alone does this."""
        try:
            for work in self._works:
                work.wait()
        except Exception as error:  # noqa: BLE001  told to who waits
            self._error = error
        finally:
            self._done.set()


_issued: SimpleQueue[Exchanges] = SimpleQueue()
_watchers: list[threading.Thread] = []


def _watch(exchanges: Exchanges) -> None:
    """Have a thread wait for exchanges in the order in which they are issued, and so end."""
    _issued.put(exchanges)
    if not _watchers or not _watchers[0].is_alive():  # so after a fork
        _watchers[:] = [threading.Thread(target=_finish_issued, name="exchanges", daemon=True)]
        _watchers[0].start()


def _finish_issued() -> None:
    while True:
        _issued.get().finish()


def begin_gather(x: Tensor, size: int, group: Any) -> tuple[Tensor, list[Any]]:
    """Start gathering `x`; the result, and the works to wait for before it is read."""
    return _begin([x.contiguous()] * size, [x.shape[0]] * size, group)


def begin_exchange(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: Any
) -> tuple[Tensor, list[Any]]:
    """Start sending so many rows of `x` to each rank, and receiving so many from each; the result,
    and the works to wait for before it is read."""
    return _begin(torch.split(x.contiguous(), list(sent)), received, group)


def _begin(
    parts: Sequence[Tensor], received: Sequence[int], group: Any
) -> tuple[Tensor, list[Any]]:
    """Ask every other rank for its rows, then send each its part; those without bytes are left
    out, on both sides."""
    rank, size = group.rank(), len(parts)
    out = parts[rank].new_empty((sum(received), *parts[rank].shape[1:]))
    places = torch.split(out, list(received))
    others = [(rank + step) % size for step in range(1, size)]
    works = [group.recv([_bytes(places[k])], k, _TAG) for k in others if places[k].numel()]
    works += [group.send([_bytes(parts[k])], k, _TAG) for k in others if parts[k].numel()]
    places[rank].copy_(parts[rank])  # while they are on their way
    return out, works


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)  # gloo does not send all dtypes


def all_gather_into_tensor(x: Tensor, size: int, name: str) -> Tensor:
    """What the functional collective of that name gives; `wait_tensor` waits for it."""
    return _registered(*begin_gather(x, size, torch_api.process_group(name)))


def all_to_all_single(x: Tensor, received: list[int], sent: list[int], name: str) -> Tensor:
    """What the functional collective of that name gives; `wait_tensor` waits for it."""
    return _registered(*begin_exchange(x, received, sent, torch_api.process_group(name)))


def _registered(out: Tensor, works: Sequence[Any]) -> Tensor:
    for work in works:
        torch_api.register_work(out, work)
    return out


def all_gather_into_tensor_coalesced(xs: Sequence[Tensor], size: int, name: str) -> list[Tensor]:
    """One after another: each can be waited for on its own."""
    return [all_gather_into_tensor(x, size, name) for x in xs]


_STAND_INS: dict[Any, Callable[..., Any]] = {
    _ops.all_gather_into_tensor.default: all_gather_into_tensor,
    _ops.all_gather_into_tensor_coalesced.default: all_gather_into_tensor_coalesced,
    _ops.all_to_all_single.default: all_to_all_single,
}


def stand_in(node: fx.Node) -> Callable[..., Any] | None:
    """The function that is called in place of a collective's operator, where there is one."""
    if STAND_IN in node.meta:
        noted: Callable[..., Any] = node.meta[STAND_IN]
        return noted
    function = _STAND_INS.get(node.target)
    if function is None or not isinstance(node.args[-1], str):
        return None
    return function if is_direct(node.args[-1]) else None


def is_direct(group: str) -> bool:
    """Whether gathers and exchanges of a group go from rank to rank: few ranks, on gloo."""
    few = 1 < len(torch_api.ranks_of_group(group)) <= DIRECT_RANKS
    return few and torch_api.backend_of_group(group) == "gloo"
