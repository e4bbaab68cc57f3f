"""Programs as data."""

from undertow.program import Kind, Machine, parse_program, retimed
from undertow.program.model import HazardKind, Lifetime

TEXT = """
    group g
    input w 1B
    buffer f 8B
    s start g 10us reads w writes f
    r wait s
    c compute 20us reads f
"""


def test_another_cost_shares_the_structure():
    program = parse_program(TEXT)
    tasks = tuple(task.timed(task.ns * 2, launches=False) for task in program.tasks)
    made = retimed(program, tasks, machine=Machine(launch_ns=5))
    assert made.predecessors is program.predecessors
    assert made.touches is program.touches
    assert [task.ns for task in made.tasks] == [20_000, 0, 40_000]
    assert made.machine.launch_ns == 5
    assert program.machine.launch_ns == 0
    assert [task.name for task in made.tasks] == ["s", "r", "c"]


def test_a_wait_for_a_start_elsewhere_is_the_same_otherwise():
    wait = parse_program(TEXT).tasks[1]
    moved = wait.awaiting(7)
    assert (moved.start, moved.name, moved.writes) == (7, wait.name, wait.writes)
    assert wait.awaiting(wait.start) is wait


def test_members_of_kinds_are_plain_attributes():
    """Python 3.11 would look each up by a function, in the loops over tasks."""
    for enum in (Kind, Lifetime, HazardKind):
        assert all(vars(enum)[member.name] is member for member in enum)


def test_true_hazards_are_stronger_than_policies():
    assert HazardKind.RAW.strength > HazardKind.WAR.strength > HazardKind.POLICY.strength


def test_hazards_up_to_a_kind_are_those_that_are_not_stronger():
    program = parse_program(
        """
        group g
        buffer a 1B
        buffer b 1B
        first compute 1us writes a
        reader compute 1us reads a writes b
        second compute 1us writes a
        """
    )
    assert program.edges.up_to(HazardKind.POLICY) == set()
    assert program.edges.up_to(HazardKind.WAW) == {(0, 2), (1, 2)}
    assert program.edges.up_to(HazardKind.RAW) == {(0, 1), (0, 2), (1, 2)}


def test_members_are_hashed_as_the_strings_that_they_equal():
    assert {Kind.COMPUTE: 1}["compute"] == 1
