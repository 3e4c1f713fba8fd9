# SPDX-License-Identifier: Apache-2.0
"""Types of settings that are lists: words in an order, numbers, texts, parts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import cast

from echelon.core.rulebook.config import UNKNOWN_CHOICE, WRONG_TYPE
from echelon.core.rulebook.data import MIXTURE_PARTS
from echelon.core.rules import did_you_mean
from echelon.core.settings.value_types import (
    POSITIVE,
    InvalidValue,
    or_words,
    quoted,
    toml_text,
    wrong_type,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceList:
    """Some of a few words, each once, or another word alone."""

    options: tuple[str, ...]
    words: tuple[str, ...] = ("auto",)

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if value in self.words:
            return None
        if not isinstance(value, list | tuple):
            return wrong_type(value, self.describe(), (toml_text(self.options[:2]),))
        found = cast("list[object]", value)
        wrong = [one for one in found if one not in self.options]
        known = [one for one in self.options if one in found]
        if not wrong and len(known) == len(found):
            return None
        what = f"has {toml_text(wrong[0])}, which is not known" if wrong else "has a word twice"
        near = [one for word in wrong for one in did_you_mean(str(word), self.options)[:1]]
        meant = [one for one in self.options if one in known or one in near]
        ways = (toml_text(meant),) if meant else tuple(toml_text([one]) for one in self.options)
        return InvalidValue(rule=UNKNOWN_CHOICE, message=what, suggestions=ways)

    def describe(self) -> str:
        """Return what fits."""
        return or_words(f"a list of {', '.join(quoted(self.options))}", self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordList:
    """A list of a few words in an order that counts, or another word alone."""

    options: tuple[str, ...]
    words: tuple[str, ...]

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if value in self.words:
            return None
        found = _items(value)
        if not found:
            return wrong_type(value, self.describe(), (toml_text(self.options),))
        wrong = [one for one in found if one not in self.options]
        if not wrong:
            return None
        what = f"has {toml_text(wrong[0])}, which is not known; it takes {self.describe()}"
        return InvalidValue(
            rule=UNKNOWN_CHOICE, message=what, suggestions=(toml_text(self.options),)
        )

    def describe(self) -> str:
        """Return what fits."""
        return or_words(f"a list of {', '.join(quoted(self.options))}", self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberList:
    """A list of numbers above 0, or one of a few words."""

    words: tuple[str, ...]

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if value in self.words:
            return None
        found = _items(value)
        if found and not any(POSITIVE.check(one) for one in found):
            return None
        return wrong_type(value, self.describe(), ("[1.0, 2.5]", *quoted(self.words)))

    def describe(self) -> str:
        """Return what fits."""
        return or_words("a list of numbers above 0", self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextList:
    """A list of texts, or one of a few words."""

    words: tuple[str, ...]

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if value in self.words:
            return None
        found = _items(value)
        if found and all(isinstance(one, str) and one for one in found):
            return None
        return wrong_type(value, self.describe(), ('["a text"]', *quoted(self.words)))

    def describe(self) -> str:
        """Return what fits."""
        return or_words("a list of texts", self.words)


def _items(value: object) -> list[object]:
    """Return the items of a list, none of what is no list."""
    return list(cast("list[object]", value)) if isinstance(value, list | tuple) else []


NO_MIXTURE = "none"
_KEYS = ("path", "weight", "until_step")
_EXAMPLE = '[{ path = "web", weight = 0.9 }, { path = "code", weight = 0.1 }]'


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureList:
    """Tables with a path, a weight above 0 and until_step, or "none"."""

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit; whether phases fit together is judged later."""
        if value == NO_MIXTURE:
            return None
        if not isinstance(value, list) or not value:
            message = f"is no list of tables; it takes {self.describe()}"
            return InvalidValue(rule=WRONG_TYPE, message=message, suggestions=(_EXAMPLE,))
        for number, part in enumerate(cast("list[object]", value), start=1):
            if why := _misfit(part):
                message = f"table {number} {why}"
                return InvalidValue(rule=MIXTURE_PARTS, message=message, suggestions=(_EXAMPLE,))
        return None

    def describe(self) -> str:
        """Return what fits."""
        return 'tables with path, weight and until_step, or "none"'


def mixture_parts(value: object) -> tuple[MixturePart, ...]:
    """Return the parts that a checked value says; none of "none"."""
    if value == NO_MIXTURE:
        return ()
    return tuple(
        MixturePart(
            path=str(part["path"]),
            weight=float(cast("float", part["weight"])),
            until_step=cast("int | None", part.get("until_step")),
        )
        for part in cast("Sequence[Mapping[str, object]]", value)
    )


def _misfit(part: object) -> str:
    """Return why a table does not fit; nothing where it does."""
    if not isinstance(part, dict):
        return "is no table"
    table = cast("dict[str, object]", part)
    if unknown := [key for key in table if key not in _KEYS]:
        return f"has {unknown[0]}, which is not known; it takes {', '.join(_KEYS)}"
    path, weight, until = table.get("path"), table.get("weight"), table.get("until_step")
    if not isinstance(path, str) or not path.strip():
        return "has no path"
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return "has no weight, a number above 0"
    if not isfinite(weight) or not 0 < weight < 1e300:
        return f"has weight = {weight}, which is not above 0"
    if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
        return f"has until_step = {until}, which is no whole number from 1"
    return ""


MIXTURE_PLACES = 2**16  # places of the pattern that sequences follow


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """Give a source a weight, until a step or to the end.

    `path` is what `data.source` takes; `until_step` is the first step, counted from 0, for which
    the weight does not hold any more; None: it holds to the end.
    """

    path: str
    weight: float
    until_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePhase:
    """Hold the weight of every source (0: none of it) until a step; None: to the end."""

    until_step: int | None
    weights: tuple[float, ...]


def sources_of(parts: Sequence[MixturePart]) -> tuple[str, ...]:
    """Return the sources of a mixture, each once, in the order in which they are named."""
    return tuple(dict.fromkeys(part.path for part in parts))


def phases_of(parts: Sequence[MixturePart]) -> tuple[MixturePhase, ...]:
    """Return the phases of a mixture in their order; a source without a weight in one has 0."""
    sources = sources_of(parts)
    ends = {part.until_step for part in parts}
    last: tuple[None, ...] = (None,) if None in ends else ()
    ordered = (*sorted(end for end in ends if end is not None), *last)
    found: list[MixturePhase] = []
    for end in ordered:
        given = {part.path: float(part.weight) for part in parts if part.until_step == end}
        weights = tuple(given.get(source, 0.0) for source in sources)
        found.append(MixturePhase(until_step=end, weights=weights))
    return tuple(found)


def places_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many places of the pattern each weight has; the largest remainders round up."""
    total = sum(weights)
    exact = [MIXTURE_PLACES * weight / total for weight in weights]
    places = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: (places[s] - exact[s], s))
    for source in by_remainder[: MIXTURE_PLACES - sum(places)]:
        places[source] += 1
    return tuple(places)
