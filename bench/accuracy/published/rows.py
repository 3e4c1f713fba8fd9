"""A file of published runs -> its rows, whatever columns it has."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.accuracy.published import cells
from bench.accuracy.published.refusals import Refused
from echelon.core.rulebook.config import OUT_OF_RANGE

MOST = 2.0**27
"""The largest count of anything in a row: devices, tokens of a sequence, ids of a vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """State what a row does not say, what is taken for it, and why."""

    field: str
    value: object
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Hold one run: its cells by column, and what had to be assumed so far."""

    id: str
    cells: Mapping[str, str]
    assumed: list[Assumed] = field(default_factory=list[Assumed], compare=False)

    def word(self, column: str) -> str:
        """Return a cell's text, "" where it is blank or the column does not exist."""
        return cells.word(self.cells.get(column))

    def number(self, column: str) -> float | None:
        """Return a cell's number, 0 or above, or None."""
        return cells.number(self.cells.get(column))

    def positive(self, column: str) -> float | None:
        """Return a cell's number above 0, or None."""
        return cells.positive(self.cells.get(column))

    def count(self, column: str) -> float | None:
        """Return a cell's whole number above 0, or None; Refused where no run can have so many."""
        value = self.positive(column)
        if value is None or round(value) < 1:
            return None
        if value > MOST:
            raise Refused(OUT_OF_RANGE, f"{column} = {value:g} is above {MOST:g}")
        return float(round(value))

    def flag(self, column: str) -> bool | None:
        """Return a cell's yes or no, or None."""
        return cells.flag(self.cells.get(column))

    def assume(self, column: str, value: float, why: str) -> float:
        """Note an assumption, once, and return its value."""
        note = Assumed(field=column, value=value, why=why)
        if note not in self.assumed:
            self.assumed.append(note)
        return value

    def say(self, column: str, value: object, why: str) -> None:
        """Note an assumption that is not a number."""
        note = Assumed(field=column, value=value, why=why)
        if note not in self.assumed:
            self.assumed.append(note)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file; rows without an id are numbered from 1."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    rows: list[Row] = []
    for index, record in enumerate(csv.DictReader(io.StringIO(text, newline="")), start=1):
        found = {
            name.strip().lower(): value
            for name, value in record.items()
            if isinstance(name, str) and isinstance(value, str)
        }
        if any(value.strip() for value in found.values()):
            rows.append(Row(id=found.get("id", "").strip() or f"row-{index}", cells=found))
    return rows
