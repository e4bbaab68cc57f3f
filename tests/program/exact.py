"""The shortest time of small Programs, exactly: by CP-SAT, or by trying every order.

CP-SAT sees the simulator's rules without its loop: compute tasks are intervals on one machine,
starts and waits are points on it that lie inside no interval, a collective is an interval on its
group's machine that begins after its start's point, in the sequence of those points. No launch
cost, no contention.
"""

from collections.abc import Iterator

from ortools.sat.python import cp_model

from undertow.program import Kind, Order, Program, simulate


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
    """The shortest total over all legal orders of a Program without host tasks and contention."""
    model = cp_model.CpModel()
    horizon = sum(task.ns for task in program.tasks)
    total = model.new_int_var(0, horizon, "total")
    place = [model.new_int_var(0, horizon, "") for _ in program.tasks]  # on the compute stream
    begin, on_compute = {}, []
    on_group: dict[int, list[int]] = {}
    for i, task in enumerate(program.tasks):
        length = task.ns if task.kind is Kind.COMPUTE else 0
        on_compute.append(model.new_fixed_size_interval_var(place[i], length, ""))
        model.add(place[i] + length <= total)
        if task.kind is Kind.START:
            begin[i] = model.new_int_var(0, horizon, "")
            model.add(begin[i] >= place[i])
            model.add(begin[i] + task.ns <= total)
            on_group.setdefault(task.stream, []).append(i)
        if task.kind is Kind.WAIT:
            model.add(place[i] >= begin[task.start] + program.tasks[task.start].ns)
    model.add_no_overlap(on_compute)
    for hazard in program.hazards:
        source = program.tasks[hazard.src]
        length = source.ns if source.kind is Kind.COMPUTE else 0
        model.add(place[hazard.dst] >= place[hazard.src] + length)
    for starts in on_group.values():
        for k, first in enumerate(starts):
            for second in starts[k + 1 :]:
                ahead = model.new_bool_var("")
                for a, b, literal in ((first, second, ahead), (second, first, ahead.negated())):
                    model.add(begin[b] >= begin[a] + program.tasks[a].ns).only_enforce_if(literal)
                    model.add(place[b] >= place[a]).only_enforce_if(literal)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return round(solver.objective_value)
