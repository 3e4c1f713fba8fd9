"""Random numbers by index: who asks does not matter, and they look random."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.parameters import ParameterSpec, parameters
from echelon.models.counter_random import initial_values, make_key, normal, uniform
from tests.parallel.layouts import GPT2, NANO
from tests.parallel.one_device import normal_rectangle
from tests.walks import examples

INDEX = torch.arange(200_000)

SPECS = {spec.name: spec for spec in parameters(GPT2)}


def test_a_key_depends_on_all_parts() -> None:
    keys = {
        make_key("parameter", 0, "a"),
        make_key("parameter", 1, "a"),
        make_key("parameter", 0, "b"),
    }
    keys |= {make_key("parameter0", "a"), make_key(), make_key("a")}
    assert len(keys) == 6
    assert make_key("parameter", 0, "a") == make_key("parameter", 0, "a")
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_known_values_stay() -> None:
    # The same seed must give the same model for ever: another value here is another model.
    key = make_key("parameter", 0, "embedding.weight")
    expected = [0.8134737257016005, 0.7831003770318594, 0.21822804474895946]
    assert uniform(key, torch.arange(3)).tolist() == expected


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**62))
@settings(deadline=None, max_examples=examples(60))
def test_values_are_those_of_split_mix_64_in_whole_numbers(key: int, index: int) -> None:
    bits = (index * 0x9E3779B97F4A7C15 + key) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    bits ^= bits >> 31
    assert float(uniform(key, torch.tensor([index]))) == ((bits >> 11) + 0.5) * 2.0**-53


def unmix(bits: int) -> int:
    """Return what SplitMix64's finaliser turns into `bits`."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        found = bits
        for _ in range(64 // shift):
            found = bits ^ found >> shift
        bits = found * pow(factor, -1, 2**64) % 2**64
    return bits


def test_even_the_outermost_values_are_within_zero_and_one() -> None:
    for bits in (0, 2**64 - 1):
        key = unmix(bits)
        signed = key - 2**64 if key >= 2**63 else key
        values = uniform(signed, torch.zeros(1, dtype=torch.int64))
        assert min(float(values), 1 - float(values)) < 2.0**-52
        assert 0 < values < 1
        assert normal(signed, torch.zeros(1, dtype=torch.int64)).isfinite()


def test_uniform_values_are_uniform() -> None:
    values = uniform(make_key("test"), INDEX)
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 / math.sqrt(12 * len(INDEX))
    counts = torch.histc(values, bins=100, min=0, max=1)
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert abs(chi_squared - 99) < 6 * math.sqrt(2 * 99)


def test_normal_values_are_normal() -> None:
    values = normal(make_key("test"), INDEX)
    root = math.sqrt(len(INDEX))
    assert abs(values.mean()) < 5 / root
    assert abs(values.square().mean() - 1) < 5 * math.sqrt(2) / root
    assert abs(values.pow(3).mean()) < 5 * math.sqrt(15) / root
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96) / root
    assert values.isfinite().all()


def test_neighbours_rows_and_keys_are_not_correlated() -> None:
    values = normal(make_key("test"), INDEX)
    others = normal(make_key("test", 1), INDEX)
    bound = 5 / math.sqrt(len(INDEX))
    for lag in (1, 2, 16, 64, 128, 1024, 4096):
        assert abs((values[lag:] * values[:-lag]).mean()) < bound * 1.1
    assert abs((values * others).mean()) < bound


@given(st.data())
@settings(deadline=None, max_examples=examples(40))
def test_a_rectangle_is_a_part_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    whole = normal_rectangle(5, shape, (0,) * len(shape), shape)
    part = normal_rectangle(5, shape, offset, size)
    cut = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
    assert torch.equal(part, whole[cut])


def test_pieces_of_a_large_rectangle_fit_together() -> None:
    whole = normal_rectangle(5, (300, 700), (0, 0), (300, 700))
    assert torch.equal(whole.reshape(-1), normal(5, torch.arange(300 * 700)))
    assert torch.equal(normal_rectangle(5, (300, 700), (100, 0), (200, 700)), whole[100:])


@given(st.sampled_from(sorted(SPECS)), st.sampled_from((1, 2, 4)), st.integers(0, 3))
@settings(deadline=None, max_examples=examples(60))
def test_slices_equal_the_whole(name: str, tp: int, seed: int) -> None:
    spec = SPECS[name]
    whole = initial_values(GPT2, spec, seed)
    assert whole.shape == spec.shape
    assert whole.dtype == torch.float32
    if spec.split_dim is None:
        return
    parts: list[torch.Tensor] = []
    for rank in range(tp):
        start, end = spec.local_range(tp, rank)
        offset, size = [0] * len(spec.shape), list(spec.shape)
        offset[spec.split_dim], size[spec.split_dim] = start, end - start
        parts.append(initial_values(GPT2, spec, seed, offset=tuple(offset), into=torch.empty(size)))
    assert torch.equal(torch.cat(parts, dim=spec.split_dim), whole)


def test_a_rank_that_holds_only_padding_gets_nothing() -> None:
    spec = SPECS["embedding.weight"]
    assert initial_values(GPT2, spec, 0, offset=(37, 0), into=torch.empty(0, 16)).shape == (0, 16)


def test_seed_and_name_give_other_values() -> None:
    q, k = SPECS["layers.0.attention.q.weight"], SPECS["layers.0.attention.k.weight"]
    first = initial_values(GPT2, q, 0)
    assert torch.equal(first, initial_values(GPT2, q, 0))
    assert not torch.equal(first, initial_values(GPT2, q, 1))
    assert not torch.equal(first, initial_values(GPT2, k, 0))


@pytest.mark.parametrize(("initial", "std"), [("normal", 0.02), ("residual", 0.02 / math.sqrt(16))])
def test_standard_deviations(initial: str, std: float) -> None:
    shape = replace(NANO, layers=8)
    spec = ParameterSpec(
        name="w",
        shape=(256, 256),
        layer=0,
        initial="residual" if initial == "residual" else "normal",
    )
    values = initial_values(shape, spec, 3).double()
    assert float(values.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(values.mean())) < 5 * std / 256


def test_norms_start_at_one_and_biases_at_zero() -> None:
    for spec in parameters(GPT2):
        values = initial_values(GPT2, spec, 0)
        if spec.name.endswith(".bias"):
            assert not values.any()
        elif "norm" in spec.name:
            assert values.eq(1).all()
        else:
            assert values.std() > 0.003


def test_matrices_that_write_to_the_stream_are_scaled_down() -> None:
    residual = {spec.name for spec in parameters(NANO) if spec.initial == "residual"}
    assert residual == {
        f"layers.{i}.{name}.weight" for i in range(4) for name in ("attention.o", "mlp.down")
    }
