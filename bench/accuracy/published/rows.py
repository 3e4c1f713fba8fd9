"""A file of published runs -> its rows, whatever columns it has.

A cell is a number, a yes or no, or a word; None, or "", where it says nothing.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echelon.core.rulebook.config import OUT_OF_RANGE
from echelon.core.rules import Rule

MOST = 2.0**27
"""The largest count of anything in a row: devices, tokens of a sequence, ids of a vocabulary."""
SILENT = frozenset(
    {"", "?", "-", "--", "n/a", "na", "nan", "null", "unknown", "not stated", "not given", "tbd"}
)
YES = frozenset({"true", "yes", "y", "on", "1", "t", "enabled"})
NO = frozenset({"false", "no", "n", "off", "0", "f", "disabled", "none"})
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"[~<>=\s]*(\d[\d,_]*\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*([kmbt]?)\b", re.IGNORECASE)


class Refused(Exception):
    """A row cannot be predicted; `rule` says why."""

    def __init__(self, rule: Rule, message: str) -> None:
        """Keep the rule and what is wrong."""
        super().__init__(message)
        self.rule = rule
        self.message = message


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
        """A cell's text, "" where it is blank or the column does not exist."""
        text = (self.cells.get(column) or "").strip()
        return "" if text.lower() in SILENT else text

    def number(self, column: str) -> float | None:
        """The number, 0 or above, with which a cell begins: ``1,024``, ``70B``, ``~41 %``."""
        found = _NUMBER.match(self.word(column))
        if not found:
            return None
        value = float(re.sub("[,_]", "", found[1])) * SUFFIXES[found[2].lower()]
        return value if math.isfinite(value) else None

    def positive(self, column: str) -> float | None:
        """A cell's number above 0, or None."""
        return self.number(column) or None

    def count(self, column: str) -> float | None:
        """A cell's whole number above 0, or None; Refused where no run can have so many."""
        value = self.positive(column)
        if value is None or round(value) < 1:
            return None
        if value > MOST:
            raise Refused(OUT_OF_RANGE, f"{column} = {value:g} is above {MOST:g}")
        return float(round(value))

    def flag(self, column: str) -> bool | None:
        """A cell's yes or no, or None."""
        first = re.split(r"[\s(,;]", self.word(column).lower())[0]
        if first in YES:
            return True
        return False if first in NO else None

    def assume(self, column: str, value: float, why: str) -> float:
        """Note an assumption, once, and give its value back."""
        self.say(column, value, why)
        return value

    def say(self, column: str, value: object, why: str) -> None:
        """Note an assumption, once."""
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
