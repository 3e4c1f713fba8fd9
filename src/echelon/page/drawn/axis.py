# SPDX-License-Identifier: Apache-2.0
"""Round numbers on an axis: where marks stand, and what they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor, log10

from echelon.core.units import binary_unit

MOST = 1e300
"""What is larger than any value that is drawn, in whatever unit."""
_SECONDS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAxis:
    """Hold where values from `low` to `high` lie, and the round ones with their names."""

    low: float
    high: float
    marks: tuple[tuple[float, str], ...]
    unit: str

    def place(self, value: float, begin: float, end: float) -> float:
        """Return where between the pixels `begin` and `end` a value lies."""
        return begin + (end - begin) * (value - self.low) / (self.high - self.low)


def value_axis(low: float, high: float, unit: str, *, count: int = 5) -> DrawnAxis:
    """Return an axis that reaches from a round number to a round number around both values."""
    low, high = _apart(low, high)
    size = 1.0
    if unit == "bytes":
        size, unit = binary_unit(high)
    step = round_step((high - low) / size / count)
    first, last = floor(low / size / step), ceil(high / size / step)
    marks = _marks(first * step, last * step, step, _named(step))
    return DrawnAxis(
        low=first * step * size,
        high=last * step * size,
        marks=tuple((at * size, said) for at, said in marks),
        unit=unit,
    )


def step_axis(first: int, last: int, *, count: int = 8) -> DrawnAxis:
    """Return an axis of whole steps, which begins and ends with the first and the last."""
    low, high = (float(first), float(last)) if last > first else (first - 0.5, first + 0.5)
    step = max(1.0, round_step((high - low) / count))
    return DrawnAxis(
        low=low, high=high, marks=_marks(low, high, step, lambda at: f"{at:.0f}"), unit=""
    )


def seconds_text(seconds: float, span: float) -> str:
    """Return seconds with the unit and the digits that a scale of `span` seconds needs."""
    scale, unit = next((one for one in _SECONDS if abs(span) * one[0] >= 1), _SECONDS[0])
    whole = floor(log10(abs(span * scale))) + 1 if span else 1
    return f"{seconds * scale:,.{max(0, 4 - max(1, whole))}f} {unit}"


def can_be_drawn(value: float | None) -> bool:
    """Return whether a value has a place on an axis: it is finite, and sums of such are."""
    return value is not None and -MOST < value < MOST


def round_step(least: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that is no less than `least`."""
    power = 10.0 ** floor(log10(least))
    return next(one * power for one in (1, 2, 5, 10) if one * power >= least * (1 - 1e-9))


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return two numbers that an axis can lie between, near to what was asked for."""
    if not (can_be_drawn(low) and can_be_drawn(high)):
        return 0.0, 1.0
    least = max(abs(low), abs(high)) * 1e-9 or 1e-12
    if high - low >= least:
        return low, high
    around = max(abs(low), abs(high)) * 0.05 or 0.5
    return low - around, high + around


def _marks(
    low: float, high: float, step: float, name: Callable[[float], str]
) -> tuple[tuple[float, str], ...]:
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return tuple((one * step, name(one * step)) for one in range(first, last + 1))


def _named(step: float) -> Callable[[float], str]:
    """Return what names the marks of an axis, with the digits that tell them apart."""
    digits = max(0, -floor(log10(step) + 1e-9))
    if digits > 6 or step >= 1e7:
        return lambda at: "0" if abs(at) < step / 2 else f"{at:.4g}"
    return lambda at: f"{0.0 if abs(at) < step / 2 else at:,.{digits}f}"
