"""Making the reductions of a kernel late, so that it can hold one of another order.

Down columns a kernel reduces in lanes, and a small tensor to one number in one row: results are
there early, for what follows in the kernel. Where nothing uses them there they may as well be late,
and then a reduction over rows, over columns or over all fits in: the input is read once for both.
"""

from __future__ import annotations

from undertow.loops.group import (
    WIDEST_PARTIAL,
    Group,
    block_problem,
    is_inside,
    main_strides,
    reduced_leaves,
)
from undertow.loops.ir import Nest, product
from undertow.loops.space import Place


def late_rows(group: Group, nest: Nest, place: Place, level: str) -> frozenset[int] | None:
    """The outer loops of a kernel once its reductions are late, for a nest that reduces others;
    None if that is not needed or not possible."""
    if not nest.is_reduction or level != "element" or not _may_be_late(group):
        return None
    gone, leaves = reduced_leaves(group, nest, place), set(group.leaves())
    rows = set(group.role_leaves("inner"))
    if group.kind == "lanes":
        is_fit = gone in (leaves, leaves - rows)
    elif group.within:
        is_fit, rows = rows == leaves and gone == group.block_leaves(), gone
    else:
        is_fit = rows == leaves and gone < leaves and bool(block_problem(group, nest, place))
        strides = main_strides(group, nest, place)
        nearest = min(strides, key=lambda leaf: (abs(strides[leaf]), leaf), default=None)
        rows = leaves - gone if nearest in gone else gone
    width = product([group.space.sizes[leaf] for leaf in leaves - rows])
    is_fit = is_fit and bool(rows) and width <= WIDEST_PARTIAL
    is_fit = is_fit and is_inside(group, nest, place, leaves - rows, rows)
    return frozenset(rows) if is_fit else None


def _may_be_late(group: Group) -> bool:
    """Whether nothing in a kernel uses the results of its reductions."""
    if group.kind not in ("rows", "lanes") or group.scan:
        return False
    results = {number for number, access in group.made.items() if access.level != "element"}
    return all(
        member.level == "element" and results.isdisjoint(member.nest.reads)
        for member in group.members
    )


def make_late(group: Group, rows: frozenset[int]) -> None:
    """Give a kernel these outer loops. Its reductions are late, but for those of its new rows."""
    roles = {leaf: "outer" if leaf in rows else "inner" for leaf in group.leaves()}
    group.give_roles("rows", roles)
    group.within = ()
    for member in group.members:
        if member.nest.is_reduction:
            gone = reduced_leaves(group, member.nest, member.place)
            member.late, member.over = gone != set(group.role_leaves("inner")), ""
            for number in member.nest.writes:
                group.made[number].level = "late" if member.late else "row"
