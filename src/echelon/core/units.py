# SPDX-License-Identifier: Apache-2.0
"""Numbers with units, for people: as reports show them, and as run files take them.

Memory is in GiB (2^30), what links carry in GB (10^9).

A number that rounds up to the next unit is shown in it: 999,999 is ``1.00M``, not ``1000.00k``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import isinf
from string import ascii_letters
from typing import Literal

SECOND_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
"""How many there are in a second, and the name of each."""
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SENT = ("B", "kB", "MB", "GB", "TB")
_DECIMAL = ("", "k", "M", "B", "T")

GB = 1e9  # bytes
GIB = 2**30  # bytes


def binary_bytes(count: float) -> str:
    """Return bytes held, in powers of 1024: ``61.80 GiB``."""
    value, unit = _scale(count, 1024, BINARY_UNITS)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def gib(count: float) -> str:
    """Return bytes held, in GiB without the unit: ``61.8``, or ``0.29`` below one.

    For columns and sums that name the unit once.
    """
    value = count / GIB
    return f"{value:,.1f}" if abs(value) >= 0.95 else f"{value:.2g}"


def binary_unit(largest: float) -> tuple[int, str]:
    """Return the bytes of the unit that suits numbers up to `largest`, and its name."""
    power = 0
    while largest / 1024**power >= 1024 and power < len(BINARY_UNITS) - 1:
        power += 1
    return 1024**power, BINARY_UNITS[power]


def decimal_bytes(count: float) -> str:
    """Return bytes sent, in powers of 1000 as links are rated: ``286.10 MB``."""
    value, unit = _scale(count, 1000, _SENT)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def short_count(count: float) -> str:
    """Return a count in thousands steps: ``8.03B`` parameters, ``412.30k`` tokens."""
    value, unit = _scale(count, 1000, _DECIMAL)
    return f"{value:.2f}{unit}" if unit else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return seconds as ``3h12m``, ``4m05s`` or ``2.31s``."""
    if round(seconds, 2) < 60:
        return f"{seconds:.2f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _scale(count: float, step: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while round(abs(count), 2) >= step and power < len(units) - 1:
        count /= step
        power += 1
    return count, units[power]


Dimension = Literal["bytes", "bytes/s", "FLOP/s", "seconds", "numbers"]
"""What a quantity is, and the unit in which it is kept."""

_LETTERS = f"{ascii_letters}/"
_BITS_OF_A_BYTE = 8  # bits
_DECIMAL_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SIZES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL_FACTORS | _BINARY).items()}
_BIT_RATES = {
    f"{prefix}{word}": factor / _BITS_OF_A_BYTE
    for prefix, factor in _DECIMAL_FACTORS.items()
    for word in ("b/s", "bit/s", "bps")
}
_UNITS: Mapping[Dimension, Mapping[str, float]] = {
    "bytes": _SIZES,
    "bytes/s": {f"{unit}/s": factor for unit, factor in _SIZES.items()} | _BIT_RATES,
    "FLOP/s": {
        f"{prefix}{word}": factor
        for prefix, factor in _DECIMAL_FACTORS.items()
        for word in ("FLOP/s", "FLOPS", "FLOPs")
    },
    "numbers": {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "b": 1e9, "T": 1e12},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
}
"""How much of the unit of its dimension each unit is."""

EXAMPLES: Mapping[Dimension, tuple[str, ...]] = {
    "bytes": ("24 GB", "80 GiB", "24e9"),
    "bytes/s": ("50 GB/s", "400 Gb/s", "50e9"),
    "FLOP/s": ("989 TFLOP/s", "989e12"),
    "numbers": ("7B", "8.03B", "7e9"),
    "seconds": ("8 us", "10 min", "8e-6"),
}
"""How one may write a quantity."""


def near_quantity(text: str, dimension: Dimension) -> str | None:
    """Return a quantity whose unit differs in case only from one of its dimension, as that one.

    ``80 gb`` are ``80 GB``; None where that is not the only one, or nothing is near.
    """
    number, unit = text.rstrip(_LETTERS).strip(), text[len(text.rstrip(_LETTERS)) :]
    found = {one for one in _UNITS[dimension] if one.lower() == unit.lower()}
    near = f"{number} {found.pop()}" if len(found) == 1 else ""
    return near if near and read_quantity(near, dimension) is not None else None


def read_quantity(text: str, dimension: Dimension) -> float | None:
    """Return a quantity in the unit of its dimension; None where it cannot be read.

    A number without a unit is in that unit already.
    """
    match = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(\D*?)\s*", text)
    if match is None:
        return None
    factor = _UNITS[dimension].get(match[2]) if match[2] else 1.0
    if factor is None:
        return None
    number = float(match[1].rstrip("_"))
    if isinf(number):
        return number
    # 5 us are 5e-06 and not 4.9999999999999996e-06, as the product of two floats would be.
    return float(Decimal(repr(number)) * Decimal(repr(factor)))
