"""What lessons say, for their tests: facts by name, figures by kind, values of claims."""

from __future__ import annotations

from typing import Any, TypeVar

from echelon.handbook.errata.claims import select_claims
from echelon.page.lessons.lesson import Frame

T = TypeVar("T")


def facts(frame: Frame) -> dict[str, str]:
    """Return the values of a frame's facts by their names."""
    return {fact.name: fact.value for fact in frame.facts}


def figure(frame: Frame, kind: type[T]) -> T:
    """Return the only figure of a kind that a frame has."""
    (found,) = (one for one in frame.figures if isinstance(one, kind))
    return found


def holds(claim: str) -> Any:
    """Return the value that is right of a claim of published guides, checked by hand."""
    (found,) = select_claims(claim)
    return found.holds
