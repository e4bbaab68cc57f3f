"""Reading TOML tables with errors that say where the fault is and what would be right.

A `Fields` is one table of a file; asking it for a key checks type and range, and `done` refuses
keys that nobody asked for, with the nearest one that exists.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undertow.errors import CostError, unknown_name


class Fields:
    """One table: `where` names file and place, as every error of it does."""

    def __init__(self, where: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise CostError(f"{where} must be a table, not {table!r}")
        self.where = where
        self._table: Mapping[str, Any] = table
        self._asked: list[str] = []

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, "a text in quotes", value)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # TOML has no 80e9 as an integer
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"a whole number of at least {least}", value)
        return value

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf
    ) -> float:
        """A number in [least, most]; `least=0` excludes nothing but negatives."""
        value = self._value(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not (least <= value <= most and math.isfinite(value)):
            upper = "" if math.isinf(most) else f" and at most {most:g}"
            raise self._wrong(key, f"a number of at least {least:g}{upper}", value)
        return float(value)

    def positive(self, key: str, default: float | None = None, *, most: float = math.inf) -> float:
        value = self.number(key, default, most=most)
        if value == 0:
            raise self._wrong(key, "a number above 0", value)
        return value

    def table(self, key: str) -> Fields:
        return Fields(f"{self.where}, {key!r}", self._value(key, None))

    def has(self, key: str) -> bool:
        self._ask(key)
        return key in self._table

    def names(self) -> tuple[str, ...]:
        return tuple(self._table)

    def done(self) -> None:
        """Refuse keys that nobody asked for: they are typing errors."""
        for key in self._table:
            if key not in self._asked:
                raise CostError(f"{self.where}: {unknown_name('key', key, self._asked)}")

    def _ask(self, key: str) -> None:
        if key not in self._asked:
            self._asked.append(key)

    def _value(self, key: str, default: object) -> Any:
        self._ask(key)
        if key in self._table:
            return self._table[key]
        if default is not None:
            return default
        # A key that is missing is often one that is misspelt.
        near = difflib.get_close_matches(key, [k for k in self._table if k not in self._asked], n=1)
        hint = f" (there is {near[0]!r})" if near else ""
        raise CostError(f"{self.where}: the key {key!r} is missing{hint}; add it")

    def _wrong(self, key: str, wanted: str, value: object) -> CostError:
        return CostError(f"{self.where}: {key!r} must be {wanted}, not {value!r}")


def read_sections(path: Path, known: tuple[str, ...]) -> dict[str, dict[str, Fields]]:
    """The tables of a file by section and name: `[devices.h100]` is sections["devices"]["h100"]."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read {path}: {error}") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"{path} is not valid TOML: {error}") from error
    sections: dict[str, dict[str, Fields]] = {name: {} for name in known}
    for section, tables in content.items():
        if section not in sections:
            raise CostError(f"{path}: {unknown_name('section', section, known)}")
        if not isinstance(tables, Mapping):
            raise CostError(f"{path}: {section!r} must hold tables such as [{section}.name]")
        for name, table in tables.items():
            sections[section][name] = Fields(f"{path}, {section} {name!r}", table)
    return sections
