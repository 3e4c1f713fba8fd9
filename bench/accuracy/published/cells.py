"""One cell of a table of runs -> a number, a yes or no, a word; None where it says nothing."""

from __future__ import annotations

import math
import re

SILENT = frozenset(
    {"", "?", "-", "--", "n/a", "na", "nan", "null", "unknown", "not stated", "not given", "tbd"}
)
YES = frozenset({"true", "yes", "y", "on", "1", "t", "enabled"})
NO = frozenset({"false", "no", "n", "off", "0", "f", "disabled", "none"})
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"[~<>=\s]*(\d[\d,_]*\.?\d*(?:e[-+]?\d+)?|\.\d+)\s*([kmbt]?)\b", re.IGNORECASE)


def word(cell: str | None) -> str:
    """Return the text of a cell without blanks around it; "" where it says nothing."""
    text = (cell or "").strip()
    return "" if text.lower() in SILENT else text


def number(cell: str | None) -> float | None:
    """Return the number with which a cell begins: ``1,024``, ``70B``, ``~41 %``; never negative."""
    found = _NUMBER.match(word(cell))
    if not found:
        return None
    value = float(re.sub("[,_]", "", found[1])) * SUFFIXES[found[2].lower()]
    return value if math.isfinite(value) else None


def positive(cell: str | None) -> float | None:
    """Return the number with which a cell begins if it is above 0."""
    return number(cell) or None


def flag(cell: str | None) -> bool | None:
    """Return whether a cell says yes or no."""
    text = word(cell).lower()
    first = re.split(r"[\s(,;]", text)[0]
    if first in YES:
        return True
    return False if first in NO else None
