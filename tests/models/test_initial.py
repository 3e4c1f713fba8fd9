"""First values: the same model whoever holds which part of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.parameters import ParameterSpec, parameters
from echelon.models.initial import initial_values
from tests.parallel.layouts import GPT2, NANO
from tests.walks import examples

SPECS = {spec.name: spec for spec in parameters(GPT2)}


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
        parts.append(initial_values(GPT2, spec, seed, offset=tuple(offset), size=tuple(size)))
    assert torch.equal(torch.cat(parts, dim=spec.split_dim), whole)


def test_a_rank_that_holds_only_padding_gets_nothing() -> None:
    spec = SPECS["embedding.weight"]
    assert initial_values(GPT2, spec, 0, offset=(37, 0), size=(0, 16)).shape == (0, 16)


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
