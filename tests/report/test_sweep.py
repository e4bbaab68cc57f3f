"""Rows of a sweep as table and plots."""

from __future__ import annotations

from undertow.report.sweep import Case, Row, sweep_plots, sweep_table

CASE = Case(200, 90, 10, 100, 20, 10, 80, 1, 5.0, 0.4, True)


def row(error: str = "", **settings: str) -> Row:
    return Row(settings, None if error else CASE, error)


def test_the_axis_with_most_values_is_drawn_and_the_others_are_lines() -> None:
    rows = [row(nodes=n, bandwidth=b) for n in ("1", "8") for b in ("100", "200", "400")]
    step, share = sweep_plots(rows, "m")
    assert (step.x_label, step.x_names, step.log_x) == ("bandwidth", (), False)
    assert [series.name for series in step.series] == ["nodes=1", "nodes=8"]
    assert [point[0] for point in step.series[0].points] == [100, 200, 400]
    assert share.series[0].points[0][1] == 20


def test_values_that_are_no_numbers_are_named() -> None:
    (step, _) = sweep_plots([row(bucket=b) for b in ("auto", "none", "64MiB")], "m")
    assert step.x_names == ("auto", "none", "64MiB")
    assert [point[0] for point in step.series[0].points] == [0, 1, 2]


def test_values_over_a_wide_range_are_drawn_on_a_logarithmic_axis() -> None:
    (step, _) = sweep_plots([row(nodes=n) for n in ("1", "2", "8")], "m")
    assert step.log_x


def test_failed_rows_are_in_the_table_and_in_no_plot() -> None:
    rows = [row(nodes="1"), row("no link", nodes="2")]
    assert sweep_table(rows).row_count == 2
    assert [len(plot.series[0].points) for plot in sweep_plots(rows, "m")] == [1, 1]
    assert sweep_plots(rows[1:], "m") == []
    assert rows[1].to_json() == {"settings": {"nodes": "2"}, "error": "no link"}


def test_json_is_in_seconds_and_bytes() -> None:
    data = row(nodes="1").to_json()
    assert data["step_seconds"] == 1e-7
    assert data["captured_peak_bytes"] == 10
