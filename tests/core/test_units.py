"""Numbers for people: powers of 1024 for what is held, of 1000 for what is sent."""

from __future__ import annotations

import pytest

from echelon.core.units import binary_bytes, decimal_bytes, duration, short_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (80 * 2**30, "80.00 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (5 * 2**60, "5120.00 PiB"),
    ],
)
def test_bytes_held(count: float, text: str) -> None:
    assert binary_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (5_368_709_120, "5.37 GB"), (9e12, "9.00 TB")],
)
def test_bytes_sent(count: float, text: str) -> None:
    assert decimal_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (412_300, "412.30k"), (8.03e9, "8.03B"), (999_999, "1.00M")],
)
def test_counts(count: float, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"),
        (2.314, "2.31s"),
        (59.994, "59.99s"),
        (59.996, "1m00s"),
        (245, "4m05s"),
        (3599.4, "59m59s"),
        (3599.6, "1h00m"),
        (11_520, "3h12m"),
        (7_199, "2h00m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
