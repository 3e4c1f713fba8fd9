"""The table of parameters: known totals, shapes of tensor slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import (
    ParameterSpec,
    family_of,
    num_active_parameters,
    num_parameters,
    parameters,
)
from tests.parallel.layouts import GPT2, NANO, QWEN
from tests.walks import examples

LLAMA2_7B = ModelShape(
    name="llama2-7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=11008,
    vocab=32000,
    max_positions=4096,
)
LLAMA3_8B = replace(LLAMA2_7B, name="llama3-8b", kv_heads=8, ffn=14336, vocab=128_256)
GPT2_SMALL = replace(
    GPT2,
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    ffn=3072,
    vocab=50257,
    max_positions=1024,
)
MIXTRAL = replace(
    LLAMA3_8B, name="mixtral", vocab=32000, experts=Experts(num_experts=8, top_k=2, ffn=14336)
)
DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129_280,
    max_positions=163_840,
    latent=LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=Experts(
        num_experts=256,
        top_k=8,
        ffn=2048,
        shared_experts=1,
        first_dense_layers=3,
        router="sigmoid",
        router_bias=True,
    ),
)


@pytest.mark.parametrize(
    ("inner", "out", "tp", "each"),
    [(4096, 16384, 2, (4096, 8192)), (4096, 16384, 4, (4096, 4096)), (12, 48, 4, (12, 12))],
)
def test_columns_of_a_weight_are_shared_out_as_in_the_papers(
    inner: int, out: int, tp: int, each: tuple[int, int]
) -> None:
    # The papers write W [in, out]; weights are stored transposed, so columns are dim 0.
    column = ParameterSpec(name="w", shape=(out, inner), layer=0, split_dim=0)
    row = ParameterSpec(name="w", shape=(out, inner), layer=0, split_dim=1)
    assert column.local_shape(tp)[::-1] == each
    assert row.local_shape(tp)[::-1] == (inner // tp, out)


@pytest.mark.parametrize(
    ("shape", "total"),
    [
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (GPT2_SMALL, 124_439_808),
        (MIXTRAL, 46_702_792_704),
        (DEEPSEEK_V3, 671_026_419_200),
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else "",
)
def test_totals_are_the_published_ones(shape: ModelShape, total: int) -> None:
    assert num_parameters(shape) == total


def test_a_token_meets_its_top_experts_only() -> None:
    assert num_active_parameters(LLAMA3_8B) == num_parameters(LLAMA3_8B)
    assert num_active_parameters(MIXTRAL) == 12_879_925_248
    assert round(num_active_parameters(DEEPSEEK_V3) / 1e9, 1) == 37.6


def test_idle_experts_without_a_gate_have_two_matrices() -> None:
    experts = Experts(num_experts=4, top_k=1, ffn=8)
    shape = replace(NANO, gated=False, mlp_bias=True, experts=experts)
    names = [f"mlp.experts.{e}." for e in (1, 2, 3)]
    idle = sum(s.numel for s in parameters(shape) if any(name in s.name for name in names))
    assert num_active_parameters(shape) == num_parameters(shape) - idle


def test_a_block_of_a_llama() -> None:
    shapes = {s.name: s.shape for s in parameters(NANO) if s.layer == 1}
    assert shapes == {
        "layers.1.attention_norm.weight": (16,),
        "layers.1.attention.q.weight": (16, 16),
        "layers.1.attention.k.weight": (8, 16),
        "layers.1.attention.v.weight": (8, 16),
        "layers.1.attention.o.weight": (16, 16),
        "layers.1.mlp_norm.weight": (16,),
        "layers.1.mlp.gate.weight": (24, 16),
        "layers.1.mlp.up.weight": (24, 16),
        "layers.1.mlp.down.weight": (16, 24),
    }
    ends = [s.name for s in parameters(NANO) if s.layer is None]
    assert ends == ["embedding.weight", "norm.weight", "head.weight"]


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    assert "head.weight" not in {s.name for s in parameters(QWEN)}
    assert num_parameters(replace(QWEN, tied=False)) - num_parameters(QWEN) == 37 * 16


def test_what_is_split_and_what_is_whole() -> None:
    split = {s.name.split(".", 2)[-1]: s.split_dim for s in parameters(GPT2) if s.layer == 0}
    assert split == {
        "attention_norm.weight": None,
        "attention_norm.bias": None,
        "attention.q.weight": 0,
        "attention.q.bias": 0,
        "attention.k.weight": 0,
        "attention.k.bias": 0,
        "attention.v.weight": 0,
        "attention.v.bias": 0,
        "attention.o.weight": 1,
        "attention.o.bias": None,
        "mlp_norm.weight": None,
        "mlp_norm.bias": None,
        "mlp.up.weight": 0,
        "mlp.up.bias": 0,
        "mlp.down.weight": 1,
        "mlp.down.bias": None,
    }


def test_names_are_unique() -> None:
    for shape in (NANO, GPT2, QWEN, DEEPSEEK_V3):
        names = [spec.name for spec in parameters(shape)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("shape", "dim", "tp", "local"),
    [((4096, 16384), 1, 4, (4096, 4096)), ((4096, 16384), 1, 2, (4096, 8192)),
     ((4 * 512, 512), 0, 4, (512, 512))],
)  # fmt: skip
def test_a_column_split_of_known_shapes(
    shape: tuple[int, ...], dim: int, tp: int, local: tuple[int, ...]
) -> None:
    spec = ParameterSpec(name="w", shape=shape, layer=0, split_dim=dim)
    assert spec.local_shape(tp) == local
    assert spec.local_numel(tp) * tp == spec.numel


@given(st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(60))
def test_padded_slices_cover_the_vocabulary_once(vocab: int, tp: int) -> None:
    spec = ParameterSpec(name="w", shape=(vocab, 3), layer=None, split_dim=0, padded=True)
    ranges = [spec.local_range(tp, rank) for rank in range(tp)]
    assert [row for start, end in ranges for row in range(start, end)] == list(range(vocab))
    assert all(end - start <= spec.local_shape(tp)[0] for start, end in ranges)
    assert spec.local_shape(tp)[0] * tp < vocab + tp


def test_a_dim_that_does_not_divide_is_refused() -> None:
    spec = ParameterSpec(name="layers.0.mlp.up.weight", shape=(6, 4), layer=0, split_dim=0)
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.up\.weight: dim 0 = 6 is not divisible by 4"
    ):
        spec.local_shape(4)
    assert ParameterSpec(name="n", shape=(6,), layer=0).local_shape(4) == (6,)


def test_namesakes_of_all_blocks_are_a_family() -> None:
    assert family_of("layers.12.mlp.up.weight") == family_of("layers.0.mlp.up.weight")
    assert family_of("norm.weight") == "norm.weight"
