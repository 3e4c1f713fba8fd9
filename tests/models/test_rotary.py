"""Rotary positions against complex numbers; Llama 3.1's scaling against its formula by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from echelon.core.model_shape import RopeScaling
from echelon.models.operations import Operations
from echelon.models.rotary import rotary_tables, scale_frequencies
from tests.parallel.layouts import NANO

LLAMA3 = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)


def test_a_half_pair_is_a_complex_number_turned_by_its_position() -> None:
    shape = replace(NANO, head_dim=8, rope_theta=500.0)
    length = 11
    x = torch.randn(length, 2, 3, 8, dtype=torch.float64)
    cos, sin = rotary_tables(shape, torch.arange(length), torch.float64)
    turned = Operations().rotate(x, cos, sin)
    for t in range(length):
        for pair in range(4):
            angle = t * 500.0 ** (-2 * pair / 8)
            z = torch.complex(x[t, ..., pair], x[t, ..., pair + 4]) * complex(
                math.cos(angle), math.sin(angle)
            )
            torch.testing.assert_close(turned[t, ..., pair], z.real, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(turned[t, ..., pair + 4], z.imag, rtol=1e-13, atol=1e-13)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 4, dtype=torch.float64).unbind()
    cos, sin = rotary_tables(NANO, torch.arange(20), torch.float64)
    every = Operations().rotate(torch.stack((q, k)).expand(20, 1, 2, 4), cos, sin)[:, 0]
    scores = every[:, 0] @ every[:, 1].t()
    for distance in range(5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def by_hand(frequency: float, scaling: RopeScaling) -> float:
    """Return Llama 3.1's frequency, as its published reference code writes it: by wavelengths."""
    wavelength = 2 * math.pi / frequency
    low = scaling.original_positions / scaling.low_frequency_factor
    high = scaling.original_positions / scaling.high_frequency_factor
    if wavelength < high:
        return frequency
    if wavelength > low:
        return frequency / scaling.factor
    smooth = (scaling.original_positions / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_llama_scaling_stretches_low_keeps_high_and_blends_between() -> None:
    frequencies = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = scale_frequencies(frequencies, LLAMA3)
    ratio = scaled / frequencies
    assert ratio[0] == 1.0
    assert ratio[-1] == 1 / 8
    assert ((ratio > 1 / 8) & (ratio < 1)).sum() >= 3
    expected = [by_hand(float(f), LLAMA3) for f in frequencies]
    torch.testing.assert_close(scaled, torch.tensor(expected, dtype=torch.float64))


def test_tables_use_the_scaling() -> None:
    shape = replace(NANO, head_dim=128, rope_theta=500_000.0, rope_scaling=LLAMA3)
    cos, _ = rotary_tables(shape, torch.tensor([0, 1000]), torch.float64)
    slowest = by_hand(500_000.0 ** -(126 / 128), LLAMA3)
    assert float(cos[1, -1]) == pytest.approx(math.cos(1000 * slowest), abs=1e-12)
    assert cos[0].eq(1).all()


def test_tables_are_rounded_once_from_float64() -> None:
    exact = rotary_tables(NANO, torch.arange(4096), torch.float64)
    short = rotary_tables(NANO, torch.arange(4096), torch.float32)
    for wide, narrow in zip(exact, short, strict=True):
        assert narrow.dtype == torch.float32
        assert torch.equal(wide.float(), narrow)
