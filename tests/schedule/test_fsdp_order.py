"""At most two layers of gathered parameters."""

from dataclasses import replace

from tests.schedule.orders import NO_LIMIT, names, order_of
from undertow.program import Order, Program, parse_program, profile_memory
from undertow.schedule import Limits
from undertow.schedule.fsdp_order import fsdp_two_layers, gathered_layers, parameter_gathers


def layers(count: int, gathers: int = 1) -> Program:
    """Gathers, their waits, and two users for each layer; what comes out of one goes into the
    next."""
    lines = ["group g", "input x 1B"]
    value = "x"
    for k in range(count):
        for j in range(gathers):
            lines += [f"input p{k}.{j} 1B", f"buffer f{k}.{j} 100B"]
            lines += [f"s{k}.{j} start g 50us reads p{k}.{j} writes f{k}.{j}"]
        lines += [f"w{k}.{j} wait s{k}.{j}" for j in range(gathers)]
        full = " ".join(f"f{k}.{j}" for j in range(gathers))
        lines += [f"buffer a{k} 1B", f"buffer b{k} 1B"]
        lines += [f"c{k} compute 40us reads {value} {full} writes a{k}"]
        lines += [f"d{k} compute 40us reads a{k} f{k}.0 writes b{k}"]
        value = f"b{k}"
    return parse_program("\n".join(lines))


def test_the_next_layer_is_gathered_while_this_one_runs():
    program = layers(4)
    order = fsdp_two_layers(program, Order.captured(program), NO_LIMIT)
    assert names(program, order) == (
        "s0.0 s1.0 w0.0 c0 d0 s2.0 w1.0 c1 d1 s3.0 w2.0 c2 d2 w3.0 c3 d3"
    )


def test_gathers_too_far_ahead_are_delayed():
    program = layers(4)
    eager = order_of(program, "s0.0 s1.0 s2.0 s3.0 w0.0 c0 d0 w1.0 c1 d1 w2.0 c2 d2 w3.0 c3 d3")
    assert profile_memory(program, eager).peak_nbytes > 400
    order = fsdp_two_layers(program, eager, NO_LIMIT)
    assert 200 < profile_memory(program, order).peak_nbytes < 300


def test_within_a_limit_of_one_layer_nothing_is_gathered_ahead():
    program = layers(4)
    assert fsdp_two_layers(program, Order.captured(program), Limits()) == Order.captured(program)


def test_parameters_that_are_used_together_are_one_layer():
    program = layers(3, gathers=2)
    found = gathered_layers(program, Order.captured(program))
    assert [[program.tasks[s].name for s in layer.starts] for layer in found] == [
        ["s0.0", "s0.1"],
        ["s1.0", "s1.1"],
        ["s2.0", "s2.1"],
    ]


def test_module_paths_say_what_a_layer_is():
    program = layers(4)
    tasks = tuple(
        replace(task, module=f"layers.{int(task.name[1]) // 2}.w{task.name[1]}")
        if task.name[0] == "s"
        else task
        for task in program.tasks
    )
    program = replace(program, tasks=tasks)
    found = gathered_layers(program, Order.captured(program))
    assert [[program.tasks[s].name for s in layer.starts] for layer in found] == [
        ["s0.0", "s1.0"],
        ["s2.0", "s3.0"],
    ]


def test_collectives_on_activations_are_no_parameter_gathers():
    program = parse_program("""
        group g
        input p 1B
        input q 1B
        buffer half 1B
        buffer full 8B
        buffer act 1B
        buffer all 8B
        donated saved 1B
        buffer s 8B
        cast compute 1us reads p writes half
        gp   start g 1us reads half writes full
        wp   wait gp
        c    compute 1us reads full q writes act
        ga   start g 1us reads act writes all
        wa   wait ga
        gs   start g 1us reads saved writes s
        gq   start g 1us reads q writes q
    """)
    assert [program.tasks[start].name for start in parameter_gathers(program)] == ["gp"]


def test_a_parameter_kept_for_later_does_not_close_a_cycle():
    program = parse_program("""
        group g
        input p 1B
        buffer f0 1B
        buffer f1 1B
        buffer f2 1B
        buffer y 1B
        s0 start g 5us reads p writes f0
        w0 wait s0
        c0 compute 9us reads f0
        s1 start g 5us reads p writes f1
        w1 wait s1
        c1 compute 9us reads f1
        s2 start g 5us reads p writes f2
        w2 wait s2
        c2 compute 9us reads f2 writes y
        d0 compute 9us reads f0 y
    """)
    order = fsdp_two_layers(program, Order.captured(program), NO_LIMIT)
    assert sorted(order.tasks) == list(range(len(program)))
