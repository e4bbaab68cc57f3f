"""What the tests of schedulers share: orders as the names of their tasks."""

from undertow.program import Order, Program, parse_program
from undertow.schedule import SCHEDULERS, Limits

NO_LIMIT = Limits(peak_ratio=None)


def names(program: Program, order: Order) -> str:
    return " ".join(program.tasks[i].name for i in order.tasks)


def order_of(program: Program, text: str) -> Order:
    return Order(tuple(program.index[name] for name in text.split()))


def scheduled(name: str, text: str, limits: Limits = NO_LIMIT) -> str:
    """The order that scheduler `name` makes of the program in `text`, by the names of its tasks."""
    program = parse_program(text)
    return names(program, SCHEDULERS[name].run(program, Order.captured(program), limits))
