"""The same input gives the same plan: in a second run, and under another hash seed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given, settings

from tests.schedule.test_buckets import longer
from tests.schedule.test_solve_limits import RATIOS, generated, seeds
from tests.schedule.test_splits import random_table
from undertow.schedule.limits import Limits
from undertow.schedule.plan import Plan
from undertow.schedule.solve import solve
from undertow.schedule.splits import Splitting

ROOT = Path(__file__).parents[2]
WITH_SPLITS = (105, 128, 219, 278, 369, 398, 485, 549, 554, 558, 603, 681, 712, 733, 783, 788)
GENERATED = (*range(120), *WITH_SPLITS)  # the seeds of the Programs that other processes solve


def planned(seed: int) -> Plan:
    """The plan for a Program and limits made anew from a seed: merged, split, or both."""
    rng = random.Random(seed)
    program, in_flight = generated(rng)
    allowed = rng.choice([None, in_flight, in_flight // 2])
    limits = Limits(peak_ratio=rng.choice(RATIOS), in_flight_bytes=allowed, steps=60)
    splitting = Splitting(random_table(rng, program)) if rng.random() < 0.8 else None
    reprice = longer if rng.random() < 0.7 else None
    return solve(program, limits, reprice=reprice, splitting=splitting).plan


def digest_of(plans: Iterable[Plan]) -> str:
    text = json.dumps([plan.to_json() for plan in plans])
    return hashlib.sha256(text.encode()).hexdigest()


@given(seeds)
@settings(max_examples=100)
def test_a_second_run_makes_the_same_plan(seed: int) -> None:
    assert planned(seed) == planned(seed)


def test_plans_of_generated_programs_are_the_same_under_another_hash_seed() -> None:
    plans = [planned(seed) for seed in GENERATED]
    for is_kind in (lambda p: p.buckets, lambda p: p.splits, lambda p: p.planned != p.captured):
        assert sum(bool(is_kind(plan)) for plan in plans) > 5
    code = "from tests.schedule.test_repeatable import *; "
    code += "print(digest_of(map(planned, GENERATED)))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("0", "1")
    }
    assert said == {digest_of(plans) + "\n"}
