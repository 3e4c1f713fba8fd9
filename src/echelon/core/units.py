# SPDX-License-Identifier: Apache-2.0
"""Numbers with units, for people. Memory is in GiB (2^30), what links carry in GB (10^9).

A number that rounds up to the next unit is shown in it: 999,999 is ``1.00M``, not ``1000.00k``.
"""

from __future__ import annotations

from collections.abc import Sequence

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
