"""Fusion decided by measurement: a kernel against the same work in smaller kernels.

For every kernel that holds a reduction and what is around it, the nests are also fused with
reductions kept apart; both are built, run in turn on made-up data, and the faster stays. The result
is kept on disk by content, so that equal kernels are measured once on a machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from undertow.cache import cache_dir
from undertow.capture.torch_api import without_fakes
from undertow.codegen.cpp_build import build, find_compiler
from undertow.codegen.kernels_plan import Launch, Schedule, schedule
from undertow.codegen.kernels_unit import pointer_slots, segments, unit_text
from undertow.loops.dtypes import NBYTES, TORCH
from undertow.loops.fuse import Fused, Policy, Refusal, fuse
from undertow.loops.group import Group
from undertow.loops.ir import Extern, Lowered
from undertow.program.serialize import write_whole

_log = logging.getLogger(__name__)
ROUNDS = 15
MOST_NBYTES = 1 << 30  # of made-up data for one comparison


@dataclass(frozen=True, slots=True)
class Trial:
    """Nanoseconds of a kernel as one and in pieces."""

    whole_ns: int
    apart_ns: int


def choose(lowered: Lowered, fused: Fused, policy: Policy) -> Fused:
    """The same kernels, but in pieces where that has been measured to be faster."""
    steps: list[Group | Extern] = []
    refusals = list(fused.refusals)
    for at, step in enumerate(fused.steps):
        pieces = _pieces(lowered, step, policy)
        if not isinstance(step, Group) or len(pieces) < 2:
            steps.append(step)
            continue
        trial = _compare(lowered, fused, at, pieces)
        if trial is None or trial.whole_ns <= trial.apart_ns:
            steps.append(step)
            continue
        names = [member.nest.origin for member in step.members]
        reason = (
            f"measured: {trial.apart_ns / 1e3:.1f} us apart, {trial.whole_ns / 1e3:.1f} us as one"
        )
        refusals.append(Refusal(names[-1], names[0], reason))
        steps.extend(pieces)
    return Fused(steps, refusals, fused.joined)


def _pieces(lowered: Lowered, step: Group | Extern, policy: Policy) -> list[Group | Extern]:
    if isinstance(step, Extern) or step.kind == "scatter" or len(step.members) < 2:
        return []
    nests = sorted((member.nest for member in step.members), key=lambda nest: nest.number)
    part = Lowered(lowered.buffers, list(nests))
    return fuse(part, Policy(policy.threads, across_loops=False)).steps


def _compare(lowered: Lowered, fused: Fused, at: int, pieces: list[Group | Extern]) -> Trial | None:
    """Both ways in the surroundings of the whole graph, so that they leave the same in memory."""
    apart = Fused([*fused.steps[:at], *pieces, *fused.steps[at + 1 :]])
    ways = [
        schedule(lowered, fused, only=range(at, at + 1)),
        schedule(lowered, apart, only=range(at, at + len(pieces))),
    ]
    texts = [unit_text(way) for way in ways]
    key = "\0".join((*texts, find_compiler().key, str(torch.get_num_threads())))
    path = cache_dir() / "fusion" / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
    try:
        return Trial(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    wanted = {n for way in ways for n in pointer_slots(way) if n < len(lowered.buffers)}
    if sum(lowered.buffers[n].nbytes for n in wanted) > MOST_NBYTES:
        return None
    with without_fakes():  # while AOTAutograd compiles, new tensors have no data
        trial = Trial(*_measure(lowered, ways, texts, sorted(wanted)))
    _log.info("a kernel as one takes %d ns, in pieces %d ns", trial.whole_ns, trial.apart_ns)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"whole_ns": trial.whole_ns, "apart_ns": trial.apart_ns}))
    except OSError as error:
        _log.warning("what was measured is not kept: %s", error)
    return trial


def _measure(
    lowered: Lowered, ways: list[Schedule], texts: list[str], wanted: list[int]
) -> list[int]:
    data = {n: _made_up(lowered, n) for n in wanted}
    calls: list[Any] = []
    held: list[Any] = []
    for way, text in zip(ways, texts, strict=True):
        slots = pointer_slots(way)
        table = (ctypes.c_void_p * max(len(slots), 1))()
        for number, slot in slots.items():
            if number < len(lowered.buffers):
                table[slot] = data[number].data_ptr()
            else:
                step = way.steps[number - len(lowered.buffers)]
                assert isinstance(step, Launch)
                scratch = torch.empty(step.sources[0].scratch, dtype=torch.uint8)
                held.append(scratch)
                table[slot] = scratch.data_ptr()
        library = build(text)
        held.append(library)
        runs = [s for s in segments(way) if isinstance(s, list)]
        functions = [getattr(library, f"seg{k}") for k in range(len(runs))]
        calls.append((functions, table))
    best = [1 << 62] * len(calls)
    for _ in range(ROUNDS):
        for k, (functions, table) in enumerate(calls):
            begin = time.perf_counter_ns()
            for function in functions:
                function(table)
            best[k] = min(best[k], time.perf_counter_ns() - begin)
    return best


def _made_up(lowered: Lowered, number: int) -> torch.Tensor:
    """Data to run on: random numbers, and zeros where they may be indices."""
    buffer = lowered.buffers[number]
    count = max(buffer.nbytes // NBYTES[buffer.dtype], 1)
    dtype = TORCH[buffer.dtype]
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(count, generator=generator).to(dtype)
