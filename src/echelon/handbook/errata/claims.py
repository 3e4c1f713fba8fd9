# SPDX-License-Identifier: Apache-2.0
"""The guides that are read here, and their claims as data: what was said, what holds, and why.

`claims/` has a file for each guide, and one for what differs between guides.

Pages, ids of claims (`distributed-07`) and sources of lints name a guide by its key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

UNKNOWN = "author unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSource:
    """Hold what is known of a guide; what it does not say of itself is not guessed."""

    key: str
    author: str
    title: str
    year: str
    where: str

    def __str__(self) -> str:
        """Return the guide as a list of references has it."""
        return f"{self.key}: {self.author}, {self.title}, {self.year} ({self.where})"


SOURCES: Mapping[str, GuideSource] = {
    source.key: source
    for source in (
        GuideSource(
            key="distributed",
            author=UNKNOWN,
            title="Distributed Parallelism in Deep Learning",
            year="undated, of the time of GPT-4 and the H100",
            where="a web tutorial on data, tensor and pipeline parallelism and ZeRO",
        ),
        GuideSource(
            key="llm-training",
            author=UNKNOWN,
            title="Parallelism in LLM Training",
            year="undated, not before the DeepSeek-V3 report of December 2024 that it cites",
            where="a web tutorial on ten kinds of parallelism, headed Infrastructure Deep Dive",
        ),
        GuideSource(
            key="scaling",
            author="Uplatz",
            title="Scaling Deep Learning: A Comprehensive Technical Report on Data Parallelism "
            "and its Advanced Implementations",
            year="undated, not before SimpleFSDP (November 2024), which it names",
            where="a report on data parallelism on uplatz.com/blog",
        ),
    )
}
"""Every guide, by its key."""

BETWEEN = "between"
"""How ids of claims begin in which guides differ from one another."""

Verdict = Literal["ok", "wrong", "ambiguous"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
GUIDES = (*SOURCES, BETWEEN)
"""What holds claims: a file each, with whose name their ids begin."""

Formula: TypeAlias = Callable[[SimpleNamespace], object]
"""What computes the value that holds of a claim, from its inputs by the letters of the guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedClaim:
    """Hold one claim of a guide, and what is right."""

    id: str
    """Its name in the errata."""
    topic: str
    """What it is about."""
    where: str
    """Where it stands."""
    claim: str
    """What it says."""
    verdict: Verdict
    """Whether it is right; "ambiguous" is what is right only under conditions that the guide does
    not name."""
    holds: Any
    """The value that is right."""
    said: Any = None
    """The value that the guide gives; None where it gives none."""
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the value is computed from."""
    why: str = ""
    """Why the two differ."""

    @property
    def guide(self) -> str:
        """Return the key of the guide, or "between" where guides differ from one another."""
        return self.id.rpartition("-")[0]


@lru_cache(maxsize=1)
def all_claims() -> tuple[PublishedClaim, ...]:
    """Return every claim, by guide, in the order of its text."""
    folder = files(__package__ or "echelon.handbook.errata") / "claims"
    tables = (
        tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))["claim"]
        for name in GUIDES
    )
    return tuple(PublishedClaim(**entry) for entries in tables for entry in entries)


def topics() -> tuple[str, ...]:
    """Return the topics of all claims."""
    return tuple(sorted({claim.topic for claim in all_claims()}))


def select_claims(word: str) -> tuple[PublishedClaim, ...]:
    """Return the claims of an id, a verdict, a topic or a guide; nothing for another word."""
    return tuple(
        claim
        for claim in all_claims()
        if word in (claim.id, claim.verdict, claim.topic, claim.guide)
    )


def with_named_inputs(function: Callable[..., object]) -> Formula:
    """Return a function of all inputs of a claim, each a parameter of its name."""
    return lambda inputs: function(**vars(inputs))


def sources_named_in(text: str) -> tuple[GuideSource, ...]:
    """Return the guides whose keys stand in a text, alone or in ids of claims."""
    return tuple(one for key, one in SOURCES.items() if re.search(rf"\b{key}\b", text))
