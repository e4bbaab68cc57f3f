"""Tables of measured collectives: interpolation, which entry answers, and the file formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.cost.table_files import read_table
from undertow.cost.tables import Curve, Group, Point, Table
from undertow.errors import CostError
from undertow.program.model import CollectiveKind as C

DATA = Path(__file__).parents[1] / "data" / "collectives"
MIB = 1 << 20


# -- curves --------------------------------------------------------------------------------------


def test_a_power_law_is_interpolated_exactly() -> None:
    curve = Curve.of([(100, 1000), (10_000, 100_000)])
    assert curve.at(1000) == 10_000


def test_above_the_range_the_bandwidth_of_the_last_two_points_goes_on() -> None:
    assert Curve.of([(1000, 5000), (2000, 6000)]).at(10_000) == 14_000


def test_a_single_point_is_scaled_up_but_never_down() -> None:
    curve = Curve.of([(1000, 5000)])
    assert (curve.at(1), curve.at(1000), curve.at(4000)) == (5000, 5000, 20_000)


def test_a_flat_end_does_not_make_larger_messages_free() -> None:
    assert Curve.of([(1000, 5000), (2000, 5000)]).at(4000) == 10_000


def test_repeats_of_a_size_count_by_their_median() -> None:
    assert Curve.of([(8, 90), (8, 10), (8, 20)]).at(8) == 20


def test_times_that_fall_with_size_are_levelled() -> None:
    curve = Curve.of([(1, 10), (2, 40), (4, 20), (8, 100)])
    assert curve.ns == (10, 30, 30, 100)


def test_order_of_the_samples_does_not_matter() -> None:
    points = [(4, 20), (1, 10), (8, 100)]
    assert Curve.of(points) == Curve.of(sorted(points))


@pytest.mark.parametrize("samples", [[], [(0, 5)], [(5, 0)], [(5, -1)]])
def test_a_curve_of_nothing_or_of_zeros_is_refused(samples: list[tuple[int, int]]) -> None:
    with pytest.raises(CostError, match="a curve needs"):
        Curve.of(samples)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=12),
    st.lists(st.integers(0, 10**10), min_size=2, max_size=12),
)
def test_time_never_falls_with_size(samples: list[tuple[int, int]], asked: list[int]) -> None:
    curve = Curve.of(samples)
    times = [curve.at(nbytes) for nbytes in sorted(asked)]
    assert times == sorted(times)
    assert times[0] > 0


# -- tables --------------------------------------------------------------------------------------


def point(ns: int, group: Group) -> Point:
    return Point(C.ALL_REDUCE, MIB, ns, group)


def test_the_most_specific_entry_that_fits_answers() -> None:
    table = Table.of(
        "t",
        [
            point(1, Group()),
            point(2, Group(8)),
            point(3, Group(8, 1)),
            point(4, Group(8, 1, "half")),
        ],
    )

    def ns(ranks: int, nodes: int, dtype: str = "float32") -> int:
        curve = table.find(C.ALL_REDUCE, Group(ranks, nodes, dtype))
        assert curve is not None
        return curve.at(MIB)

    assert [ns(8, 1, "half"), ns(8, 1), ns(8, 8), ns(16, 2)] == [4, 3, 2, 1]


def test_a_group_that_the_table_does_not_hold_is_not_guessed() -> None:
    table = Table.of("t", [point(3, Group(8, 1))])
    assert table.find(C.ALL_REDUCE, Group(8, 2)) is None
    assert table.find(C.ALL_REDUCE, Group()) is None
    assert table.find(C.ALL_GATHER, Group(8, 1)) is None


def test_two_tables_together_ask_the_first_first() -> None:
    both = Table.of("a", [point(1, Group(8))]) + Table.of("b", [point(2, Group(8, 1))])
    curve = both.find(C.ALL_REDUCE, Group(8, 1))
    assert curve is not None
    assert curve.at(MIB) == 2
    assert both.name == "a+b"


# -- files ---------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def only_curve(table: Table) -> tuple[C, Group, Curve]:
    (entry,) = table.curves
    return entry


def test_a_csv_file_with_units(tmp_path: Path) -> None:
    text = """# measured on Tuesday
collective,ranks,nodes,dtype,size,time
all_reduce,8,1,bfloat16,1MiB,28us

all_reduce,8,1,bfloat16,2MiB,0.041ms  # repeated twice
"""
    kind, group, curve = only_curve(read_table(written(tmp_path, "t.csv", text)))
    assert (kind, group) == (C.ALL_REDUCE, Group(8, 1, "bfloat16"))
    assert curve == Curve((MIB, 2 * MIB), (28_000, 41_000))


def test_a_csv_file_with_bare_numbers_and_few_columns(tmp_path: Path) -> None:
    text = "us,size,collective\n12.5,4096,reduce_scatter_tensor\n"
    kind, group, curve = only_curve(read_table(written(tmp_path, "t.csv", text)))
    assert (kind, group, curve) == (C.REDUCE_SCATTER, Group(), Curve((4096,), (12_500,)))


def test_a_toml_file(tmp_path: Path) -> None:
    text = """
[[curve]]
collective = "all_gather_into_tensor"
ranks = 16
nodes = 2
points = [["1MiB", "50us"], ["2MiB", "80us"]]
"""
    kind, group, curve = only_curve(read_table(written(tmp_path, "t.toml", text)))
    assert (kind, group, curve.ns) == (C.ALL_GATHER, Group(16, 2), (50_000, 80_000))


def test_the_printed_tables_of_autoparallel() -> None:
    table = read_table(DATA / "nodes16_gpus8.txt")
    inside = table.find(C.REDUCE_SCATTER, Group(8, 1))
    across = table.find(C.ALL_GATHER, Group(16, 16))
    assert inside is not None
    assert across is not None
    assert inside.at(MIB) == 17_300
    assert across.at(2048 * MIB) == 671_307_300
    assert len(across.nbytes) == 12  # the `_out` variant is the same collective, not a second one


@pytest.mark.parametrize("nodes", [8, 16, 32])
def test_all_the_printed_tables_can_be_read(nodes: int) -> None:
    assert read_table(DATA / f"nodes{nodes}_gpus8.txt").find(C.ALL_REDUCE, Group(8, 1))


HEADER = "collective,ranks,size,time\n"
TEXT_HEADER = "Group  Group Size  Collective  1MB (ms)\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "no rows"),
        ("t.csv", HEADER, "no rows"),
        ("t.csv", "kind,size,time\n", r"t.csv:1: unknown column 'kind'"),
        ("t.csv", "size,time\n", r"t.csv:1: the header needs"),
        ("t.csv", "collective,size,ns,us\n", r"t.csv:1: the header needs"),
        ("t.csv", "collective,size,size,time\n", r"t.csv:1: a column appears twice"),
        ("t.csv", HEADER + "all_reduce,8,1MiB\n", r"t.csv:2: has 3 cells"),
        ("t.csv", HEADER + "\nall_reduced,8,1MiB,1us\n", r"t.csv:3: .*did you mean 'all_reduce'"),
        ("t.csv", HEADER + "all_reduce,8,1MiB,17\n", r"t.csv:2: '17' is not a time"),
        ("t.csv", HEADER + "all_reduce,8,-1,1us\n", r"t.csv:2: '-1' is not a size"),
        ("t.csv", HEADER + "all_reduce,8,0,1us\n", r"t.csv:2: .*positive"),
        ("t.csv", HEADER + "all_reduce,zero,1MiB,1us\n", r"t.csv:2: ranks is 'zero'"),
        ("t.csv", "collective,ranks,nodes,size,ns\nsend,2,3,1,1\n", r"t.csv:2: 2 ranks cannot"),
        ("t.csv", "collective,dtype,size,ns\nsend,float31,1,1\n", r"t.csv:2: unknown dtype"),
        ("t.toml", "[[curve]\n", r"is not TOML.*line 1"),
        ("t.toml", "a = 1\n", r"list of \[\[curve\]\]"),
        ("t.toml", '[[curve]]\ncolective = "send"\n', r"curve 1: .*did you mean 'collective'"),
        ("t.toml", '[[curve]]\ncollective = "send"\n', r"curve 1: needs points"),
        (
            "t.toml",
            '[[curve]]\ncollective = "send"\npoints = [["1MiB", "1us"], ["1"]]\n',
            r"curve 1, point 2: is not a pair",
        ),
        ("t.txt", "nothing\n", r"t.txt:1: expected the header"),
        ("t.txt", TEXT_HEADER + "2 8 all_reduce 0.1\n", r"t.txt:2: expected group 1"),
        ("t.txt", TEXT_HEADER + "1 8 all_reduce\n", r"t.txt:2: .*1 times"),
        ("t.txt", TEXT_HEADER + "---\n1 8 all_reduce fast\n", r"t.txt:3: 'fastms' is not a time"),
        ("t.xls", "", "a table is a .csv"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(CostError, match=message):
        read_table(written(tmp_path, name, text))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostError, match="cannot be read"):
        read_table(tmp_path / "b.csv")
