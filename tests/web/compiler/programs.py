"""Small functions that are compiled and run beside Python, and some that can't be."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, ClassVar, cast

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Hold two numbers, of which one need not be said."""

    x: float
    y: float = 2.5

    @property
    def sum(self) -> float:
        """Return both."""
        return self.x + self.y


def whole_numbers(a: float, b: float) -> list[float]:
    """Return quotients and remainders."""
    return [a // b, a % b, -a // b, a % -b, -(-a // b), a**2, round(a), round(-b)]


def truths(a: float, b: float) -> list[Any]:
    """Return what comparisons and truth come to."""
    rows = {"a": a} if a else {}
    return [
        *(0 < a < b, a == b, not a, a and b, a or b, bool(rows), len(rows)),
        *(a in (1.0, 2.0), None if a > b else 1, (a - a) or "none"),
    ]


def bits(a: float, b: float) -> list[float]:
    """Return powers of two that divide whole numbers, also of more than 32 bits."""
    whole, other = int(a * 2**20), int(b * 3)
    return [whole & -whole, other & -other, float((a > b) | (a > 1)), float(~(np.asarray(a) > b))]


def records(a: float, b: float) -> list[float]:
    """Return what records, changes of them, and dicts hold."""
    one = Point(x=a)
    two = replace(one, y=b)
    terms = {"x": a, "y": b} | {"x": 3.0}
    terms["z"] = one.sum
    return [one.sum, two.sum, *terms.values(), *(len(name) for name in terms), terms.pop("z")]


class TooLarge(Exception):
    """Say that a number is too large."""


def below(limit: float, *numbers: float, scale: float = 1.0) -> Iterator[float]:
    """Yield scaled numbers until one is too large."""
    for number in numbers:
        if number > limit:
            raise TooLarge(number)
        yield number * scale


def until_errors(limit: float, rows: list[list[float]]) -> Iterator[float]:
    """Yield numbers of each row until one is too large."""
    for row in rows:
        try:
            yield from below(limit, *row, scale=cast(float, 2.0))
        except TooLarge:
            continue


def errors(a: float, b: float) -> list[float]:
    """Return what generators yield until they fail, and arguments by name beside any number."""
    return [*until_errors(3.0, [[a, b], [b, a], [1.0]]), *below(1e10, b), *below(1e10, scale=a)]


def arrays(a: float, b: float) -> list[float]:
    """Return what NumPy makes of numbers."""
    near = np.where(np.asarray(a) > b, a, b) + np.minimum(a, b) * np.maximum(a, 0.5)
    return [
        near,
        np.sqrt(abs(a)),
        np.ceil(a),
        np.clip(a, 0.5, 2.0),
        np.any(np.asarray(a) > 0) * 1.0,
    ]


def loops(a: float, b: float) -> list[Any]:
    """Return what loops, generators and functions inside of functions come to."""
    found: list[Any] = []

    def scaled(value: float, by: float = 2.0) -> float:
        return value * by

    for place, (one, other) in enumerate(zip((a, b), (b, a), strict=True)):
        if one == other:
            continue
        found.append(scaled(one, by=place + 1.0) + other)
    found += [*_counted(3)]
    return [*found, sum(n * n for n in range(4) if n % 2), f"{int(a)} of {int(b)}"]


def _counted(most: int) -> Iterator[int]:
    for number in range(most):
        if number == 2:
            return
        yield number


class Side(StrEnum):
    """Name a side."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class Tile:
    """Hold what a set looks up by its parts."""

    side: Side
    number: float

    def __str__(self) -> str:
        """Return the first letter of the side."""
        return "L" if self.side is Side.LEFT else "R"

    def named(self, before: str = "", *, after: str = "") -> str:
        """Return the tile between two words."""
        return f"{before}{self}{after}"


LEFT_TILE = Tile(Side.LEFT, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Hold a number, with what its class says of it."""

    word: ClassVar[str] = "base"
    step: ClassVar[int] = 1
    number: float

    @classmethod
    def grown(cls, by: float) -> float:
        """Return a number and the step of the class."""
        return by + cls.step

    def told(self) -> list[Any]:
        """Return what the class, and what its method, comes to."""
        return [self.word, self.grown(self.number)]


class Wide(Base):
    """Take larger steps."""

    word = "wide"
    step = 10


KINDS = {"base": Base, "wide": Wide}


def keys_with_parts(a: float, b: float) -> list[Any]:
    """Return what tuples and records that are equal find."""
    seen: dict[tuple[float, float], list[float]] = {}
    for one in (a, b, a):
        seen.setdefault((one, b), []).append(one)
    tiles = {Tile(Side.LEFT, a), Tile(Side("left"), a), Tile(Side.RIGHT, a)}
    tiles.add(Tile(Side.RIGHT, b))
    first = Tile(Side.LEFT, a) == Tile(Side.LEFT, b)
    found = [len(seen), len(tiles), Tile(Side.LEFT, b) in tiles, seen.get((b, a), 0), first]
    kept = seen.pop((a, b), None)
    return [*found, kept, len(seen), {one % 2 for one in (a, b)} == {a % 2, b % 2}]


def lists_that_change(a: float, b: float) -> list[Any]:
    """Return what is left of lists that are added to, taken from and put in order."""
    rows = [[a, b], [b, a], [a, a]]
    rows.sort(key=lambda row: (row[1], -row[0]))
    waiting = deque((a, b))
    waiting.append(waiting.popleft())
    counts: Counter[str] = Counter()
    places = [0] * 3
    while waiting:
        word = "x" if waiting.pop() > 1 else "y"
        counts[word] += 1
        spot = len(waiting)
        places[spot] += 2
        places[-1] = 7
    flat = [one for row in rows for one in row]
    flat.remove(b)
    flat.insert(1, 0.5)
    flat.extend(number for number in (a, b) if number > 0)
    later = iter(flat)
    return [
        *(rows, places, counts["x"], counts["y"], counts["z"], next(later), next(later), flat),
        *(sorted([a, b], reverse=True), [*reversed(flat)], [*zip(flat, places, strict=False)]),
        *([*accumulate([a, b], initial=0)], [*divmod(a, 2)], [*enumerate(places, 1)]),
        *(max(rows, key=len, default=()), min([], default=a), max((a, b), default=0)),
        *(next((one for one in flat if one > b), None), ("ab" * 2).upper(), "A".isupper()),
    ]


def classes_and_their_members(a: float, b: float) -> list[Any]:
    """Return what records, classes that are values, and enumerations say."""
    made = KINDS["wide" if a > b else "base"](number=a)
    tile = Tile(Side.RIGHT, b)
    named = (count := len(made.word)) > 1 and tile.named("<", after=">")
    return [
        *(*made.told(), KINDS["wide"].grown(b), named, count, str(tile), tile.side.value),
        *(LEFT_TILE.named(after="!"), tile.side is not Side.LEFT, "x".ljust(3)),
        json.dumps({"a": [1, "\u00e9"], "b": [], "c": True}),
    ]


@dataclass(frozen=True, slots=True)
class Span:
    """Hold two ends: what is between them is in it."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        """Return whether a value is between the ends."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """Return both ends."""
        return f"{self.low:.0f} to {self.high:.0f}"


def own_meanings(a: float, b: float) -> list[Any]:
    """Return what records are beside each other, what is in them, and what they are as text."""
    span = Span(a, b)
    same = Span(low=a, high=b)
    return [span == same, span != Span(b, a), a in span, 2.0 not in span, f"{span}", str(same)]


def formats(a: float, b: float) -> list[str]:
    """Return numbers with digits behind the point, halves to the even one, with commas."""
    found = [f"{a:.0f}, {b:.2f}, {1000.0 * a:,.1f}, {int(12345.0 * b):,}".upper()]
    for half in (0.5, 1.5, 2.5, 62.5, 0.25, 0.75, 0.125, 0.15, 1.005, 1234567.5):
        found.append(f"{half * a:.0f} {half:.1f} {half:,.2f} {-half:.0f}")
    return found


PROGRAMS = (
    *(whole_numbers, truths, bits, records, errors, arrays, loops, own_meanings, formats),
    *(keys_with_parts, lists_that_change, classes_and_their_members),
)


def with_a_file(a: float) -> str:
    """Open a file, which a page can't."""
    with open(str(a)) as file:
        return file.read()


def with_an_unknown_call(a: float) -> float:
    """Call what the compiler does not know."""
    return float(np.linalg.norm(a))


def with_else_of_a_loop(a: float) -> float:
    """Do something where a loop has not been left."""
    while a < 1:
        if a == 0:
            break
        a += 1
    else:
        a = 0
    return a


def with_a_place_that_is_computed_twice(a: float) -> list[float]:
    """Change what a call names."""
    rows = [a]
    rows[int(a)] += 1
    return rows


def with_an_order_of_its_own(a: float) -> float:
    """Ask for the largest with an argument that is not known."""
    return max([a], largest=True)  # pyright: ignore


def with_del_of_an_item(a: float) -> dict[str, float]:
    """Take an item away."""
    rows = {"a": a}
    del rows["a"]
    return rows


def with_identity(a: float, b: float) -> bool:
    """Ask for identity."""
    return a is b


def with_a_large_number(a: float) -> float:
    """Use a number that a page rounds."""
    return a + 2**60 + LARGE


def with_a_star(**a: float) -> float:
    """Take any arguments by name."""
    return sum(a.values())


LARGE = 2**60 + 1
REFUSED = (
    with_a_file,
    with_an_unknown_call,
    with_else_of_a_loop,
    with_a_place_that_is_computed_twice,
    with_an_order_of_its_own,
    with_del_of_an_item,
    with_identity,
    with_a_large_number,
    with_a_star,
)
