"""Programs for tests: random legal ones, and random legal orders of any Program."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from undertow.program import Kind, Lifetime, Machine, Order, Program, ProgramBuilder

GATHER_STEP = """
group dp
input shard 1MiB
buffer full 8MiB
buffer out 1MiB
flat   view reads shard
gather start dp 50us reads shard writes full
other  compute 20us reads shard writes out
ready  wait gather
matmul compute 90us reads full writes out
"""
"""A gather that hides behind one of two computations, in the text form."""


def random_program(rng: random.Random, tasks: int = 12, *, plain: bool = False) -> Program:
    """A legal Program with collectives on up to three groups, mutations, views, several waits,
    starts nobody waits for, host tasks, policies; launch cost, shared links and contention unless
    `plain`."""
    machine = Machine()
    if not plain:
        machine = Machine(rng.choice([0, 0, 3]), rng.choice([1000, 1300]), rng.choice([1000, 1150]))
    draft = _Draft(rng, ProgramBuilder("random", machine), plain)
    while len(draft.names) < tasks:
        draft.step()
    return draft.finish()


class _Draft:
    def __init__(self, rng: random.Random, builder: ProgramBuilder, plain: bool) -> None:
        self.rng, self.builder, self.plain = rng, builder, plain
        self.names: list[str] = []
        self.groups = [
            builder.group(
                f"g{k}", links=() if plain else rng.choice([(), ("nic",), ("nic", "bus")])
            )
            for k in range(rng.randint(1, 3))
        ]
        self.valid = [
            builder.buffer(
                f"in{k}", rng.randint(0, 9), rng.choice([Lifetime.INPUT, Lifetime.DONATED])
            )
            for k in range(2)
        ]
        self.open: dict[str, tuple[list[int], list[int]]] = {}  # start -> reads, writes
        self.done: list[str] = []
        self.count = 2

    def step(self) -> None:
        moves = [self.compute, self.compute, self.compute, self.start, self.wait]
        if not self.plain:
            moves += [self.view, self.host]
        self.rng.choice(moves)()

    def finish(self) -> Program:
        for _ in range(self.rng.randint(0, 2)):
            a, b = sorted(self.rng.sample(range(len(self.names)), 2))
            self.builder.policy(self.names[a], self.names[b])
        return self.builder.build()

    def name(self, prefix: str) -> str:
        self.names.append(f"{prefix}{len(self.names)}")
        return self.names[-1]

    def fresh(self) -> int:
        lifetime = self.rng.choice([Lifetime.INTERMEDIATE] * 4 + [Lifetime.OUTPUT])
        self.count += 1
        return self.builder.buffer(f"b{self.count}", self.rng.randint(0, 9), lifetime)

    def some_valid(self, most: int = 3) -> list[int]:
        return self.rng.sample(self.valid, self.rng.randint(0, min(most, len(self.valid))))

    def writable(self) -> list[int]:
        sending = {buffer for reads, _ in self.open.values() for buffer in reads}
        return [buffer for buffer in self.valid if buffer not in sending]

    def target(self) -> int:
        writable = self.writable()
        if writable and self.rng.random() < 0.3:
            return self.rng.choice(writable)
        return self.fresh()

    def after(self) -> list[str]:
        return self.rng.sample(self.names, 1) if self.names and self.rng.random() < 0.15 else []

    def compute(self) -> None:
        reads, target, after = self.some_valid(), self.target(), self.after()
        self.builder.compute(
            self.name("c"), reads=reads, writes=[target], ns=self.rng.randint(0, 20), after=after
        )
        if target not in self.valid:
            self.valid.append(target)

    def start(self) -> None:
        reads, after = self.some_valid(2), self.after()
        in_place = [buffer for buffer in reads if buffer in self.writable()]
        if in_place and self.rng.random() < 0.3:
            writes = [in_place[0]]
        else:
            writes = [self.fresh() for _ in range(self.rng.randint(1, 2))]
        name = self.name("s")
        self.builder.start(
            name,
            self.rng.choice(self.groups),
            reads=reads,
            writes=writes,
            ns=self.rng.randint(0, 25),
            after=after,
            load_permille=self.rng.choice([1000, 1000, 400]),
        )
        self.open[name] = (reads, writes)
        self.valid = [buffer for buffer in self.valid if buffer not in writes]

    def wait(self) -> None:
        if self.done and self.rng.random() < 0.1:
            self.builder.wait(self.name("again"), self.rng.choice(self.done), writes=[])
        elif self.open:
            start = self.rng.choice(list(self.open))
            after = self.after()
            self.builder.wait(self.name("w"), start, after=after)
            self.valid += [b for b in self.open.pop(start)[1] if b not in self.valid]
            self.done.append(start)

    def view(self) -> None:
        if self.valid:
            self.builder.view(self.name("v"), reads=[self.rng.choice(self.valid)])

    def host(self) -> None:
        self.builder.host(self.name("h"), reads=self.some_valid(1), ns=self.rng.randint(0, 9))


def random_order(rng: random.Random, program: Program) -> Order:
    """A random legal order: any task whose predecessors are placed may come next."""
    missing = [len(before) for before in program.predecessors]
    ready = [i for i, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        task = ready.pop(rng.randrange(len(ready)))
        order.append(task)
        for after in program.successors[task]:
            missing[after] -= 1
            if missing[after] == 0:
                ready.append(after)
    return Order(tuple(order))


def random_permutation(rng: random.Random, program: Program) -> Order:
    tasks = list(range(len(program)))
    rng.shuffle(tasks)
    return Order(tuple(tasks))


def count_kind(program: Program, kind: Kind) -> int:
    return sum(task.kind is kind for task in program.tasks)


rngs = st.randoms(use_true_random=False)
"""A random.Random that hypothesis controls and shrinks."""


TWO_GATHERS = """
    group g
    input w1 1B
    input w2 1B
    buffer f1 8B
    buffer f2 8B
    g1 start g 10us reads w1 writes f1
    r1 wait g1
    c1 compute 20us reads f1
    g2 start g 10us reads w2 writes f2
    r2 wait g2
    c2 compute 20us reads f2
"""
"""Two layers of which the second is gathered behind the first only where both fit."""
