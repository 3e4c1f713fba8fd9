"""Groups of rows: by completeness, by source and framework, by device, by publisher."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from bench.accuracy.published.rows import Row

COMPLETE = frozenset({"A", "B", ""})
"""Rows of these kinds count: what they lack has usual values. A file may not say the kind."""


def is_complete(row: Row) -> bool:
    """Return whether a row counts in the headline."""
    return row.word("completeness").upper()[:1] in COMPLETE


def source_of(row: Row) -> str:
    """Return a row's source, and its framework."""
    return f"{row.word('source') or 'no source'} | {row.word('framework') or 'no framework'}"


def device_of(row: Row) -> str:
    """Return the name of a row's device."""
    return row.word("gpu") or "no device"


def publisher_of(row: Row) -> str:
    """Return who published a row: the repository, or the paper without its table."""
    source = row.word("source")
    repository = re.match(r"(?:https?://)?(github\.com/[^/\s]+/[^/\s]+)", source)
    if repository:
        return repository[1]
    return re.split(r"\s*(?:\(|,|;|\bTable\b|\bFigure\b|\bSec)", source)[0] or "no source"


def short(name: str, width: int) -> str:
    """Return a name of at most `width` characters: a few of its beginning, and its end."""
    if len(name) <= width:
        return name
    head = min(8, width // 3)
    return f"{name[:head].rstrip()}..{name[len(name) - (width - 2 - head) :].lstrip()}"


def within(source: str, publisher: str) -> str:
    """Return what a source's name says beside its publisher, without the commit of a repository."""
    rest = re.sub(r"^https?://", "", source).removeprefix(publisher).partition(";")[0]
    rest = re.sub(r"\s*@[0-9a-f]{6,40}|\s*\(arXiv[^)]*\)", "", rest).strip(" ,;")
    path, _, table = rest.partition(", ")
    return table or path.rpartition("/")[2] or source


LEAVE_OUT: Mapping[str, Callable[[Row], str]] = {
    "source": lambda row: row.word("source"),
    "publisher": publisher_of,
    "device": lambda row: row.word("gpu"),
    "framework": lambda row: row.word("framework"),
}
"""What can be left out at once: a source (one table), all of a publisher, of a device, ..."""
