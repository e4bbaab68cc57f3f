"""Ranks agree through the job's store before anything is decided or run, never by a collective.

Every rank writes what it has under a key of its own; the first rank reads them all and writes the
verdict, which all obey. So each value crosses the store once however many ranks there are, every
rank returns or raises the same, and a rank that is missing or differs costs the others a sentence
and at most twice the timeout instead of a hang.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Protocol, cast

from undertow.errors import AgreementError

Number = int | float | None
"""What a rank measured; None where it has nothing to say."""
TIMEOUT_SECONDS = 300.0
_SLACK_SECONDS = 2.0  # for the verdict of a first rank that waited as long as it may
_PARTING_SECONDS = 5.0  # that the first rank, whose process may hold the store, stays for others
_MOST_SHOWN = 8  # ranks in a sentence


class Store(Protocol):
    """What we use of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Choice(StrEnum):
    """Whose numbers are used."""

    FIRST = "first"  # those of the first rank
    MEDIAN = "median"  # of each number the median over the ranks, the lower of two
    LEAST = "least"  # of each number the least
    SLOWEST = "slowest"  # those of the rank whose numbers are the largest together


@dataclass
class Agreement:
    """Agrees again and again, under keys of its own: what `schedule_graph(agree=...)` takes.

    Ranks must make and call theirs in the same sequence. `name` tells several apart in one store.

        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        agree = Agreement(store, rank, range(dist.get_world_size()))
        gm, plan = undertow.schedule_graph(gm, estimate=measured, agree=agree)
        agree.check(plan.digest, plan.order)
    """

    store: Store
    rank: int
    ranks: Sequence[int]
    name: str = "agreement"
    choice: Choice | str = Choice.FIRST
    timeout: float = TIMEOUT_SECONDS
    _used: int = field(default=0, init=False, repr=False)

    def __call__(self, numbers: Sequence[Number]) -> list[Number]:
        """The same numbers on every rank (`agree_on_numbers`)."""
        where = self.store, self.rank, self.ranks, self._next_key()
        return agree_on_numbers(*where, numbers, choice=self.choice, timeout=self.timeout)

    def check(self, digest: str, detail: Sequence[str] = ()) -> None:
        """AgreementError if `digest` is not the same on every rank (`check_same`)."""
        where = self.store, self.rank, self.ranks, self._next_key()
        check_same(*where, digest, detail, self.timeout)

    def _next_key(self) -> str:
        self._used += 1
        return f"{self.name}/{self._used}"


def agree_on_numbers(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    key: str,
    numbers: Sequence[Number],
    *,
    choice: Choice | str = Choice.FIRST,
    timeout: float = TIMEOUT_SECONDS,
) -> list[Number]:
    """The same numbers on every one of `ranks`, made of what each of them brings.

    All must call this with the same `key`, which these ranks must not have used before, and
    with as many numbers; AgreementError on every rank if one does not, or does not come within
    `timeout` seconds.

        seconds = agree_on_numbers(store, rank, range(world), "estimates/0", seconds)
    """
    choice = Choice(choice)
    _check_numbers(rank, numbers)

    def decide(brought: dict[int, Any]) -> Any:
        most = _held_by_most({r: len(values) for r, values in brought.items()}, ranks[0])
        others = [r for r, values in brought.items() if len(values) != most]
        if others:
            raise AgreementError(
                f"{_ranks(others)} brought {len(brought[others[0]])} numbers to {key!r}, the "
                f"others {most}: the ranks do not run the same step"
            )
        if choice is Choice.FIRST:
            return brought[ranks[0]]
        if choice is Choice.SLOWEST:
            totals = {r: sum(n for n in brought[r] if n is not None) for r in ranks}
            return brought[max(ranks, key=lambda r: (totals[r], -r))]
        middle = choice is Choice.MEDIAN
        return [_chosen(column, middle) for column in zip(*brought.values(), strict=True)]

    return cast(
        list[Number], _decided(store, rank, ranks, key, list(numbers), decide, timeout=timeout)
    )


def check_same(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    key: str,
    digest: str,
    detail: Sequence[str] = (),
    timeout: float = TIMEOUT_SECONDS,
    *,
    basis: str = "",
    offer: Any = None,
) -> Any:
    """Return if `digest` is the same on all `ranks`; else AgreementError on each of them.

    With a `basis` that is the same on all of them, digests may differ: then all get what the first
    rank offers instead, to follow it (and None where nothing differs).

    The error names the ranks that differ from what most have (from the first rank where there is no
    majority) and the first line in which their `detail` differs, or the ranks that did not come
    within `timeout` seconds. Details cross the store only if digests differ.

        check_same(store, rank, range(world), "plan/0", plan.digest, sequence_of_collectives)
    """

    def decide(brought: dict[int, Any]) -> Any:
        digests = {r: value[0] for r, value in brought.items()}
        most = _held_by_most(digests, ranks[0])
        same = next(r for r, value in digests.items() if value == most)
        others = [r for r, value in digests.items() if value != most]
        can_follow = bool(basis) and all(value[1] == basis for value in brought.values())
        return [same, others, offer if others and can_follow else None]

    brought = [digest, basis]
    same, others, offered = _decided(store, rank, ranks, key, brought, decide, timeout=timeout)
    if not others or offered is not None:
        return offered
    differ = "differs" if len(others) == 1 else "differ"
    try:
        difference = _difference(store, rank, ranks, (same, others[0]), key, detail, timeout)
        _part(store, rank, ranks, key)
    except RuntimeError as error:
        difference = f"in what cannot be told, because the job's store is gone ({error})"
    raise AgreementError(f"{_ranks(others)} {differ} from rank {same} in {key!r}: {difference}")


def _difference(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    shown: tuple[int, int],
    key: str,
    detail: Sequence[str],
    timeout: float,
) -> str:
    """The first difference between the two ranks that are shown, which bring their details."""
    if rank in shown:
        store.set(_key(ranks, key, "detail", rank), json.dumps(list(detail)))
    keys = [_key(ranks, key, "detail", r) for r in shown]
    if not _comes(store, keys, timeout):
        return "they left before they could say in what"
    expected, found = (json.loads(store.get(k)) for k in keys)
    return _first_difference(shown, expected, found)


def _decided(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    key: str,
    value: Any,
    decide: Callable[[dict[int, Any]], Any],
    *,
    timeout: float,
) -> Any:
    """Bring `value`; what the first rank makes of all that was brought, or the error it met."""
    if rank not in ranks:
        raise AgreementError(f"rank {rank} is not one of the ranks that agree on {key!r}")
    first = ranks[0]
    own, verdict = _key(ranks, key, "rank", rank), _key(ranks, key, "verdict")
    try:
        if store.check([own]):
            raise AgreementError(
                f"rank {rank} has already brought something to {key!r}; give every agreement a key "
                "of its own"
            )
        store.set(own, json.dumps(value))
        if rank == first:
            store.set(verdict, json.dumps(_verdict(store, ranks, key, decide, timeout)))
        else:
            _await_first(store, ranks, key, timeout)
        ok, outcome = json.loads(store.get(verdict))
        if not ok:
            _part(store, rank, ranks, key)
    except RuntimeError as error:  # the store itself: its host is gone, or does not answer
        raise AgreementError(
            f"rank {rank} cannot use the job's store for {key!r}: {error}"
        ) from error
    if not ok:
        raise AgreementError(outcome)
    return outcome


def _verdict(
    store: Store,
    ranks: Sequence[int],
    key: str,
    decide: Callable[[dict[int, Any]], Any],
    timeout: float,
) -> tuple[bool, Any]:
    keys = {r: _key(ranks, key, "rank", r) for r in ranks}
    if not _comes(store, list(keys.values()), timeout):
        return False, _missing(store, ranks, key, timeout)
    try:
        return True, decide({r: json.loads(store.get(k)) for r, k in keys.items()})
    except AgreementError as error:
        return False, str(error)


def _await_first(store: Store, ranks: Sequence[int], key: str, timeout: float) -> None:
    """Wait until the verdict is there: the first rank may itself wait before it gives it."""
    came = _comes(store, [_key(ranks, key, "rank", ranks[0])], timeout)
    if came and _comes(store, [_key(ranks, key, "verdict")], timeout + _SLACK_SECONDS):
        return
    raise AgreementError(_missing(store, ranks, key, timeout))


def _part(store: Store, rank: int, ranks: Sequence[int], key: str) -> None:
    """Before an error ends the first rank: let the others read why, if they are there."""
    store.set(_key(ranks, key, "left", rank), "")
    if rank == ranks[0]:
        here = [r for r in ranks if store.check([_key(ranks, key, "rank", r)])]
        _comes(store, [_key(ranks, key, "left", r) for r in here], _PARTING_SECONDS)


def _comes(store: Store, keys: list[str], timeout: float) -> bool:
    """Whether all `keys` are in the store within the time; nobody waits for what is there."""
    if store.check(keys):
        return True
    end = time.monotonic() + timeout
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        if time.monotonic() < end - timeout / 2:
            raise  # not the time: the store is gone
        return store.check(keys)
    return True


def _missing(store: Store, ranks: Sequence[int], key: str, timeout: float) -> str:
    absent = [r for r in ranks if not store.check([_key(ranks, key, "rank", r)])]
    if not absent:
        return f"rank {ranks[0]} did not say within {timeout:g} s what was agreed on {key!r}"
    return (
        f"{_ranks(absent)} did not come to {key!r} within {timeout:g} s: "
        f"{'it has' if len(absent) == 1 else 'they have'} failed, or run other steps than the rest"
    )


def _first_difference(shown: tuple[int, int], expected: list[str], found: list[str]) -> str:
    for at, (ours, theirs) in enumerate(zip_longest(expected, found), start=1):
        if ours != theirs:
            said = ["nothing more" if line is None else repr(line) for line in (ours, theirs)]
            return (
                f"the first difference is at {at}, where rank {shown[0]} has {said[0]} and "
                f"rank {shown[1]} {said[1]}"
            )
    return "their digests are not the same, although all that they list is"


def _check_numbers(rank: int, numbers: Sequence[Number]) -> None:
    for at, number in enumerate(numbers):
        if number is not None and not math.isfinite(number):
            raise AgreementError(f"rank {rank} measured {number} at place {at}; that is no number")


def _held_by_most(brought: dict[int, Any], first: int) -> Any:
    """The value that most have; where several are held by as many, the first rank's if it is among
    them, else the one that comes first."""
    counts: dict[Any, int] = {}
    for value in [brought[first], *brought.values()]:
        counts[value] = counts.get(value, 0) + 1
    counts[brought[first]] -= 1  # it was counted twice to come first
    return max(counts, key=counts.__getitem__)


def _chosen(column: Sequence[Number], middle: bool) -> Number:
    """The median or the least, of the ranks that have a number; of two in the middle the lower, so
    that it is one that was measured."""
    known = sorted(number for number in column if number is not None)
    return known[(len(known) - 1) // 2 if middle else 0] if known else None


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _key(ranks: Sequence[int], *parts: object) -> str:
    """Where something is in the store. Who agrees is a part of it: groups that have no rank in
    common agree at the same time, each for itself, on what they call by the same name."""
    return "/".join(map(str, ("undertow", _who(tuple(ranks)), *parts)))


@lru_cache(maxsize=64)
def _who(ranks: tuple[int, ...]) -> str:
    listed = ",".join(map(str, ranks))
    if len(ranks) <= _MOST_SHOWN:
        return listed
    return f"{len(ranks)} ranks {hashlib.sha256(listed.encode()).hexdigest()[:16]}"
