"""Reading tables of measured collectives from CSV, TOML and printed text files.

CSV: a header row, then a row per point. Columns `collective`, `size` (bytes, or text such as
`64MiB`) and `time` (text such as `1.5ms`), or `ns`, `us` or `ms` (a bare number) in its place;
optionally `ranks`, `nodes` and `dtype`, where an empty cell matches everything. `#` comments.

    collective,ranks,nodes,dtype,size,time
    all_reduce,8,1,,1MiB,28us

TOML: a `[[curve]]` per group, with its points as pairs.

    [[curve]]
    collective = "all_reduce"
    ranks = 8
    nodes = 1
    points = [["1MiB", "28us"], ["2MiB", "41us"]]

Text: the format that autoparallel prints, a column per size, the group `1` being the devices of one
node and `0` one device per node; its `MB` are 2**20 bytes.

    Group  Group Size  Collective  1MB (ms)  2MB (ms)
        1           8  all_reduce     0.028     0.041

A size is always that of the input on one rank: a gather's shard, a scatter's whole tensor.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from undertow.cost.names import collective_kind, dtype_of
from undertow.cost.tables import Group, Point, Table
from undertow.errors import CostError, UndertowError, unknown_name
from undertow.program.model import CollectiveKind
from undertow.units import parse_nbytes, parse_ns

_COLUMNS = ("collective", "ranks", "nodes", "dtype", "size", "time", "ns", "us", "ms")
_TIMES = ("time", "ns", "us", "ms")
_CURVE_KEYS = ("collective", "ranks", "nodes", "dtype", "points")
_SIZE_COLUMN = re.compile(r"(\d+)MB \(ms\)")


def read_table(path: Path | str) -> Table:
    """The table in a `.csv`, `.toml` or `.txt` file; an error names the file and the line."""
    path = Path(path)
    readers = {".csv": _csv_points, ".toml": _toml_points, ".txt": _text_points}
    if path.suffix not in readers:
        raise CostError(f"{path}: a table is a .csv, .toml or .txt file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: cannot be read as text: {error}") from error
    return Table.of(str(path), readers[path.suffix](str(path), text))


def _csv_points(name: str, text: str) -> Iterator[Point]:
    header: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0]
        if not line.strip():
            continue
        where = f"{name}:{number}"
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if not header:
            header = _checked_header(where, cells)
            continue
        if len(cells) != len(header):
            raise CostError(f"{where}: has {len(cells)} cells where the header has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        yield _point(where, row, row["size"], _row_time(row))


def _checked_header(where: str, cells: list[str]) -> list[str]:
    for cell in cells:
        if cell not in _COLUMNS:
            raise CostError(f"{where}: {unknown_name('column', cell, _COLUMNS)}")
    if len(set(cells)) != len(cells):
        raise CostError(f"{where}: a column appears twice in the header")
    times = [cell for cell in cells if cell in _TIMES]
    if "collective" not in cells or "size" not in cells or len(times) != 1:
        raise CostError(
            f"{where}: the header needs the columns collective, size and one of time, ns, us, ms"
        )
    return cells


def _row_time(row: Mapping[str, str]) -> str:
    return next(row[c] if c == "time" else f"{row[c]}{c}" for c in _TIMES if c in row)


def _toml_points(name: str, text: str) -> Iterator[Point]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"{name}: is not TOML: {error}") from error  # tomllib says the line
    curves = content.pop("curve", None)
    if not isinstance(curves, list) or content:
        raise CostError(f"{name}: a table in TOML is a list of [[curve]] and nothing else")
    for number, curve in enumerate(curves, 1):
        where = f"{name}: curve {number}"
        for key in curve:
            if key not in _CURVE_KEYS:
                raise CostError(f"{where}: {unknown_name('key', key, _CURVE_KEYS)}")
        points = curve.get("points")
        if not isinstance(points, list) or not points:
            raise CostError(f'{where}: needs points = [["1MiB", "28us"], ...]')
        row = {key: str(value) for key, value in curve.items() if key != "points"}
        for i, pair in enumerate(points, 1):
            if not isinstance(pair, list) or len(pair) != 2:
                raise CostError(f'{where}, point {i}: is not a pair such as ["1MiB", "28us"]')
            yield _point(f"{where}, point {i}", row, str(pair[0]), str(pair[1]))


def _text_points(name: str, text: str) -> Iterator[Point]:
    sizes: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if not line.strip() or set(line.split()[0]) == {"-"}:
            continue
        if not sizes:
            sizes = [int(size) << 20 for size in _SIZE_COLUMN.findall(line)]
            if not sizes or line.split()[:4] != ["Group", "Group", "Size", "Collective"]:
                raise CostError(
                    f"{where}: expected the header 'Group  Group Size  Collective  1MB (ms) ...'"
                )
            continue
        cells = line.split()
        if len(cells) != 3 + len(sizes) or cells[0] not in ("0", "1"):
            raise CostError(
                f"{where}: expected group 1 (one node) or 0 (one device per node), a group size, "
                f"a collective and {len(sizes)} times"
            )
        nodes = "1" if cells[0] == "1" else cells[1]
        row = {"collective": cells[2], "ranks": cells[1], "nodes": nodes}
        for nbytes, cell in zip(sizes, cells[3:], strict=True):
            yield _point(where, row, str(nbytes), f"{cell}ms")


def _point(where: str, row: Mapping[str, str], size: str, time: str) -> Point:
    try:
        nbytes, ns = parse_nbytes(size), parse_ns(time)
    except UndertowError as error:
        raise CostError(f"{where}: {error}") from error
    if nbytes <= 0 or ns <= 0:
        raise CostError(f"{where}: size and time must be positive")
    kind = collective_kind(row.get("collective", ""))
    if kind is None:
        name = row.get("collective", "")
        raise CostError(f"{where}: {unknown_name('collective', name, list(CollectiveKind))}")
    dtype = row.get("dtype") or None
    known = dtype_of(dtype)
    if dtype and known is None:
        raise CostError(f"{where}: unknown dtype {dtype!r}; write it as torch does, float32 say")
    group = Group(_count(where, row, "ranks"), _count(where, row, "nodes"), known and known[0])
    if group.ranks and group.nodes and group.nodes > group.ranks:
        raise CostError(f"{where}: {group.ranks} ranks cannot spread over {group.nodes} nodes")
    return Point(kind, nbytes, ns, group)


def _count(where: str, row: Mapping[str, str], key: str) -> int | None:
    text = row.get(key, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise CostError(f"{where}: {key} is {text!r}, not a whole number from 1 on")
    return int(text)
