# SPDX-License-Identifier: Apache-2.0
"""One setting of run.toml, and kinds of values: what fits, and how a person would say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isinf
from typing import Protocol, cast

from echelon.core.rulebook.config import (
    OUT_OF_RANGE,
    UNKNOWN_CHOICE,
    UNREADABLE_QUANTITY,
    WRONG_TYPE,
)
from echelon.core.rulebook.mesh import DEGREE_AT_LEAST_ONE
from echelon.core.rules import Rule, did_you_mean
from echelon.core.units import EXAMPLES, Dimension, near_quantity, read_quantity

MAX_REAL = 1e300  # Short of infinity, so that a whole number of any length is judged too.
TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number with a fraction",
    "str": "a string",
    "list": "a list",
    "dict": "a table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidValue:
    """Say why a value does not fit: the rule, the end of the sentence "KEY = VALUE", what works."""

    rule: Rule
    message: str
    suggestions: tuple[str, ...] = ()


class ValueType(Protocol):
    """What a setting takes."""

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit, or None where it does."""
        ...

    def describe(self) -> str:
        """Return what fits, in words."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer:
    """A whole number from `minimum` (below it `rule` refuses) to `maximum`, or one of `words`."""

    minimum: int = 1
    maximum: int = 2**40
    words: tuple[str, ...] = ()
    rule: Rule = OUT_OF_RANGE

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if isinstance(value, str) and value in self.words:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            return wrong_type(value, self.describe(), self._works(value))
        if value < self.minimum:
            return InvalidValue(
                rule=self.rule,
                message=f"is below {self.minimum}; it takes {self.describe()}",
                suggestions=(str(self.minimum), *quoted(self.words)),
            )
        if value > self.maximum:
            return InvalidValue(
                rule=OUT_OF_RANGE,
                message=f"is above {self.maximum}; it takes {self.describe()}",
                suggestions=(str(self.maximum), *quoted(self.words)),
            )
        return None

    def describe(self) -> str:
        """Return what fits."""
        if self.maximum >= 2**40:
            return or_words(f"a whole number of at least {self.minimum}", self.words)
        return or_words(f"a whole number from {self.minimum} to {self.maximum}", self.words)

    def _works(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            digits = re.fullmatch(r"\s*\+?(\d+)\s*", value)
            if digits and int(digits[1]) >= self.minimum:
                return (digits[1],)
            if thousands := re.fullmatch(r"\s*(\d+)\s*[kK]\s*", value):
                # 8k are 8192 tokens to one, and 8000 samples to another: both are offered.
                return str(1024 * int(thousands[1])), str(1000 * int(thousands[1]))
            return quoted(did_you_mean(value, self.words) or self.words)
        if isinstance(value, float) and abs(value) < 1e15:
            near = {int(value // 1), int(-(-value // 1))}
            return tuple(str(number) for number in sorted(near) if number >= self.minimum)
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """A number from `minimum` to `maximum`, or one of a few `words`.

    `above` excludes the minimum itself, `below` the maximum.
    """

    minimum: float = 0.0
    maximum: float = float("inf")
    above: bool = False
    below: bool = False
    words: tuple[str, ...] = ()

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit; not-a-number and infinity never do."""
        if isinstance(value, str) and value in self.words:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return wrong_type(value, self.describe(), _number_in(value))
        low = value > self.minimum if self.above else value >= self.minimum
        high = value < self.maximum if self.below else value <= self.maximum
        if low and high and abs(value) < MAX_REAL:
            return None
        return InvalidValue(
            rule=OUT_OF_RANGE,
            message=f"is out of range; it takes {self.describe()}",
            suggestions=quoted(self.words),
        )

    def describe(self) -> str:
        """Return what fits."""
        low = f"{'above' if self.above else 'of at least'} {self.minimum:g}"
        if self.maximum == float("inf"):
            return or_words(f"a number {low}", self.words)
        high = f"{'below' if self.below else 'at most'} {self.maximum:g}"
        return or_words(f"a number {low} and {high}", self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number in the unit of `dimension`, or a text with its own: ``24e9``, ``24 GB``.

    `number` says which numbers fit.
    """

    dimension: Dimension
    number: Integer | Real

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        words = self.number.words
        if not isinstance(value, str) or value in words:
            return self.number.check(value)
        read = self.read(value)
        if isinstance(read, str):
            return InvalidValue(
                rule=UNREADABLE_QUANTITY,
                message=f"cannot be read; it takes {self.describe()}",
                suggestions=self._near(value) or self._examples(),
            )
        return self.number.check(read)

    def read(self, value: object) -> object:
        """Return a value that fits as a number; a text that cannot be read as it is."""
        if not isinstance(value, str) or (read := read_quantity(value, self.dimension)) is None:
            return value
        if not isinstance(self.number, Integer) or isinf(read):
            return read
        # Bytes may be any part of a GB; half a parameter is a slip.
        return value if self.dimension == "numbers" and read != round(read) else round(read)

    def describe(self) -> str:
        """Return what fits."""
        unit = "" if self.dimension == "numbers" else f" in {self.dimension},"
        return f"{self.number.describe()},{unit} or {' or '.join(self._examples())}"

    def _near(self, text: str) -> tuple[str, ...]:
        near = near_quantity(text, self.dimension)
        return () if near is None else quoted((near,))

    def _examples(self) -> tuple[str, ...]:
        return quoted(tuple(one for one in EXAMPLES[self.dimension] if not one[-1].isdigit()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """true or false."""

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if isinstance(value, bool):
            return None
        return wrong_type(value, self.describe(), ("true", "false"))

    def describe(self) -> str:
        """Return what fits."""
        return "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of a few words."""

    options: Collection[str]

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if not isinstance(value, str):
            return wrong_type(value, self.describe(), quoted(tuple(self.options)))
        if value in self.options:
            return None
        return InvalidValue(
            rule=UNKNOWN_CHOICE,
            message=f"is not known{spelling_hint(value, tuple(self.options))}",
            suggestions=quoted(tuple(self.options)),
        )

    def describe(self) -> str:
        """Return what fits."""
        return " or ".join(quoted(tuple(self.options)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string that is not empty and matches `pattern`, which `means` puts in words."""

    pattern: str = r"[^\x00]*[^\x00\s][^\x00]*"
    means: str = "a string that is not empty, without NUL"

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit."""
        if not isinstance(value, str):
            return wrong_type(value, self.describe(), ())
        if re.fullmatch(self.pattern, value):
            return None
        # The parts of the value that a plain name may have.
        near = "-".join(re.findall(r"[A-Za-z0-9_.]+", value)).strip(".-")
        return InvalidValue(
            rule=OUT_OF_RANGE,
            message=f"does not fit; it takes {self.describe()}",
            suggestions=quoted((near,)) if re.fullmatch(self.pattern, near) else (),
        )

    def describe(self) -> str:
        """Return what fits."""
        return self.means


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLists:
    """The block indices of each pipeline stage, or one of a few words."""

    words: tuple[str, ...] = ("auto", "even")

    def check(self, value: object) -> InvalidValue | None:
        """Return why `value` does not fit; which blocks they are is judged with the model."""
        if value in self.words or _is_list_of(value, _is_index_list):
            return None
        return wrong_type(value, self.describe(), (*quoted(self.words), "[[0, 1], [2, 3]]"))

    def describe(self) -> str:
        """Return what fits."""
        return or_words("a list of block indices for each stage", self.words)


def toml_text(value: object) -> str:
    """Return `value` as it would stand in a TOML file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, cast("list[object]", value))) + "]"
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "{ " + ", ".join(f"{key} = {toml_text(item)}" for key, item in pairs) + " }"
    return str(value)


def toml_tables(values: Mapping[str, str]) -> str:
    """Return the tables of settings whose values are TOML already, an empty line between two."""
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, [f"[{table}]"]).append(f"{name} = {value}")
    return "\n\n".join(map("\n".join, tables.values())) + "\n"


def spelling_hint(word: str, known: tuple[str, ...]) -> str:
    """Return ``; did you mean "..."?`` for a misspelt word, or nothing."""
    close = did_you_mean(word, known)
    return f'; did you mean "{close[0]}"?' if close else ""


def _is_list_of(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, cast("list[object]", value)))


def _is_index_list(value: object) -> bool:
    return _is_list_of(value, lambda item: isinstance(item, int) and not isinstance(item, bool))


def wrong_type(value: object, wanted: str, suggestions: tuple[str, ...]) -> InvalidValue:
    """Return that a value is of another type than is wanted."""
    name = type(value).__name__
    found = TYPE_NAMES.get(name, f"a {name}")
    return InvalidValue(
        rule=WRONG_TYPE, message=f"is {found}; it takes {wanted}", suggestions=suggestions
    )


def _number_in(value: object) -> tuple[str, ...]:
    if not isinstance(value, str):
        return ()
    try:
        float(value)
    except ValueError:
        return ()
    return (value.strip(),)


def quoted(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return words as they stand in a TOML file."""
    return tuple(f'"{word}"' for word in words)


def or_words(text: str, words: tuple[str, ...]) -> str:
    """Return what fits, and the words that fit, too."""
    return " or ".join((text, *quoted(words)))


DTYPES = ("fp64", "fp32", "bf16", "fp16")

DEGREE = Integer(rule=DEGREE_AT_LEAST_ONE, maximum=2**20)
COUNT = Integer()
FROM_ZERO = Integer(minimum=0)
POSITIVE = Real(above=True)
FRACTION = Real(below=True, maximum=1.0)
AT_LEAST_TWO = Integer(minimum=2, maximum=10_000)
LOSS_SCALE = Real(above=True, maximum=2.0**32)
EXPERT_COUNT = Integer(minimum=2, maximum=10_000)
EVERY = Integer(words=("never",))
OPTIONAL_COUNT = Integer(words=("none",))
OPTIONAL_REAL = Real(above=True, words=("none",))
BYTES = Quantity(dimension="bytes", number=COUNT)
AUTO_BYTES = Quantity(dimension="bytes", number=Integer(words=("auto",)))
NUMBERS = Quantity(dimension="numbers", number=Integer(maximum=2**60))
NUMBERS_OR_ZERO = Quantity(dimension="numbers", number=FROM_ZERO)
MEMORY_BYTES = Quantity(dimension="bytes", number=Integer(maximum=2**60))
SIZE_OR_ZERO = Quantity(dimension="bytes", number=Real())
BYTES_PER_S = Quantity(dimension="bytes/s", number=POSITIVE)
FLOP_PER_S = Quantity(dimension="FLOP/s", number=POSITIVE)
SECONDS = Quantity(dimension="seconds", number=POSITIVE)
SECONDS_OR_ZERO = Quantity(dimension="seconds", number=Real())


@dataclass(frozen=True, slots=True)
class Setting:
    """Describe one setting; a `path` is relative to the file that sets it."""

    key: str
    kind: ValueType
    default: object
    about: str
    path: bool = False

    @property
    def table(self) -> str:
        """Return the dotted name of the table that holds the setting ("" for none)."""
        return self.key.rpartition(".")[0]

    def examples(self) -> tuple[str, ...]:
        """Return values that fit, in TOML: the default, or the least value."""
        if self.default is not None:
            return (toml_text(self.default),)
        return (str(self.kind.minimum),) if isinstance(self.kind, Integer) else ()
