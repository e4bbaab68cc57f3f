"""The shortest time of small Programs, exactly: by the exact solver, or by trying every order."""

from collections.abc import Iterator

from undertow.program import Order, Program, simulate
from undertow.schedule.exact import solve_exact
from undertow.schedule.limits import Limits


def all_orders(program: Program) -> Iterator[Order]:
    """Every legal order, by depth-first search with undo."""
    missing = [len(before) for before in program.predecessors]
    chosen: list[int] = []

    def extend() -> Iterator[Order]:
        if len(chosen) == len(program):
            yield Order(tuple(chosen))
            return
        for task in range(len(program)):
            if missing[task] == 0:
                missing[task] = -1
                chosen.append(task)
                for after in program.successors[task]:
                    missing[after] -= 1
                yield from extend()
                for after in program.successors[task]:
                    missing[after] += 1
                chosen.pop()
                missing[task] = 0

    return extend()


def brute_force_ns(program: Program) -> int:
    return min(simulate(program, order).total_ns for order in all_orders(program))


def exact_ns(program: Program) -> int:
    """The shortest total over all legal orders of a plain Program, whatever their memory."""
    found = solve_exact(program, Limits(peak_ratio=None))
    assert found.is_optimal
    return found.total_ns
