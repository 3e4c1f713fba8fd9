"""Adapters: their scale, their parameters, and what is frozen below them."""

from __future__ import annotations

from dataclasses import replace

from echelon.core.choices.lora import Lora
from echelon.core.parameters import (
    base_shape,
    is_adapter,
    num_parameters,
    num_trained_parameters,
    parameters,
)
from tests.parallel.layouts import NANO

LORA = Lora(rank=4, alpha=8.0, targets=("q", "o", "down"))


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    assert LORA.scale == 2.0
    assert replace(LORA, rslora=True).scale == 4.0


def test_adapters_are_split_as_their_layers_and_all_else_is_frozen() -> None:
    shape = replace(NANO, lora=LORA)
    specs = {spec.name: spec for spec in parameters(shape)}
    assert all(spec.frozen is not is_adapter(name) for name, spec in specs.items())
    q_a, q_b = (specs[f"layers.0.attention.q.lora_{one}.weight"] for one in "ab")
    assert (q_a.shape, q_a.split_dim) == ((4, NANO.hidden), None)
    assert (q_b.shape, q_b.split_dim) == ((NANO.query_dim, 4), 0)
    down_a, down_b = (specs[f"layers.1.mlp.down.lora_{one}.weight"] for one in "ab")
    assert (down_a.shape, down_a.split_dim) == ((4, NANO.ffn), 1)
    assert (down_b.shape, down_b.split_dim) == ((NANO.hidden, 4), None)
    assert base_shape(shape) == NANO
    own = sum(spec.numel for name, spec in specs.items() if is_adapter(name))
    assert num_trained_parameters(shape) == own == num_parameters(shape) - num_parameters(NANO)
