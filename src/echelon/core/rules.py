# SPDX-License-Identifier: Apache-2.0
"""A rule: a stable id, why it exists, a bad and a fixed example, and the problems it reports.

Rules are declared in `core/rulebook/`, one file per area, so that `echelon explain RULE` knows all
of them without importing torch, and an error can only name a rule that is explained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from inspect import cleandoc
from math import isqrt
from textwrap import indent

from echelon.core.errors import Problem
from echelon.core.messages.names import SYNONYMS
from echelon.core.messages.plurals import in_singular


@dataclass(frozen=True, slots=True)
class Rule:
    """Name one thing that must hold, and explain it to whoever broke it."""

    id: str
    why: str
    bad: str
    fixed: str
    example: InitVar[str] = "%s"
    """What both have in common: %s stands for what they differ in."""

    def __post_init__(self, example: str) -> None:
        """Put what differs into the example."""
        for name in ("bad", "fixed"):
            text = cleandoc(example).replace("%s", cleandoc(getattr(self, name)))
            object.__setattr__(self, name, text)

    def problem(
        self, message: str, *, key: str = "", set_by: str = "", suggestions: Iterable[object] = ()
    ) -> Problem:
        """Return a problem: `message` states the numbers, `suggestions` what would do."""
        return Problem(
            rule=self.id,
            message=in_singular(message),
            key=key,
            set_by=set_by,
            suggestions=tuple(in_singular(str(value)) for value in suggestions),
        )

    def page(self) -> str:
        """Return the page that `echelon explain` prints."""
        bad, fixed = indent(self.bad, "    "), indent(self.fixed, "    ")
        return f"{self.id}\n\n{cleandoc(self.why)}\n\nRefused:\n{bad}\n\nWorks:\n{fixed}\n"


@dataclass(frozen=True, slots=True)
class Area:
    """Name the area of the rules that stand below it in a file, up to the next area."""

    name: str


def nearest_divisors(number: int, wanted: int, *, limit: int = 4) -> tuple[int, ...]:
    """Return up to `limit` divisors of `number`, those nearest to `wanted`, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    nearest = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:limit]
    return tuple(sorted(nearest))


MOST_MEANT = 3  # words in a message


def did_you_mean(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known words that a typed one may mean, best first, and never the word itself.

    The words of Echelon for another tool's word come first, then other spellings (case, dashes),
    words with a few other letters, and words with the same beginning. A word of which more than a
    quarter of the letters differ is another subject.
    """
    others = [one for one in dict.fromkeys(known) if one != word]
    meant = [one for one in SYNONYMS.get(word.lower(), ()) if one in others]
    typed = _plain(word)
    distances = {
        one: distance
        for one in others
        if one not in meant and (distance := _distance(typed, _plain(one))) is not None
    }
    nearest = sorted(distances, key=lambda one: (distances[one], one[:1].lower() != typed[:1]))
    return (*meant, *nearest)[:MOST_MEANT]


def _plain(word: str) -> str:
    """Return a word in lower case without dashes, underscores and spaces."""
    return re.sub(r"[-_ ]", "", word.lower())


def _distance(typed: str, known: str) -> int | None:
    """Distance of a known word from a typed word; None for an unrelated word."""
    if typed == known:
        return 0
    shorter, longer = sorted((typed, known), key=len)
    begins = len(shorter) >= LEAST_BEGINNING and longer.startswith(shorter)
    most = max(1, len(typed) // LETTERS_OF_A_SLIP)
    if len(typed) >= LEAST_BEGINNING and len(longer) - len(shorter) <= most:
        edits = _edits(typed, known)
        if edits <= most:
            return edits
    return len(longer) if begins and 2 * len(known) >= len(typed) else None


LEAST_BEGINNING = 3  # letters that are the beginning of a word, and not another word
OTHER_NUMBER = 99  # edits that another digit counts as
LETTERS_OF_A_SLIP = 4  # letters for each that may be wrong


def _edits(one: str, other: str) -> int:
    """Number of letters that are added, left out, replaced or swapped with the next letter."""
    before, row = list[int](), [*range(len(other) + 1)]
    for at, letter in enumerate(one):
        above, row = (before, row), [at + 1]
        for to, wanted in enumerate(other):
            number = letter.isdigit() and wanted.isdigit()  # gpt5 is no slip of gpt2
            other_letter = (letter != wanted) * (OTHER_NUMBER if number else 1)
            least = min(row[to] + 1, above[1][to + 1] + 1, above[1][to] + other_letter)
            if at and to and letter == other[to - 1] and one[at - 1] == wanted:
                least = min(least, above[0][to - 1] + 1)
            row.append(least)
        before = above[1]
    return row[-1]
