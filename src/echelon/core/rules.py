"""A rule: a stable id, why it exists, a bad and a fixed example, and the problems it reports.

Rules are declared in `core/rulebook/`, one file per area, so that `echelon explain RULE` knows all
of them without importing torch, and an error can only name a rule that is explained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from difflib import get_close_matches
from inspect import cleandoc
from math import isqrt
from textwrap import indent

from echelon.core.errors import Problem


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
            message=message,
            key=key,
            set_by=set_by,
            suggestions=tuple(str(value) for value in suggestions),
        )

    def page(self) -> str:
        """Return the page that `echelon explain` prints."""
        bad, fixed = indent(self.bad, "    "), indent(self.fixed, "    ")
        return f"{self.id}\n\n{cleandoc(self.why)}\n\nRefused:\n{bad}\n\nWorks:\n{fixed}\n"


def nearest_divisors(number: int, wanted: int, *, limit: int = 4) -> tuple[int, ...]:
    """Return up to `limit` divisors of `number`, those nearest to `wanted`, in rising order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    nearest = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:limit]
    return tuple(sorted(nearest))


def did_you_mean(word: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known words closest to a misspelt one, best first, and never the word itself.

    Upper and lower case are the same letters.
    """
    meant: dict[str, str] = {}
    for one in known:
        if one != word:
            meant.setdefault(one.lower(), one)
    close = get_close_matches(word.lower(), list(meant), n=3, cutoff=0.55)
    return tuple(meant[one] for one in close)
