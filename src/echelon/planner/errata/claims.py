"""Claims of published guides as data: where, what was said, what holds, and why."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, get_args

Verdict = Literal["ok", "wrong", "ambiguous"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
GUIDES: Mapping[str, str] = {
    "002": "guide-002",
    "003": "guide-003",
    "004": "guide-004",
    "X": "between",
}
"""The file of the claims of each guide, by how their ids begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Hold one claim. `said` is None where the guide gives no value; `holds` is what is right.

    "ambiguous" is what is right only under conditions that the guide does not name.
    """

    id: str
    topic: str
    where: str
    claim: str
    verdict: Verdict
    holds: Any
    said: Any = None
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    why: str = ""

    @property
    def guide(self) -> str:
        """Return the number of the guide, or "X" where guides differ from one another."""
        return self.id.partition("-")[0]


@lru_cache(maxsize=1)
def all_claims() -> tuple[Claim, ...]:
    """Return every claim, by guide, in the order of its text."""
    folder = files(__package__ or "echelon.planner.errata") / "claims"
    tables = (
        tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))["claim"]
        for name in GUIDES.values()
    )
    return tuple(Claim(**entry) for entries in tables for entry in entries)


def topics() -> tuple[str, ...]:
    """Return the topics of all claims."""
    return tuple(sorted({claim.topic for claim in all_claims()}))


def select(word: str) -> tuple[Claim, ...]:
    """Return the claims of an id, a verdict, a topic or a guide; nothing for another word."""
    return tuple(
        claim
        for claim in all_claims()
        if word in (claim.id, claim.verdict, claim.topic, claim.guide)
    )
