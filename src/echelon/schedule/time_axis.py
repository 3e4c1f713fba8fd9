# SPDX-License-Identifier: Apache-2.0
"""Round times for an axis."""

from __future__ import annotations

from math import ceil, floor, log10

_MOST_TICKS = 12  # ticks
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))


def ticks(span: float, unit: str) -> tuple[float, tuple[float, ...], str]:
    """Return a scale, the times of the ticks from 0 to `span`, and the name of a scaled unit.

    Seconds become ms, us or ns where `span` is short; a `unit` of another name is left as it is. A
    label is a tick times the scale.
    """
    if not span > 0:
        return 1.0, (0.0,), unit
    scale, name = 1.0, unit
    if unit == "s":
        scale, name = next((pair for pair in _UNITS if span * pair[0] >= 1), _UNITS[-1])
    step = _step(span * scale)
    count = floor(span * scale / step * (1 + 1e-9))
    return scale, tuple(step * k / scale for k in range(count + 1)), name


def _step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that a dozen steps reach at least to `span`."""
    least = span / _MOST_TICKS
    power = 10.0 ** floor(log10(least))
    for factor in (1, 2, 5, 10):
        if factor * power >= least * (1 - 1e-9):
            return factor * power
    return float(ceil(least))
