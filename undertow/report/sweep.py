"""A step under several settings, as rows: for a table, for JSON and for plots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from undertow.report.plots import Plot, Point, Series
from undertow.report.text import table
from undertow.units import format_nbytes, format_ns

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
_BAR = 12  # columns of the longest bar
_WIDE = 8  # values that span such a factor are drawn on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Case:
    """What one step came to."""

    captured_ns: int
    captured_exposed_ns: int
    captured_peak_nbytes: int
    step_ns: int  # as planned
    exposed_ns: int
    peak_nbytes: int
    bound_ns: int
    buckets: int
    tokens_per_second_and_rank: float
    utilisation: float
    fits: bool
    shortfalls: tuple[str, ...] = ()  # limits that it does not keep, a sentence each

    @property
    def exposed_share(self) -> float:
        return self.exposed_ns / self.step_ns if self.step_ns else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in seconds, sizes in bytes."""
        plain = {}
        for name, value in asdict(self).items():
            if name.endswith("_ns"):
                plain[name.removesuffix("_ns") + "_seconds"] = value / 1e9
            else:
                plain[name.replace("nbytes", "bytes")] = value
        return plain


@dataclass(frozen=True, slots=True)
class Row:
    """One combination of values: what it came to, or why it came to nothing."""

    settings: Mapping[str, str]
    case: Case | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        if self.case is None:
            return {"settings": dict(self.settings), "error": self.error}
        return {"settings": dict(self.settings), **self.case.to_json()}

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


def sweep_report(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """The rows for a reader, tokens by rank; those that failed say why below."""
    yield sweep_table(rows)
    for row in rows:
        if row.error:
            yield f"failed: {row.name}: {row.error}"
        for sentence in row.case.shortfalls if row.case else ():
            yield f"note: {row.name}: {sentence}"


def sweep_table(rows: Sequence[Row]) -> Table:
    axes = list(rows[0].settings) if rows else []
    made = table(
        *(f">{name}" for name in axes),
        ">captured", ">planned", ">exposed", ">of step", ">peak", ">tokens/s", "=",
    )  # fmt: skip
    longest = max((row.case.step_ns for row in rows if row.case), default=1) or 1
    for row in rows:
        values = [Text(row.settings[name]) for name in axes]
        case = row.case
        if case is None:
            made.add_row(*values, Text("failed", style="red"))
            continue
        peak = Text(format_nbytes(case.peak_nbytes), style="" if case.fits else "red")
        made.add_row(
            *values,
            format_ns(case.captured_ns),
            Text(format_ns(case.step_ns), style="bold"),
            format_ns(case.exposed_ns),
            f"{case.exposed_share:.1%}",
            peak,
            f"{case.tokens_per_second_and_rank:,.0f}",
            _bar(case.step_ns, case.exposed_ns, longest),
        )
    return made


def _bar(step_ns: int, exposed_ns: int, longest: int) -> Text:
    """Step time to scale, its exposed part at the end in another shade."""
    columns = max(1, round(_BAR * step_ns / longest))
    exposed = min(columns, round(_BAR * exposed_ns / longest))
    return Text("█" * (columns - exposed)) + Text("░" * exposed, style="red")


def sweep_plots(rows: Sequence[Row], title: str) -> list[Plot]:
    """Step time, and the exposed share, over the axis with the most values.

    Each combination of the other axes is a line.
    """
    done = [row for row in rows if row.case]
    if not done:
        return []
    axes = list(done[0].settings)
    values = {name: list(dict.fromkeys(row.settings[name] for row in done)) for name in axes}
    along = max(axes, key=lambda name: len(values[name]))
    numbers = _numbers(values[along])
    x_of = dict(zip(values[along], numbers or map(float, range(len(values[along]))), strict=True))
    is_wide = bool(numbers) and min(numbers) > 0 and max(numbers) / min(numbers) >= _WIDE
    return [
        Plot(
            f"{title}: {what} over {along}",
            along,
            label,
            tuple(_series(done, along, x_of, quantity)),
            x_names=() if numbers else tuple(values[along]),
            log_x=is_wide,
        )
        for what, label, quantity in (
            ("planned step", "step (ms)", "step"),
            ("exposed share", "exposed (% of the step)", "share"),
        )
    ]


def _numbers(values: Sequence[str]) -> list[float]:
    """The values as numbers; none if they are not all numbers in one unit."""
    found = [_NUMBER.match(value) for value in values]
    units = {value[match.end() :] for value, match in zip(values, found, strict=True) if match}
    return [float(match[0]) for match in found if match] if all(found) and len(units) == 1 else []


def _series(
    rows: Sequence[Row], along: str, x_of: Mapping[str, float], quantity: str
) -> Iterator[Series]:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        assert row.case is not None
        others = [f"{name}={value}" for name, value in row.settings.items() if name != along]
        y = row.case.step_ns / 1e6 if quantity == "step" else 100 * row.case.exposed_share
        share = f"{row.case.exposed_share:.1%} exposed"
        note = f"{row.name}: {format_ns(row.case.step_ns)} a step, {share}"
        lines.setdefault(", ".join(others) or "planned", []).append(
            (x_of[row.settings[along]], y, note)
        )
    for name, points in lines.items():
        yield Series(name, tuple(sorted(points, key=lambda point: point[0])))
