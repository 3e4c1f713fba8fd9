"""Small functions that are compiled and run beside Python, and some that can't be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
    return [a // b, a % b, -a // b, a % -b, -(-a // b), a**2]


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


PROGRAMS = (whole_numbers, truths, bits, records, arrays, loops, own_meanings, formats)


def with_a_file(a: float) -> str:
    """Open a file, which a page can't."""
    with open(str(a)) as file:
        return file.read()


def with_an_unknown_call(a: float) -> float:
    """Call what the compiler does not know."""
    return float(np.linalg.norm(a))


def with_while(a: float) -> float:
    """Repeat something without an end that is known."""
    while a < 1:
        a += 1
    return a


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
    with_while,
    with_identity,
    with_a_large_number,
    with_a_star,
)
