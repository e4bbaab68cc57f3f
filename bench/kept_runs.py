"""Runs of the reference system: in a process of their own, with a limit on their time, and kept."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from undertow.program import Program, program_to_json
from undertow.program.serialize import save_json


def kept_run(
    name: str, program: Program, run: Callable[[], dict[str, Any]], folder: Path | None
) -> dict[str, Any]:
    """What `run` gives, or gave for the same priced graph in the same version of PyTorch."""
    if folder is None:
        return run()
    graph = json.dumps(program_to_json(program), sort_keys=True)
    digest = hashlib.sha256(f"{torch.__version__} {name} {graph}".encode()).hexdigest()
    path = folder / f"{digest[:32]}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    found = run()
    if found.get("failed") != "timeout":  # another machine, or a quieter hour, may do better
        folder.mkdir(parents=True, exist_ok=True)
        save_json(path, found | {"name": name})
    return found


def limited(function: Callable[[], dict[str, Any]], wall_limit: float) -> dict[str, Any]:
    """What `function` returns in a forked process; {"failed": why} if it did not come to that."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(function())
        except BaseException as error:  # noqa: BLE001  whatever the pass raises is its result
            theirs.send({"failed": type(error).__name__, "traceback": traceback.format_exc()})

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        if not ours.poll(wall_limit):
            return {"failed": "timeout"}
        result: dict[str, Any] = ours.recv()
        return result
    except EOFError:
        return {"failed": "died"}
    finally:
        process.kill()
        process.join()
