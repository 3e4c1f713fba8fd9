# SPDX-License-Identifier: Apache-2.0
"""The guides that are read here: who wrote them, what they are called, and when.

Pages, ids of claims (`distributed-07`) and sources of lints name a guide by its key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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


def sources_named_in(text: str) -> tuple[GuideSource, ...]:
    """Return the guides whose keys stand in a text, alone or in ids of claims."""
    return tuple(one for key, one in SOURCES.items() if re.search(rf"\b{key}\b", text))
