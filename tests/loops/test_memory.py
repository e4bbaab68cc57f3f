"""Placing buffers in an arena."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.loops.memory import Life, aligned, crowded, most_alive, plan_arena, rounded


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    found = []
    for number in range(draw(st.integers(1, 30))):
        first = draw(st.integers(0, 20))
        found.append(
            Life(
                number,
                draw(st.integers(1, 5000) | st.integers(1, 64)),
                first,
                first + draw(st.integers(0, 10)),
            )
        )
    return found


@settings(derandomize=True, max_examples=150, deadline=None)
@given(lives())
def test_buffers_that_live_together_do_not_overlap(found: list[Life]) -> None:
    offsets, size = plan_arena(found)
    for a in found:
        assert offsets[a.number] % aligned(a.nbytes) == 0
        assert offsets[a.number] + a.nbytes <= size
        for b in found:
            apart = a.last < b.first or b.last < a.first or a.number == b.number
            low, high = sorted((a, b), key=lambda life: offsets[life.number])
            assert apart or offsets[low.number] + low.nbytes <= offsets[high.number]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(lives())
def test_an_arena_is_no_larger_than_everything_side_by_side(found: list[Life]) -> None:
    _, size = plan_arena(found)
    steps = range(40)
    live = max(sum(rounded(x.nbytes) for x in found if x.first <= t <= x.last) for t in steps)
    assert live <= size <= sum(rounded(life.nbytes) for life in found)


def test_what_has_died_is_used_again() -> None:
    chain = [Life(k, 1000, k, k + 1) for k in range(100)]
    assert plan_arena(chain)[1] == 2 * rounded(1000)


def test_scalars_share_cache_lines_and_others_do_not() -> None:
    scalars = [Life(k, 4, 0, 9) for k in range(200)]
    rows = [Life(1000 + k, 100, 0, 9) for k in range(3)]
    offsets, size = plan_arena([*scalars, *rows])
    assert size == 200 * 8 + 3 * 128
    assert all(offsets[life.number] % 64 == 0 for life in rows)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(lives())
def test_without_the_largest_no_step_is_crowded(found: list[Life]) -> None:
    limit = most_alive(found) // 2
    gone = crowded(found, limit)
    assert most_alive([life for life in found if life.number not in gone]) <= limit
    assert not crowded(found, most_alive(found))
