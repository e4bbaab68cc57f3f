"""The builder derives hazards and refuses what makes no sense, naming the task."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs import random_program
from undertow.errors import ProgramError
from undertow.program import HazardKind, Lifetime, Machine, Program, ProgramBuilder, parse_program

IN_FLIGHT = "group g\ninput x 1B\nbuffer y 1B\ns start g 1us reads x writes y\n"


def hazards(program: Program) -> set[tuple[str, str, str]]:
    names = [task.name for task in program.tasks]
    return {(names[h.src], names[h.dst], h.kind.value) for h in program.hazards}


def test_reads_and_writes_become_hazards_of_their_kind():
    program = parse_program("""
        input x 1B
        buffer y 1B
        make   compute 1us reads x writes y
        use    compute 1us reads y
        remake compute 1us reads x writes y
        reuse  compute 1us reads y
    """)
    assert hazards(program) == {
        ("make", "use", "RAW"),
        ("make", "remake", "WAW"),
        ("use", "remake", "WAR"),
        ("remake", "reuse", "RAW"),
    }


@settings(max_examples=20)
@given(st.randoms(use_true_random=False), st.integers(2, 40))
def test_what_a_task_depends_on_is_what_its_hazards_say(rng: random.Random, size: int):
    program = random_program(rng, size)
    assert program.predecessors == replace(program).predecessors


def test_what_is_given_out_is_known_last_and_inputs_stay_inputs():
    builder = ProgramBuilder()
    x, y = builder.input("x", 1), builder.buffer("y", 2)
    builder.compute("make", reads=[x], writes=[y])
    for buffer in (x, y):
        builder.give_out(buffer)
    found = [buffer.lifetime for buffer in builder.build().buffers]
    assert found == [Lifetime.INPUT, Lifetime.OUTPUT]


def test_overwriting_the_input_of_a_collective_depends_on_its_wait():
    program = parse_program("""
        group g
        input x 1B
        buffer y 1B
        s start g 5us reads x writes y
        w wait s
        overwrite compute 1us writes x
    """)
    assert ("w", "overwrite", "WAR") in hazards(program)


def test_a_reader_of_a_collectives_output_depends_on_its_wait():
    program = parse_program("""
        group g
        input x 1B
        buffer y 1B
        s start g 5us reads x writes y
        w wait s
        use compute 1us reads y
    """)
    assert ("w", "use", "RAW") in hazards(program)


def test_a_true_hazard_is_kept_when_a_policy_says_the_same():
    program = parse_program("""
        buffer y 1B
        a compute 1us writes y
        b compute 1us reads y
        policy a b
    """)
    assert hazards(program) == {("a", "b", "RAW")}


def test_a_policy_is_marked_as_ours_to_drop():
    program = parse_program("a compute 1us\nb compute 1us\npolicy a b")
    assert [h.kind for h in program.hazards] == [HazardKind.POLICY]


def test_views_are_ordered_after_the_producer_but_do_not_hold_up_writers():
    program = parse_program("""
        buffer y 1B
        a compute 1us writes y
        v view reads y
        b compute 1us writes y
    """)
    assert hazards(program) == {("a", "v", "RAW"), ("a", "b", "WAW")}


def test_coalesced_collective_with_a_wait_per_output():
    program = parse_program("""
        group g
        input x 1B
        buffer y 1B
        buffer z 1B
        s start g 5us reads x writes y z
        wy wait s writes y
        use compute 1us reads y
        wz wait s writes z
        use2 compute 1us reads z
    """)
    assert {("wy", "use", "RAW"), ("wz", "use2", "RAW")} <= hazards(program)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a compute 1us reads nothing", "task 'a' names an unknown buffer 'nothing'"),
        ("buffer x 1B\na compute 1us reads x", "task 'a' reads buffer 'x' before any task"),
        ("w wait s", "wait 'w' has no start: names an unknown task 's'"),
        ("a compute 1us\nw wait a", "wait 'w' has no start: task 'a' is a compute task"),
        ("a compute 1us\na compute 1us", "two tasks called 'a'"),
        ("input x 1B\ninput x 1B", "two buffers called 'x'"),
        ("group g\ngroup g", "two streams called 'g'"),
        ("group compute", "two streams called 'compute'"),
        ("s start nowhere 1us", "unknown group 'nowhere'"),
        ("output y 1B\na compute 1us", "output buffer 'y' is never written"),
        ("a compute 1us\npolicy a b", "unknown task 'b'"),
        ("a compute 1us\npolicy a a", "closes a cycle"),
        (
            "buffer y 1B\na compute 1us writes y\nb compute 1us reads y\npolicy b a",
            "closes a cycle",
        ),
        ("a compute 1us\nb compute 1us\npolicy b a", "contradicts the order"),
        ("a compute -1us", "not a time"),
        ("input x -1B", "not a size"),
        ("group g ranks=0,0", "ranks of group 'g' must be distinct"),
        (
            IN_FLIGHT + "c compute 1us reads y",
            "task 'c' reads buffer 'y' while collective 's' still writes it",
        ),
        (
            IN_FLIGHT + "c compute 1us writes x",
            "task 'c' writes buffer 'x' while collective 's' still reads it",
        ),
        (
            "group g\ninput x 1B\nbuffer y 1B\nbuffer z 1B\ns start g 1us reads x writes y\n"
            "w wait s writes z",
            "'z'",
        ),
    ],
)
def test_nonsense_is_refused_with_the_name_at_fault(text, message):
    with pytest.raises(ProgramError) as error:
        parse_program(text)
    assert message in str(error.value)


def test_a_cycle_through_a_policy_and_hazards_is_named():
    builder = ProgramBuilder()
    x = builder.buffer("x", 1)
    builder.compute("a", writes=[x])
    builder.compute("b", reads=[x])
    builder.policy("b", "a")
    with pytest.raises(ProgramError, match=r"'b' comes before 'a' closes a cycle"):
        builder.build()


def test_numbers_out_of_range_are_refused():
    builder = ProgramBuilder()
    with pytest.raises(ProgramError, match="buffer number 3, but there are only 0"):
        builder.compute("a", reads=[3])
    with pytest.raises(ProgramError, match="cannot be negative"):
        builder.compute("a", ns=-1)
    with pytest.raises(ProgramError, match="cannot be negative"):
        builder.buffer("x", -1, Lifetime.INPUT)
    with pytest.raises(ProgramError, match="load_permille"):
        builder.start("s", builder.group("g"), load_permille=1001)
    with pytest.raises(ProgramError, match="at least 1000 permille"):
        ProgramBuilder(machine=Machine(compute_slowdown_permille=999))
    with pytest.raises(ProgramError, match="not on the compute stream"):
        builder.start("s", 0)
