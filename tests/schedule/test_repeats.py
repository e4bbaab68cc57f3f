"""Layers are found from structure, and a fold is a legal, smaller Program that stands for all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bench.synthetic import fsdp_step
from tests.programs import random_program
from undertow.program import Order, lower_bounds, simulate, verify
from undertow.schedule import repeats
from undertow.schedule.repeats import find_repeats, fold
from undertow.schedule.solve import solve


def test_layers_of_forward_and_backward_are_found():
    program = fsdp_step(42 * 40)
    forward, backward = find_repeats(program)
    assert (forward.period, backward.period) == (14, 28)
    assert forward.count in (39, 40)  # the first reads the batch as any other reads its input
    assert backward.count in (39, 40)
    assert forward.end <= backward.begin


def test_a_fold_keeps_the_ends_and_stands_for_the_whole():
    program = fsdp_step(42 * 40)
    folded = fold(program)
    assert folded is not None
    verify(folded.program, Order.captured(folded.program))
    assert len(folded.program) < len(program) / 3
    assert abs(int(folded.stands_for.sum()) - 1000 * len(program)) <= len(program)
    assert folded.program.tasks[-1].name == program.tasks[-1].name
    assert folded.program.tasks[0].name == program.tasks[0].name


def test_a_fold_of_more_layers_is_not_larger():
    assert len(fold(fsdp_step(42 * 40)).program) == len(fold(fsdp_step(42 * 400)).program)


def test_names_and_modules_do_not_matter():
    program = fsdp_step(42 * 40)
    renamed = replace(
        program,
        tasks=tuple(
            replace(task, name=f"t{i * 7919 % len(program)}", module="")
            for i, task in enumerate(program.tasks)
        ),
    )
    assert find_repeats(renamed) == find_repeats(program)


def test_what_does_not_repeat_is_not_folded():
    assert fold(fsdp_step(42 * 3)) is None


@given(st.randoms(use_true_random=False))
def test_small_programs_are_left_alone(rng):
    assert fold(random_program(rng)) is None


@given(st.integers(20, 40), st.booleans())
def test_folds_of_layered_programs_are_legal(layers, contended):
    program = fsdp_step(42 * layers, contended=contended)
    folded = fold(program)
    assert folded is not None
    verify(folded.program, Order.captured(folded.program))
    assert lower_bounds(folded.program).best.ns <= lower_bounds(program).best.ns


def test_solving_by_the_fold_is_as_good_as_solving_the_whole(monkeypatch):
    program = fsdp_step(42 * 60)
    by_fold = solve(program).timeline
    monkeypatch.setattr(repeats, "_LEAST_DROPPED_SHARE", 0)  # nothing is ever folded
    whole = solve(program).timeline
    assert by_fold.total_ns <= 1.005 * whole.total_ns
    assert by_fold.peak_nbytes <= simulate(program).peak_nbytes
