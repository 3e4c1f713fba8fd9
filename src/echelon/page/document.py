"""The document of a page: what is said, drawn and listed, in order. The page adds no number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from echelon.page.figures import DataTable, Figure

SCHEMA = 1
"""Raised when a reader of an older document would misread a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Hold one number under the verdict: its name, the number with its unit, and what it means."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Hold a part of the page.

    `summary` says in a sentence or two what the figure shows, also to who cannot see it; `notes`
    stand under it, `commands` are what a reader can run. `table` has the figure's numbers.
    """

    id: str
    title: str
    summary: str
    figure: Figure | None = None
    table: DataTable | None = None
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """Hold a whole page: its verdict in one sentence, whether that is good news, its parts."""

    schema: int = SCHEMA
    kind: Literal["report"] = "report"
    title: str
    subject: str
    verdict: str
    good: bool
    facts: tuple[Fact, ...] = ()
    sections: tuple[Section, ...] = field(default=())
    made_by: str
