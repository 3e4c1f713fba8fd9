# SPDX-License-Identifier: Apache-2.0
"""How terms are shown: rounded so that they sum to the total that is shown, and how they look.

A term has a letter and a hue for bytes, a tone for seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle
from math import floor, fsum, isfinite
from string import ascii_uppercase
from types import MappingProxyType

from echelon.core.units import SECOND_UNITS, binary_unit
from echelon.planner.view.document import Tone

_DIGITS = 5  # significant digits


def require_valid_terms(terms: Mapping[str, float]) -> dict[str, float]:
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
class RoundedTerms:
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


def round_seconds(terms: Mapping[str, float]) -> RoundedTerms:
    """Return terms in seconds as they are printed, in the unit that suits their total."""
    total = fsum(terms.values())
    scale, unit = next((pair for pair in SECOND_UNITS if total * pair[0] >= 1), SECOND_UNITS[-1])
    decimals = max(0, _DIGITS - len(str(int(total * scale))))
    return _round_terms(terms, Fraction(scale), unit, decimals)


def round_bytes(terms: Mapping[str, float]) -> RoundedTerms:
    """Return terms in bytes as they are printed, in powers of 1024."""
    scale, unit = binary_unit(fsum(terms.values()))
    return _round_terms(terms, Fraction(1, scale), unit, 0 if unit == "B" else 2)


def _round_terms(
    terms: Mapping[str, float], scale: Fraction, unit: str, decimals: int
) -> RoundedTerms:
    total = sum(map(Fraction, terms.values()), Fraction())
    counts = apportion(list(terms.values()), round(total * scale * 10**decimals))
    return RoundedTerms(
        counts=dict(zip(terms, counts, strict=True)),
        tenths=dict(zip(terms, apportion(list(terms.values()), 1000), strict=True)),
        unit=unit,
        decimals=decimals,
    )


_LOOKS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "parameters": ("P", 212),
        "gradients": ("G", 350),
        "master parameters": ("M", 20),
        "optimizer": ("O", 36),
        "optimizer state": ("O", 36),
        "gathered": ("U", 185),
        "activations": ("A", 145),
        "working": ("W", 165),
        "logits": ("L", 265),
        "messages": ("T", 225),
        "buffers": ("B", 55),
        "slack": ("S", 310),
        "context": ("C", 85),
        "nccl": ("N", 245),
        "other": ("X", 0),
    }
)
_HUES = (230, 5, 165, 290, 70, 200, 330, 110)  # degrees
MOST_TERMS_SHOWN = 12  # terms
OTHER = "other"

_COMPUTE = frozenset({"matmul", "attention", "memory", "head", "recompute", "optimizer"})
_COMMUNICATION = frozenset({"tensor", "context", "expert", "messages", "gather", "gradients"})

TONES: Mapping[Tone, str] = MappingProxyType(
    {"compute": "compute", "communication": "exposed communication", "idle": "idle"}
)
"""The name of each tone."""

_MARKS: Mapping[Tone, tuple[str, int, float]] = MappingProxyType(
    {"compute": ("=", 212, 0.72), "communication": ("#", 36, 0.72), "idle": (".", 212, 0.06)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermStyle:
    """Say how a kind of bytes is shown: its upper-case letter, and its hue in degrees."""

    name: str
    letter: str
    hue: int


def tone_mark(tone: Tone) -> tuple[str, int, float]:
    """Return the mark of a tone in a terminal, its hue in degrees and its saturation."""
    return _MARKS[tone]


def tone_of(term: str) -> Tone:
    """Return what a term of a step is; what is neither computed nor sent is waited for."""
    if term in _COMPUTE:
        return "compute"
    return "communication" if term in _COMMUNICATION else "idle"


def term_styles(names: Iterable[str]) -> tuple[TermStyle, ...]:
    """Return a look for each name, no letter twice: the usual ones, then what is left."""
    wanted, hues = list(dict.fromkeys(names)), cycle(_HUES)
    # By letter, so that none is there twice: of two names with the same look the first one has it.
    usual = {_LOOKS[name][0]: name for name in reversed(wanted) if name in _LOOKS}
    letters = {name: letter for letter, name in usual.items()}
    found: list[TermStyle] = []
    for name in wanted:
        if name not in letters:
            own = (char for char in name.upper() if char in ascii_uppercase)
            taken = set(letters.values())
            letters[name] = next(one for one in (*own, *ascii_uppercase) if one not in taken)
        hue = _LOOKS[name][1] if name in _LOOKS else next(hues)
        found.append(TermStyle(name=name, letter=letters[name], hue=hue))
    return tuple(found)
