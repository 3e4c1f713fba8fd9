"""Numbers with units, for people: GB (10^9) and GiB (2^30) are never mixed, nor bits and bytes."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "B", "T")


def binary_bytes(count: float) -> str:
    """Return bytes held, in powers of 1024: ``61.8 GiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_BINARY) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} {_BINARY[power]}" if power == 0 else f"{count:.2f} {_BINARY[power]}"


def decimal_bytes(count: float) -> str:
    """Return bytes sent, in powers of 1000 as links are rated: ``286.1 MB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def short_count(count: float) -> str:
    """Return a count in thousands steps: ``8.03B`` parameters, ``412.3k`` tokens."""
    power = 0
    while abs(count) >= 1000 and power < len(_DECIMAL) - 1:
        count /= 1000
        power += 1
    return f"{count:.0f}" if power == 0 else f"{count:.2f}{_DECIMAL[power]}"


def duration(seconds: float) -> str:
    """Return seconds as ``3h12m``, ``4m05s`` or ``2.31s``."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60}h{minutes % 60:02d}m"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{seconds:.2f}s"
