"""Groups of layers that share scales: the same on every rank, and all linear layers are in one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import LatentAttention
from echelon.layout.fp8_groups import fp8_group_of, fp8_groups
from tests.parallel.layouts import DEEPSEEK, GPT2, MIXTRAL, NANO


def test_layers_that_read_the_same_input_are_a_group() -> None:
    names = fp8_groups(replace(NANO, layers=1))
    parts = ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    assert names == tuple(f"layers.0.{part}" for part in parts)
    assert fp8_groups(replace(GPT2, layers=1)) == names


def test_all_experts_are_one_and_those_of_every_token_another() -> None:
    assert fp8_group_of("layers.3.mlp.experts.7.up.weight") == "layers.3.mlp.experts.gate_up"
    assert fp8_group_of("layers.3.mlp.shared.down.weight") == "layers.3.mlp.shared.down"
    for model in (MIXTRAL, DEEPSEEK):
        assert any(name.endswith("experts.down") for name in fp8_groups(model))


def test_layers_that_lead_up_from_narrow_vectors_are_groups_of_their_own() -> None:
    latent = LatentAttention(query_rank=24, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
    names = fp8_groups(replace(NANO, layers=1, latent=latent, head_dim=16))
    assert {name.rpartition(".")[2] for name in names} == {
        *("q_up", "kv_up", "o", "gate_up", "down")
    }


@pytest.mark.parametrize(
    "name",
    [
        *("embedding.weight", "head.weight", "layers.0.attention.q.bias"),
        *("layers.0.attention.q_down.weight", "layers.0.mlp.router.weight", "layers.0.mlp_norm"),
    ],
)
def test_what_is_never_in_8_bits_is_in_none(name: str) -> None:
    assert fp8_group_of(name) is None
