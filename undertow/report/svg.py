"""A Timeline as a picture: lanes, exposed time where it happens, and the memory curve under them.

For documents and README files; light or dark as the viewer is. Small Programs read best: names are
written where they fit, and a task narrower than a quarter of a pixel is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from undertow.program import COMPUTE_STREAM, HOST_STREAM, Kind, Timeline
from undertow.report.curves import memory_curve
from undertow.units import format_nbytes, format_ns

_WIDTH = 960
_LEFT = 96  # lane names
_RIGHT = 24
_TOP = 46
_LANE = 34
_BAR = 24
_MEMORY = 84
_GAP = 26
_LETTER = 6.3  # width of a letter at 11 px
_TICKS = 8
_NARROWEST = 0.25

_STYLE = """
text { font: 11px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 12px } .faint { fill: #6e7781 }
.inside { fill: #ffffff } .grid { stroke: #d0d7de; stroke-width: 1 }
.compute { fill: #3867b7 } .start { fill: #2f8f63 } .host { fill: #7d6bb0 }
.exposed { fill: url(#hatch); stroke: #c4432b; stroke-width: 1 } .stroke { stroke: #c4432b }
.memory { fill: #3867b7; fill-opacity: .22; stroke: #3867b7 }
.peak { stroke: #c4432b; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #3d444d }
  .inside { fill: #ffffff } .stroke { stroke: #ff8a70 }
  .exposed { stroke: #ff8a70 } .peak { stroke: #ff8a70 }
}
"""


def timeline_to_svg(timeline: Timeline) -> str:
    """The picture as the text of an SVG file."""
    return _Picture(timeline).draw()


class _Picture:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.program = timeline.program
        used = {task.stream for task in self.program.tasks} | {COMPUTE_STREAM}
        self.lanes = [i for i in range(len(self.program.streams)) if i in used]
        if HOST_STREAM in self.lanes:  # the host launches the others: draw it on top
            self.lanes.remove(HOST_STREAM)
            self.lanes.insert(0, HOST_STREAM)
        self.scale = (_WIDTH - _LEFT - _RIGHT) / max(timeline.total_ns, 1)
        self.lanes_bottom = _TOP + _LANE * len(self.lanes)
        self.height = self.lanes_bottom + _GAP + _MEMORY + 14

    def draw(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height}" '
            f'width="{_WIDTH}" role="img">',
            f"<title>{escape(self._title())}</title>",
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path class="stroke" d="M0 0V6" stroke-width="2.5"/>'
            "</pattern></defs>",
            self._text(_LEFT, 14, self._title(), "title"),
            *self._axis(),
            *self._lane_names(),
            *self._bars(),
            *self._exposed(),
            *self._memory(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _title(self) -> str:
        timeline = self.timeline
        return (
            f"{self.program.name}: {format_ns(timeline.total_ns)}, "
            f"{format_ns(timeline.exposed_ns)} exposed (hatched)"
        )

    def _x(self, ns: int) -> float:
        return round(_LEFT + ns * self.scale, 2)

    def _y(self, stream: int) -> int:
        return _TOP + _LANE * self.lanes.index(stream) + (_LANE - _BAR) // 2

    def _text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
        kind = f' class="{style}"' if style else ""
        return f'<text x="{x}" y="{y}"{kind} text-anchor="{anchor}">{escape(text)}</text>'

    def _axis(self) -> Iterator[str]:
        bottom = self.lanes_bottom + _GAP + _MEMORY
        step = _round_step(self.timeline.total_ns)
        for at in range(0, self.timeline.total_ns + 1, step):
            x = self._x(at)
            yield f'<path class="grid" d="M{x} {_TOP - 4}V{bottom}"/>'
            yield self._text(x, _TOP - 8, format_ns(at), "faint", "middle")

    def _lane_names(self) -> Iterator[str]:
        for stream in self.lanes:
            name = self.program.streams[stream].name
            yield self._text(_LEFT - 8, self._y(stream) + _BAR / 2 + 4, name, "", "end")

    def _bars(self) -> Iterator[str]:
        for i, task in enumerate(self.program.tasks):
            begin, end = int(self.timeline.begin[i]), int(self.timeline.end[i])
            if task.kind in (Kind.COMPUTE, Kind.START, Kind.HOST):
                took = format_ns(end - begin)
                yield from self._bar(task.stream, begin, end, task.kind.value, task.name, took)

    def _exposed(self) -> Iterator[str]:
        """Where the compute stream stands still."""
        program, timeline = self.program, self.timeline
        for start, waits in program.waits_of.items():
            spans = [(int(timeline.begin[wait]), int(timeline.end[wait])) for wait in waits]
            if not waits:
                end = int(timeline.end[start])
                spans = [(end - int(timeline.exposed[start]), end)]
            for begin, end in spans:
                hint = f"waits {format_ns(end - begin)} for {program.tasks[start].name}"
                yield from self._bar(COMPUTE_STREAM, begin, end, "exposed", "", hint)

    def _bar(
        self, stream: int, begin: int, end: int, style: str, name: str, hint: str
    ) -> Iterator[str]:
        x, width = self._x(begin), (end - begin) * self.scale
        if width < _NARROWEST:
            return
        y = self._y(stream)
        tooltip = escape(f"{name}: {hint}" if name else hint)
        # A hair of space keeps neighbours apart; it must not swallow a narrow bar.
        shown = round(max(width - 1, width / 2), 2)
        yield (
            f'<rect class="{style}" x="{x}" y="{y}" width="{shown}" height="{_BAR}" rx="2">'
            f"<title>{tooltip}</title></rect>"
        )
        if name and len(name) * _LETTER < width - 4:
            yield self._text(round(x + shown / 2, 2), y + _BAR / 2 + 4, name, "inside", "middle")

    def _memory(self) -> Iterator[str]:
        curve = memory_curve(self.timeline)
        peak = self.timeline.peak_nbytes
        top = self.lanes_bottom + _GAP
        bottom = top + _MEMORY
        yield self._text(_LEFT - 8, top + _MEMORY / 2 + 4, "live memory", "", "end")
        if not curve or not peak:
            return
        height = _MEMORY / peak
        path = [f"M{self._x(curve[0][0])} {bottom}"]
        for at, nbytes in curve:
            path.append(f"H{self._x(at)}V{round(bottom - nbytes * height, 2)}")
        path.append(f"V{bottom}Z")
        yield f'<path class="memory" d="{"".join(path)}"/>'
        yield f'<path class="peak" d="M{_LEFT} {top}H{_WIDTH - _RIGHT}"/>'
        label = f"peak {format_nbytes(peak)}"
        if self.timeline.peak_task >= 0:
            label += f" at {self.program.tasks[self.timeline.peak_task].name}"
        yield self._text(_WIDTH - _RIGHT, top - 5, label, "faint", "end")


def _round_step(total: int) -> int:
    """A step of 1, 2 or 5 times a power of ten that gives at most _TICKS ticks."""
    step = 1
    while total > step * _TICKS:
        for factor in (2, 5, 10):
            if total <= step * factor * _TICKS:
                return step * factor
        step *= 10
    return step
