"""The generated Python function that runs a graph: packs pointers, calls segments and ATen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.capture.torch_api import OpOverload
from undertow.codegen.kernels_plan import Schedule, is_whole, output_buffers
from undertow.codegen.kernels_pool import POOLED_NBYTES, maker, room_maker
from undertow.codegen.kernels_unit import checking, pointer_slots, segments
from undertow.loops.dtypes import NBYTES, TORCH
from undertow.loops.ir import Constant, Extern, Passed, View, span_of
from undertow.loops.sizes import SIZES
from undertow.loops.tensors import is_opaque, is_view, views_in
from undertow.runtime import direct
from undertow.runtime.direct import stand_in

_PLAIN = (int, float, bool, str, type(None))


@dataclass(slots=True)
class Module:
    """The text of the function and what its names stand for."""

    text: str
    names: dict[str, Any]
    views: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]
    pointers: dict[int, int]  # offsets in the arena by slot
    slots: int


def write_module(schedule: Schedule, is_timed: bool = False, is_checked: bool = False) -> Module:
    """The function that runs a schedule. If it is timed it calls `mark()` after every segment, and
    `start` and `wait` in place of collectives, with the number of their step before the operator.
    If it is checked it tells `expected` what it has made and freed.
    """
    return _Writer(schedule, is_timed, is_checked).write()


@dataclass(slots=True)
class _Writer:
    schedule: Schedule
    is_timed: bool = False
    is_checked: bool = False
    lines: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    views: dict[tuple[Any, ...], int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    made_views: dict[View, str] = field(default_factory=dict)  # views that are variables now
    views_of: dict[int, list[View]] = field(default_factory=dict)
    shapes: dict[int, Any] = field(default_factory=dict)  # sizes and strides of new tensors
    returned: set[int] = field(default_factory=set)
    deaths: dict[int, list[int]] = field(default_factory=dict)  # buffers by their last use
    given: set[int] = field(default_factory=set)  # buffers that are inputs
    count: int = 0
    holders: set[int] = field(default_factory=set)  # buffers that are Python variables now

    def write(self) -> Module:
        schedule = self.schedule
        lowered = schedule.lowered
        self.slots = pointer_slots(schedule)
        self.shapes = self.fresh_shapes()
        self.returned = output_buffers(lowered)
        for number, at in sorted(schedule.last_use.items()):
            until = max(at, schedule.hosts.get(number, at))
            self.deaths.setdefault(until, []).append(number)
        self.inputs()
        if SIZES in self.slots:
            self.names["sizes"] = schedule.sizes
            self.put(f"P[{self.slots[SIZES]}] = sizes")
        if self.is_checked:
            self.given = {view.buffer for view in views_in(lowered.inputs)}
            self.put(f"check = expected.begin(P, {self.held(self.holders)})")
        run = 0
        for k, segment in enumerate(segments(schedule)):
            if isinstance(segment, list):
                self.allocate(segment)
                origins = " ".join(name for at in segment for name in self.origins(at))
                call = f"seg{run}(P)"
                if nodes := checking(schedule, segment):
                    call = f"if fault := {call}: fail(fault, {', '.join(nodes)[:200]!r})"
                self.put(f"{call}  # {origins[:200]}")
                run += 1
                self.free(k, segment)
            else:
                self.allocate([segment])
                self.extern(segment)
                self.free(k, [segment])
            if self.is_timed:
                self.put("mark()")
        outputs = ", ".join(self.operand(item) for item in lowered.outputs)
        self.put(f"return [{outputs}]")
        arguments = "args, P, V"
        text = f"def run({arguments}):\n" + "\n".join("    " + line for line in self.lines) + "\n"
        pointers = {
            slot: schedule.offsets[number]
            for number, slot in self.slots.items()
            if number in schedule.offsets
        }
        count = len(lowered.buffers)
        for at, offset in schedule.scratch.items():
            pointers[self.slots[count + at]] = offset
        views = [(offset, sizes, strides, TORCH[tag]) for offset, sizes, strides, tag in self.views]
        return Module(text, self.names, views, pointers, len(self.slots))

    def origins(self, at: int) -> list[str]:
        """The names of the graph's nodes that a step does."""
        step = self.schedule.steps[at]
        return [step.origin] if isinstance(step, Extern) else list(step.kernels[0].origins)

    def put(self, line: str) -> None:
        self.lines.append(line)

    # -- tensors ----------------------------------------------------------------------------

    def inputs(self) -> None:
        lowered = self.schedule.lowered
        used = self.schedule.last_use
        returned = self.returned
        names = []
        for k, view in enumerate(lowered.inputs):
            names.append(f"b{view.buffer}" if isinstance(view, View) else f"n{k}")
        if names:
            self.put(f"({', '.join(names)},) = args")
            self.put("args.clear()")
        written = {n for step in self.schedule.steps for n in step.writes}
        for view in lowered.inputs:
            if not isinstance(view, View) or (
                view.buffer not in used and view.buffer not in returned
            ):
                continue
            if view.dtype != "opaque":
                change = "refuse" if view.buffer in written else "fit"
                name = f"b{view.buffer}"
                shape = f"{view.sizes}, {view.strides}"
                self.put(
                    f"if {name}.stride() != {view.strides}: {name} = {change}({name}, {shape})"
                )
            if view.buffer not in self.schedule.hosts:
                self.hold(view.buffer)
        self.hosts()
        for number, tensor in lowered.constants.items():
            self.names[f"b{number}"] = tensor
            if number in self.slots:
                self.put(f"P[{self.slots[number]}] = b{number}.data_ptr()")

    def hosts(self) -> None:
        """Inputs whose memory will be used again; if somebody holds them after all, copies."""
        for number in sorted(self.schedule.hosts):
            self.put(f"if not is_sole(b{number}): b{number} = own(b{number})")
            self.hold(number)

    def hold(self, number: int) -> None:
        """A buffer has become a Python variable; kernels may want its address."""
        self.holders.add(number)
        if number in self.slots:
            self.put(f"P[{self.slots[number]}] = b{number}.data_ptr()")

    def allocate(self, steps: list[int]) -> None:
        """Make the tensors that outlive the call, when they are first written."""
        schedule = self.schedule
        for at in steps:
            for number in sorted(set(schedule.steps[at].writes)):
                if number not in schedule.fresh or schedule.first_write[number] != at:
                    continue
                buffer = schedule.lowered.buffers[number]
                sizes, strides = self.shapes[number]
                heir_of = schedule.heirs.get(number)
                if heir_of in schedule.fresh and self.shapes[heir_of] == (sizes, strides):
                    self.put(f"b{number} = b{heir_of}")
                elif heir_of in schedule.fresh:
                    self.put(f"b{number} = inherit(b{heir_of}, {sizes}, {strides})")
                elif heir_of is not None:
                    self.put(f"b{number} = take_over(b{heir_of}, {sizes}, {strides})")
                    self.put(f"if b{number} is None: b{number} = {self.maker(number)}")
                else:
                    self.put(f"b{number} = {self.maker(number)}  # {buffer.dtype} {sizes}")
                self.hold(number)

    def maker(self, number: int) -> str:
        """A call that makes a new tensor for a buffer."""
        buffer = self.schedule.lowered.buffers[number]
        sizes, strides = self.shapes[number]
        if buffer.nbytes >= POOLED_NBYTES:
            self.names[f"new{number}"] = maker(sizes, strides, buffer.dtype)
            return f"new{number}()"
        dtype = f"torch.{str(TORCH[buffer.dtype]).partition('.')[2]}"
        return f"empty({sizes}, {strides}, {dtype})"

    def fresh_shapes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Sizes and strides to make new tensors with: as they are returned, where that is one way
        and nobody else wants them as tensors, so that no view has to be made of them."""
        schedule, buffers = self.schedule, self.schedule.lowered.buffers
        found = {n: (buffers[n].sizes, buffers[n].strides) for n in schedule.fresh}
        ways: dict[int, set[View]] = {}
        for view in views_in(schedule.lowered.outputs):
            ways.setdefault(view.buffer, set()).add(view)
        for at, step in enumerate(schedule.steps):
            if isinstance(step, Extern) and at not in schedule.gemms:
                for number in (*step.reads, *step.writes):
                    ways.pop(number, None)
        for number, views in ways.items():
            view = next(iter(views))
            if number in found and len(views) == 1 and view.offset == 0:
                covers = span_of(view.sizes, view.strides) == buffers[number].span
                if covers and view.dtype == buffers[number].dtype:
                    found[number] = (view.sizes, view.strides)
        return found

    def held(self, numbers: Collection[int]) -> str:
        """Those of these buffers that are variables, as a dictionary."""
        return "{" + ", ".join(f"{n}: b{n}" for n in sorted(numbers) if n in self.holders) + "}"

    def free(self, segment: int, steps: list[int]) -> None:
        """Drop variables that nothing needs after these steps, which have just run."""
        if self.is_checked:
            first = self.schedule.first_write
            made = {n for at in steps for n in self.schedule.steps[at].writes if first[n] == at}
            self.put(f"check.born({segment}, {self.held(made - self.given)})")
        dead = []
        for step in steps:
            for number in self.deaths.get(step, ()):
                keep = number in self.returned or number in self.schedule.lowered.constants
                if number in self.holders and not keep:
                    dead.append(f"b{number}")
                    dead += [self.made_views.pop(view) for view in self.views_of.pop(number, ())]
                    self.holders.discard(number)
        if dead:
            self.put(f"del {', '.join(dead)}")
        if self.is_checked:
            self.put(f"check.died({segment})")

    def operand(self, item: Any) -> str:
        if isinstance(item, View):
            return self.tensor(item)
        if isinstance(item, Passed):
            return f"n{item.place}"
        if isinstance(item, Constant):
            raise AssertionError("a constant that was not written out")
        if type(item) is list:
            return f"[{', '.join(self.operand(part) for part in item)}]"
        if type(item) is tuple:
            return f"({''.join(f'{self.operand(part)}, ' for part in item)})"
        if isinstance(item, _PLAIN) and item == item and item not in (float("inf"), -float("inf")):
            return repr(item)
        name = f"c{len(self.names)}"
        self.names[name] = item
        return name

    def tensor(self, view: View) -> str:
        schedule = self.schedule
        offset = schedule.offsets.get(view.buffer)
        if offset is not None:
            at = offset // NBYTES[view.dtype] + view.offset
            key = (at, view.sizes, view.strides, view.dtype)
            return f"V[{self.views.setdefault(key, len(self.views))}]"
        name = f"b{view.buffer}"
        made = self.shapes.get(view.buffer)
        if made == (view.sizes, view.strides) and view.offset == 0:
            return name
        if made is None and is_whole(view, schedule.lowered):
            return name
        found = self.made_views.get(view)
        if found is None:
            self.count += 1  # names of views that are gone are not used again
            found = self.made_views[view] = f"{name}_{self.count}"
            self.views_of.setdefault(view.buffer, []).append(view)
            self.put(f"{found} = {self.strided(name, view)}")
        return found

    def strided(self, name: str, view: View) -> str:
        """A view of a variable, in the way that costs least to call."""
        buffer = self.schedule.lowered.buffers[view.buffer]
        assert self.shapes.get(view.buffer, (buffer.sizes, buffer.strides))[0] == buffer.sizes
        turned = view.sizes == buffer.sizes[::-1] and view.strides == buffer.strides[::-1]
        if turned and len(view.sizes) == 2 and view.offset == 0:
            return f"{name}.t()"
        start = f"{name}.storage_offset() + {view.offset}"
        return f"as_strided({name}, {view.sizes}, {view.strides}, {start})"

    # -- calls ------------------------------------------------------------------------------

    def extern(self, at: int) -> None:
        step = self.schedule.steps[at]
        assert isinstance(step, Extern)
        target: Any = step.node.target
        args = [self.operand(arg) for arg in step.args]
        args += [f"{key}={self.operand(arg)}" for key, arg in step.kwargs.items()]
        buffers = self.schedule.lowered.buffers
        if step.out and step.outputs[0] is not None and buffers[step.outputs[0]].kind == "temp":
            buffer = buffers[step.outputs[0]]
            view = View(buffer.number, buffer.sizes, buffer.strides, 0, buffer.dtype)
            # the same operator, called through torch's own binding, which costs less
            call = f"torch.{target._schema.name.partition('::')[2]}"
            self.put(f"{call}({', '.join(args)}, out={self.tensor(view)})")
            return
        self.make_room(step)
        called = stand_in(step.node) or target
        call = f"{self.function(called)}({', '.join(args)})"
        if self.is_timed and "c10d_functional" in str(target):
            call = self.through_clock(at, step, args)
        if not any(number is not None for number in step.outputs):
            is_left = direct.STAND_IN in step.node.meta and not self.is_timed
            # Whoever leaves a wait to others may give out another tensor of the same memory.
            self.put(f"b{step.reads[0]} = {call}" if is_left else call)
            return
        if step.is_tuple:
            self.put(f"r = {call}")
            for k, number in enumerate(step.outputs):
                if number is not None:
                    self.result(step, number, f"r[{k}]")
            self.put("del r")
        else:
            assert step.outputs[0] is not None
            self.result(step, step.outputs[0], call)

    def through_clock(self, at: int, step: Extern, args: list[str]) -> str:
        """A start or a wait as the clock takes it: it knows tensors by the object, not a view."""
        if "wait_tensor" not in str(step.node.target):
            name = self.function(stand_in(step.node) or step.node.target)
            return f"start({', '.join((str(at), name, *args))})"
        name = self.function(step.node.target)  # whoever could wait later, here it is measured
        in_arena = step.reads[0] in self.schedule.offsets
        return f"wait({at}, {name}, {args[0] if in_arena else f'b{step.reads[0]}'})"

    def make_room(self, step: Extern) -> None:
        """Large results of ATen count among the memory that the pool may hold."""
        made = [self.schedule.lowered.buffers[n] for n in step.outputs if n is not None]
        nbytes = sum(buffer.nbytes for buffer in made if buffer.dtype in NBYTES)
        if nbytes >= POOLED_NBYTES and "wait_tensor" not in str(step.node.target):
            name = f"room{nbytes}"
            self.names[name] = room_maker(nbytes)
            self.put(f"{name}()")

    def result(self, step: Extern, number: int, text: str) -> None:
        buffer = self.schedule.lowered.buffers[number]
        target: Any = step.node.target
        if isinstance(target, OpOverload) and is_view(target):
            text += ".clone()"  # its memory may be an arena's, which others will use
        self.put(f"b{number} = {text}")
        if number not in self.schedule.last_use and number not in self.returned:
            return
        in_flight = "c10d_functional" in str(target)  # always contiguous, and not to be read yet
        if not in_flight and not is_opaque(View(number, (), (), 0, buffer.dtype)):
            shape = f"{buffer.sizes}, {buffer.strides}"
            self.put(
                f"if b{number}.stride() != {buffer.strides}: b{number} = fit(b{number}, {shape})"
            )
        self.hold(number)

    def function(self, target: Any) -> str:
        spelt = str(target) if isinstance(target, OpOverload) else target.__name__
        if target.__module__ == direct.__name__:
            spelt = f"direct_{spelt}"
        name = spelt.replace(".", "_").replace(":", "_").replace("<", "").replace(">", "")
        name = "".join(ch if ch.isalnum() or ch == "_" else "_" for ch in name)
        self.names[name] = target
        return name
