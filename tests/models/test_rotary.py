"""Rotary positions against complex numbers; Llama 3.1's scaling against its formula by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from echelon.config.model.architectures.common import stretch_keys
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
    positions = scaling.original_positions
    low_factor, high_factor = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert positions is not None
    assert low_factor is not None
    assert high_factor is not None
    low, high = positions / low_factor, positions / high_factor
    if wavelength < high:
        return frequency
    if wavelength > low:
        return frequency / scaling.factor
    smooth = (positions / wavelength - low_factor) / (high_factor - low_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_llama_scaling_stretches_low_keeps_high_and_blends_between() -> None:
    frequencies = 500_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    scaled = scale_frequencies(frequencies, LLAMA3, 500_000.0, 0)
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


@pytest.mark.parametrize("length", [32, 64])
@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=8.0),
        RopeScaling(kind="yarn", factor=4.0, original_positions=32),
        RopeScaling(kind="yarn", factor=4.0, original_positions=32, attention_factor=1.5),
        RopeScaling(
            kind="yarn",
            factor=32.0,
            original_positions=512,
            slow_turns=2.0,
            fast_turns=9.0,
            whole_dims=False,
        ),
        RopeScaling(
            kind="longrope",
            factor=2.0,
            original_positions=32,
            short_factors=(1.0, 1.1, 1.2, 1.3),
            long_factors=(2.0, 3.0, 4.0, 8.0),
        ),
    ],
    ids=lambda one: f"{one.kind}-{one.factor:g}",
)
def test_every_stretch_is_that_of_transformers(scaling: RopeScaling, length: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10_000.0, **stretch_keys(scaling)},
    )
    stretch = ROPE_INIT_FUNCTIONS[scaling.kind]
    frequencies_E, factor = stretch(config, torch.device("cpu"), seq_len=length)
    shape = replace(NANO, head_dim=8, rope_scaling=scaling)
    positions = torch.arange(length)
    cos, sin = rotary_tables(shape, positions, torch.float64, length=length)
    angles = torch.outer(positions.double(), frequencies_E.double())
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0.0, atol=1e-5)
