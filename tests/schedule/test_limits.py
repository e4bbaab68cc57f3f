"""Limits: as users write them, and what they allow."""

import pytest

from undertow.errors import UndertowError
from undertow.program import Order, parse_program
from undertow.schedule.limits import Limits, peak_in_flight

PROGRAM = parse_program("""
    group g
    input x 100B
    buffer y 100B
    s start g 1us reads x writes y
    w wait s
    a compute 1us reads y
""")


def test_the_default_is_the_captured_peak():
    assert Limits().allowed_peak(PROGRAM) == 200


def test_a_ratio_is_meant_as_written_not_as_its_binary_fraction():
    assert Limits(peak_ratio=1.05).allowed_peak(PROGRAM) == 210
    assert Limits(peak_ratio=1.1).allowed_peak(PROGRAM) == 220


def test_absolute_bytes_win_over_the_ratio():
    assert Limits(peak_bytes=7, peak_ratio=2.0).allowed_peak(PROGRAM) == 7


def test_both_limits_can_be_off():
    assert Limits(peak_ratio=None).allowed_peak(PROGRAM) is None


def test_fixed_limits_do_not_depend_on_the_program_any_more():
    fixed = Limits(peak_ratio=1.5, steps=7).fixed_for(PROGRAM)
    assert fixed == Limits(peak_bytes=300, peak_ratio=None, steps=7)
    assert Limits(peak_ratio=None).fixed_for(PROGRAM).allowed_peak(PROGRAM) is None


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("70GiB", Limits(peak_bytes=70 << 30)),
        ("4096", Limits(peak_bytes=4096)),
        ("+5%", Limits(peak_ratio=1.05)),
        ("-12.5 %", Limits(peak_ratio=0.875)),
        ("none", Limits(peak_ratio=None)),
        (" None ", Limits(peak_ratio=None)),
    ],
)
def test_limits_are_read_from_text(text: str, limits: Limits):
    assert Limits.parse(text) == limits


@pytest.mark.parametrize("text", ["", "5%", "lots", "+GiB", "-3GiB"])
def test_what_is_no_limit_is_refused_with_examples(text: str):
    with pytest.raises(UndertowError, match=r"not a memory limit.*70GiB.*\+5%.*none"):
        Limits.parse(text)


def test_negative_limits_are_refused():
    with pytest.raises(UndertowError, match="steps is -1; it cannot be negative"):
        Limits(steps=-1)
    with pytest.raises(UndertowError, match="peak_ratio"):
        Limits.parse("-120%")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"peak_bytes": "70GiB"}, r"peak_bytes is '70GiB'; give a whole number.*Limits.parse"),
        ({"peak_bytes": 1e9}, "peak_bytes is 1000000000.0; give a whole number"),
        ({"steps": 1.5}, "steps is 1.5; give a whole number"),
        ({"steps": None}, "steps is None; give a whole number"),
        ({"steps": True}, "steps is True"),
        ({"peak_ratio": "1"}, "peak_ratio is '1'; give a number such as 1.05"),
        ({"peak_ratio": float("nan")}, "NaN"),
        ({"peak_ratio": float("inf")}, "more than makes sense"),
        ({"in_flight_bytes": 1 << 80}, "more than makes sense"),
    ],
)
def test_limits_that_are_no_numbers_are_refused(given: dict, sentence: str):
    with pytest.raises(UndertowError, match=sentence):
        Limits(**given)


def test_a_percentage_beyond_all_measure_is_refused():
    with pytest.raises(UndertowError, match="more than makes sense"):
        Limits.parse("+" + "9" * 400 + "%")


def test_bytes_in_flight_are_what_a_collective_holds_until_its_first_wait():
    assert peak_in_flight(PROGRAM, Order.captured(PROGRAM)) == 200
