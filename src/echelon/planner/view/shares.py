"""Rounded numbers that add up: the terms that are shown sum to the total that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, fsum, isfinite

_SECONDS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
_BYTES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_DIGITS = 5


def checked(terms: Mapping[str, float]) -> dict[str, float]:
    """Return terms as floats; ValueError for one that is negative, infinite or no number."""
    numbers = {name: float(value) for name, value in terms.items()}
    for name, value in numbers.items():
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"term {name!r} is {value}, not a number from 0 up")
    return numbers


def apportion(values: Sequence[float], units: int) -> list[int]:
    """Return whole numbers that sum to `units` and are as near to the shares of `values` as can be.

    What rounding down leaves goes to the largest remainders (Hamilton's method).
    """
    total = sum(map(Fraction, values), Fraction())
    if not total:
        return [0] * len(values)
    exact = [Fraction(value) * units / total for value in values]
    counts = [floor(share) for share in exact]
    order = sorted(range(len(values)), key=lambda place: counts[place] - exact[place])
    for place in order[: units - sum(counts)]:
        counts[place] += 1
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Hold terms as they are printed: `counts` of 10 ** -`decimals` `unit`, and tenths of 1 %."""

    counts: dict[str, int]
    tenths: dict[str, int]
    unit: str
    decimals: int

    def value(self, *names: str) -> str:
        """Return what `names` (all terms if none) are together, with the unit."""
        count = sum(self.counts[name] for name in names or self.counts)
        whole, rest = divmod(count, 10**self.decimals)
        digits = f".{rest:0{self.decimals}d}" if self.decimals else ""
        return f"{whole:,}{digits} {self.unit}"

    def share(self, *names: str) -> str:
        """Return the share of `names` in the total, such as ``12.5 %``."""
        tenths = sum(self.tenths[name] for name in names or self.tenths)
        return f"{tenths // 10}.{tenths % 10} %"


def shown_seconds(terms: Mapping[str, float]) -> Shown:
    """Return terms in seconds as they are printed, in the unit that suits their total."""
    total = fsum(terms.values())
    scale, unit = next((pair for pair in _SECONDS if total * pair[0] >= 1), _SECONDS[-1])
    decimals = max(0, _DIGITS - len(str(int(total * scale))))
    return _shown(terms, Fraction(scale), unit, decimals)


def shown_bytes(terms: Mapping[str, float]) -> Shown:
    """Return terms in bytes as they are printed, in powers of 1024."""
    scale, unit = byte_unit(fsum(terms.values()))
    return _shown(terms, Fraction(1, scale), unit, 0 if unit == "B" else 2)


def byte_unit(largest: float) -> tuple[int, str]:
    """Return the bytes of the unit that suits numbers up to `largest`, and its name."""
    return next((pair for pair in _BYTES if largest >= pair[0]), _BYTES[-1])


def _shown(terms: Mapping[str, float], scale: Fraction, unit: str, decimals: int) -> Shown:
    total = sum(map(Fraction, terms.values()), Fraction())
    counts = apportion(list(terms.values()), round(total * scale * 10**decimals))
    return Shown(
        counts=dict(zip(terms, counts, strict=True)),
        tenths=dict(zip(terms, apportion(list(terms.values()), 1000), strict=True)),
        unit=unit,
        decimals=decimals,
    )
