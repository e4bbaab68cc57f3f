"""A Plot as SVG, in the page's own classes: colours come from its style sheet, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from undertow.report.plots import Plot, Point

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 34, 46
_TICKS = 6
_STYLES = 6  # series beyond them share colours again
_LEAST_LOG = 1e-12  # an axis with smaller values is not logarithmic
_LETTER = 6.2  # width of a letter at 11 px


def plot_to_svg(plot: Plot) -> str:
    """The picture; an `svg` element to be put into a page."""
    return _Drawing(plot).draw()


class _Axis:
    """From values to pixels."""

    def __init__(self, values: list[float], first: float, last: float, *, is_log: bool) -> None:
        self.is_log = is_log and min(values, default=1.0) > _LEAST_LOG
        self.first, self.last = first, last
        self.low, self.high = _range(values, self.is_log)
        self.ticks = sorted(set(values)) if self.is_log else _ticks(self.low, self.high)
        if len(self.ticks) > 2 * _TICKS:
            self.ticks = _log_ticks(self.low, self.high)

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.first + share * (self.last - self.first), 2)


class _Drawing:
    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        points = [point for series in plot.series for point in series.points] + [*plot.marked]
        points = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
        x_values = [float(i) for i in range(len(plot.x_names))] or [p[0] for p in points]
        is_log = plot.log_x and not plot.x_names
        self.x = _Axis(x_values, _LEFT, _WIDTH - _RIGHT, is_log=is_log)
        self.y = _Axis([p[1] for p in points], _HEIGHT - _BOTTOM, _TOP, is_log=False)

    def draw(self) -> str:
        parts = [
            f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{escape(self._description())}">',
            *self._axes(),
            *self._series(),
            *self._marked(),
            *self._names(),
            "</svg>",
        ]
        return "\n".join(parts)

    def _description(self) -> str:
        count = sum(len(series.points) for series in self.plot.series)
        return f"{self.plot.title}: {self.plot.y_label} against {self.plot.x_label}, {count} points"

    def _axes(self) -> Iterator[str]:
        bottom = _HEIGHT - _BOTTOM
        for value in self.y.ticks:
            y = self.y.at(value)
            yield f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>'
            yield _text(_LEFT - 8, y + 4, f"{value:g}", "end")
        ticks = [(float(i), name) for i, name in enumerate(self.plot.x_names)]
        for value, name in ticks or [(tick, f"{tick:g}") for tick in self.x.ticks]:
            x = self.x.at(value)
            yield f'<path class="axis" d="M{x} {bottom}v5"/>'
            yield _text(x, bottom + 18, name, "middle")
        yield f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>'
        yield _text(
            (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, self.plot.x_label, "middle", "label"
        )
        yield _text(8, 14, self.plot.y_label, "start", "label")

    def _series(self) -> Iterator[str]:
        for number, series in enumerate(self.plot.series):
            style = f"s{number % _STYLES}"
            # Infinite ones have no place; they stay in the table under the picture.
            points = [p for p in series.points if math.isfinite(p[0]) and math.isfinite(p[1])]
            if len(points) > 1:
                path = "L".join(f"{self.x.at(p[0])} {self.y.at(p[1])}" for p in points)
                yield f'<path class="line {style}" d="M{path}"/>'
            for point in points:
                yield self._dot(point, f"dot {style}", 3.5, series.name)

    def _dot(self, point: Point, style: str, radius: float, name: str) -> str:
        x, y, label = point
        tooltip = label or f"{name}: {x:g}, {y:g}"
        return (
            f'<circle class="{style}" cx="{self.x.at(x)}" cy="{self.y.at(y)}" r="{radius}">'
            f"<title>{escape(tooltip)}</title></circle>"
        )

    def _marked(self) -> Iterator[str]:
        for point in self.plot.marked:
            x, y = self.x.at(point[0]), self.y.at(point[1])
            yield self._dot(point, "mark", 7, "")
            is_left = x + 12 + len(point[2]) * _LETTER > _WIDTH - _RIGHT
            if is_left:
                yield _text(x - 12, y - 8, point[2], "end", "marked")
            else:
                yield _text(x + 12, y - 8, point[2], "start", "marked")

    def _names(self) -> Iterator[str]:
        if len(self.plot.series) < 2:
            return
        right = float(_WIDTH - _RIGHT)
        for number, series in reversed(list(enumerate(self.plot.series))):
            yield _text(right, 14, series.name, "end")
            right -= len(series.name) * _LETTER + 10
            yield f'<circle class="dot s{number % _STYLES}" cx="{right + 4:g}" cy="10" r="4"/>'
            right -= 14


def _text(x: float, y: float, text: str, anchor: str, style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _range(values: list[float], is_log: bool) -> tuple[float, float]:
    """What an axis spans: its values and some room."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if is_log:
        room = (high / low) ** 0.05 if high > low else 2.0
        return low / room, high * room
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (0.0 if 0 <= low < room else low - room), high + room


def _ticks(low: float, high: float) -> list[float]:
    """Round values from `low` to `high`.

    >>> _ticks(0.0, 9.5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [value for value in every if low <= value <= high]
