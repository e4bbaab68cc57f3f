"""Fused regions: which tasks form one, and which bytes each is charged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.cost.regions import find_regions, region_nbytes
from undertow.program.builder import ProgramBuilder
from undertow.program.model import Buffer, Kind, Lifetime, OpClass, Program, Stream, Task, Work

SIZE = 1000


class Sketch:
    """Programs of short lines; every buffer has 1000 bytes, `in*` are inputs, `out*` outputs."""

    def __init__(self) -> None:
        self.builder = ProgramBuilder("sketch")
        self._buffers: dict[str, int] = {}

    def op(
        self,
        name: str,
        reads: str,
        writes: str,
        op_class: OpClass = OpClass.POINTWISE,
        read: int | None = None,
        written: int | None = None,
    ) -> Sketch:
        sources, targets = self.buffers(reads), self.buffers(writes)
        work = Work(
            f"aten.{name}",
            op_class,
            nbytes_read=SIZE * len(sources) if read is None else read,
            nbytes_written=SIZE * len(targets) if written is None else written,
        )
        self.builder.compute(name, reads=sources, writes=targets, work=work)
        return self

    def buffers(self, names: str) -> list[int]:
        kinds = {"i": Lifetime.INPUT, "o": Lifetime.OUTPUT}
        for name in names.split():
            if name not in self._buffers:
                kind = kinds.get(name[0], Lifetime.INTERMEDIATE)
                self._buffers[name] = self.builder.buffer(name, SIZE, kind)
        return [self._buffers[name] for name in names.split()]

    def regions(self) -> list[int]:
        return find_regions(self.builder.build())

    def charged(self) -> list[int | None]:
        program = self.builder.build()
        return region_nbytes(program, find_regions(program))


def test_a_chain_is_charged_for_its_two_ends_only() -> None:
    sketch = Sketch().op("a", "in", "t1").op("b", "t1", "t2").op("c", "t2", "out")
    assert sketch.regions() == [0, 0, 0]
    assert sketch.charged() == [SIZE, 0, SIZE]


def test_a_lone_task_is_no_region() -> None:
    sketch = Sketch().op("a", "in", "out")
    assert sketch.regions() == [-1]
    assert sketch.charged() == [None]


def test_tasks_that_share_only_an_input_are_not_connected() -> None:
    assert Sketch().op("a", "in", "out1").op("b", "in", "out2").regions() == [-1, -1]


def test_two_chains_interleaved_in_one_run_are_two_regions() -> None:
    sketch = Sketch().op("a", "in1", "t").op("b", "in2", "u").op("c", "t", "out1")
    assert sketch.op("d", "u", "out2").regions() == [0, 1, 0, 1]


def test_two_chains_that_meet_are_one_region() -> None:
    sketch = Sketch().op("a", "in1", "t").op("b", "in2", "u").op("c", "t u", "out")
    assert sketch.regions() == [0, 0, 0]


@pytest.mark.parametrize("op_class", [OpClass.MATMUL, OpClass.GATHER, OpClass.OTHER])
def test_work_that_does_not_fuse_ends_a_run(op_class: OpClass) -> None:
    sketch = Sketch().op("a", "in", "t").op("mm", "in", "u", op_class).op("b", "t u", "out")
    assert sketch.regions() == [-1, -1, -1]


def test_reductions_and_copies_fuse() -> None:
    sketch = Sketch().op("a", "in", "t").op("sum", "t", "u", OpClass.REDUCTION)
    assert sketch.op("copy", "u", "out", OpClass.COPY).regions() == [0, 0, 0]


def test_a_view_does_not_end_a_run_and_is_no_reader() -> None:
    sketch = Sketch().op("a", "in", "t").op("b", "t", "u")
    sketch.builder.view("view", reads=sketch.buffers("t"))
    sketch.op("c", "u", "out")
    assert sketch.regions() == [0, 0, -1, 0]
    assert sketch.charged() == [SIZE, 0, None, SIZE]


def test_starts_waits_and_host_tasks_end_a_run() -> None:
    for kind in ("start", "host"):
        sketch = Sketch().op("a", "in", "t")
        if kind == "start":
            group = sketch.builder.group("dp", range(2))
            start = sketch.builder.start("ar", group, reads=sketch.buffers("in2"))
            sketch.builder.wait("ar_wait", start)
        else:
            sketch.builder.host("item", reads=sketch.buffers("in2"))
        regions = sketch.op("b", "t", "out").regions()
        assert set(regions) == {-1}


def test_an_input_read_twice_is_charged_to_its_first_reader() -> None:
    assert Sketch().op("a", "in", "t").op("b", "in t", "out").charged() == [SIZE, SIZE]


def test_a_result_that_is_used_later_is_charged_to_its_writer() -> None:
    sketch = Sketch().op("a", "in", "t").op("b", "t", "u").op("mm", "t u", "out", OpClass.MATMUL)
    assert sketch.charged() == [2 * SIZE, SIZE, None]


def test_an_updated_input_is_written_back_once_by_its_last_writer() -> None:
    sketch = Sketch().op("a", "in", "in").op("b", "in", "in")
    assert sketch.regions() == [0, 0]
    assert sketch.charged() == [SIZE, SIZE]


def test_an_output_that_is_also_read_inside_is_charged_once() -> None:
    assert Sketch().op("a", "in", "out1").op("b", "out1", "out2").charged() == [2 * SIZE, SIZE]


def test_a_result_that_nobody_reads_is_not_charged() -> None:
    assert Sketch().op("a", "in", "t").op("b", "t", "u").charged() == [SIZE, 0]


def test_a_slice_is_charged_no_more_than_its_description() -> None:
    sketch = Sketch().op("a", "in", "t", read=100).op("b", "t", "out", written=10)
    assert sketch.charged() == [100, 10]


def test_slices_of_one_buffer_add_up_to_the_buffer_and_not_to_more() -> None:
    sketch = Sketch().op("a", "in", "t", read=600).op("b", "in t", "out", read=600 + SIZE)
    assert sketch.charged() == [600, 400 + SIZE]


def test_what_a_sliced_write_leaves_is_still_read_from_outside() -> None:
    sketch = Sketch().op("a", "in1", "in2", read=300, written=300)
    assert sketch.op("b", "in2", "out").charged() == [300 + 300, 700 + SIZE]


def test_regions_are_found_in_a_long_chain_without_recursion() -> None:
    count = 50_000
    work = Work("aten.add", OpClass.POINTWISE, nbytes_read=SIZE, nbytes_written=SIZE)
    tasks = [
        Task(f"t{i}", Kind.COMPUTE, reads=(i,), writes=(i + 1,), work=work) for i in range(count)
    ]
    buffers = [Buffer(f"b{i}", SIZE) for i in range(count + 1)]
    program = raw(tasks, buffers)
    regions = find_regions(program)
    assert set(regions) == {0}
    assert sum(nbytes or 0 for nbytes in region_nbytes(program, regions)) == SIZE


def raw(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> Program:
    return Program("raw", tuple(tasks), tuple(buffers), (Stream("compute"), Stream("host")), ())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    buffers = [
        Buffer(f"b{i}", draw(st.integers(0, 1000)), draw(st.sampled_from(list(Lifetime))))
        for i in range(6)
    ]
    refs = st.lists(st.integers(0, 5), max_size=3, unique=True).map(tuple)
    classes = st.sampled_from([OpClass.POINTWISE, OpClass.COPY, OpClass.MATMUL])
    tasks = []
    for i in range(draw(st.integers(1, 14))):
        reads, writes = draw(refs), draw(refs)
        work = Work(
            "op",
            draw(classes),
            nbytes_read=draw(st.sampled_from([0, 50, sum(buffers[b].nbytes for b in reads)])),
            nbytes_written=sum(buffers[b].nbytes for b in writes),
        )
        kind = draw(st.sampled_from([Kind.COMPUTE, Kind.COMPUTE, Kind.COMPUTE, Kind.VIEW]))
        tasks.append(Task(f"t{i}", kind, reads=reads, writes=writes, work=work))
    return raw(tasks, buffers)


@given(programs())
def test_no_task_is_charged_more_than_alone_and_no_buffer_more_than_twice(program: Program) -> None:
    regions = find_regions(program)
    charged = region_nbytes(program, regions)
    for task, region, nbytes in zip(program.tasks, regions, charged, strict=True):
        assert (nbytes is None) == (region < 0)
        assert isinstance(task.work, Work)
        assert nbytes is None or 0 <= nbytes <= task.work.nbytes
    for region in set(regions) - {-1}:
        members = [i for i, other in enumerate(regions) if other == region]
        touched = {b for i in members for b in program.tasks[i].reads + program.tasks[i].writes}
        total = sum(charged[i] or 0 for i in members)
        assert total <= 2 * sum(program.buffers[b].nbytes for b in touched)


def test_what_uses_a_reduction_over_more_than_a_chip_holds_reads_again():
    """norm(x), then x / norm: one region for short rows, two passes over x for one long row."""
    for rows, regions in ((1 << 20, [0, 0]), (1, [-1, -1])):
        builder = ProgramBuilder("norm")
        x, n = builder.input("x", 1 << 30), builder.buffer("n", 4 * rows)
        y = builder.output("y", 1 << 30)
        norm = Work("aten.norm", OpClass.REDUCTION, 0, 1 << 30, 4 * rows, shape=(rows,))
        divide = Work("aten.div", OpClass.POINTWISE, 0, (1 << 30) + 4 * rows, 1 << 30)
        builder.compute("norm", reads=[x], writes=[n], work=norm)
        builder.compute("divide", reads=[x, n], writes=[y], work=divide)
        assert find_regions(builder.build()) == regions
