# SPDX-License-Identifier: Apache-2.0
"""The document of a page: what is said, drawn and listed, in order. The page adds no number."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Hold a whole page."""

    schema: int = SCHEMA
    """The version of what a document is."""
    kind: Literal["report"] = "report"
    """What kind of page it is."""
    title: str
    """The name of what it is about, and which of its sides is shown."""
    subject: str
    """What it is about: model, ranks, cluster, hash."""
    verdict: str
    """The answer in one sentence."""
    good: bool
    """Whether the answer is good news."""
    facts: tuple[Fact, ...] = ()
    """The numbers that stand right below the verdict."""
    sections: tuple[Section, ...] = ()
    """The parts, in order."""
    made_by: str
    """The version that wrote it."""
