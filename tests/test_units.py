"""Quantities as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.errors import UndertowError, unknown_name
from undertow.units import format_nbytes, format_ns, parse_nbytes, parse_ns


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("64 mb", 64_000_000), ("1.5GiB", 3 << 29)],
)
def test_sizes(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e", "5 parsecs", "1.2.3", "nan"])
def test_a_size_that_is_none_gets_a_sentence(text):
    with pytest.raises(UndertowError, match="is not a size such as"):
        parse_nbytes(text)


def test_a_size_beyond_all_sense_gets_a_sentence():
    with pytest.raises(UndertowError, match="more than makes sense"):
        parse_nbytes("1e400")


@pytest.mark.parametrize(("text", "ns"), [("1us", 1000), ("2.5ms", 2_500_000), ("3 s", 3 * 10**9)])
def test_times(text, ns):
    assert parse_ns(text) == ns


def test_a_time_needs_a_unit():
    with pytest.raises(UndertowError, match="is not a time such as"):
        parse_ns("5")


@given(st.integers(0, 10**18))
def test_what_is_printed_is_read_back_to_four_figures(value: int):
    assert parse_ns(format_ns(value)) == pytest.approx(value, rel=1e-3)
    assert parse_nbytes(format_nbytes(value)) == pytest.approx(value, rel=1e-3)


def test_unknown_names_suggest_the_nearest():
    assert unknown_name("device", "H10", ["h100", "mi300x"]).endswith("did you mean 'h100'?")
    assert unknown_name("device", "zzz", ["h100"]).endswith("known: h100")
    many = [f"name{k}" for k in range(1000)]
    assert unknown_name("model", "zzz", many).endswith("name19 and 980 more")
