"""Shrinking keeps of experts what can go wrong, and a whole plan of them stays legal."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from echelon.config.rules.plan import plan_problems
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import num_parameters
from echelon.core.plan import Layout, Pipeline, Plan
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.parallel.layouts import NANO, plan_of

MIXTRAL_8X7B = replace(
    NANO,
    name="mixtral-8x7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=32000,
    max_positions=32768,
    experts=Experts(num_experts=8, top_k=2, ffn=14336),
)
DEEPSEEK_V3 = replace(
    MIXTRAL_8X7B,
    name="deepseek-v3",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    vocab=129280,
    latent=LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=Experts(
        num_experts=256,
        top_k=8,
        ffn=2048,
        shared_experts=1,
        first_dense_layers=3,
        router="sigmoid",
        router_bias=True,
        gate_scale=2.5,
        groups=8,
        top_groups=4,
    ),
)
QWEN3_30B = replace(
    MIXTRAL_8X7B,
    name="qwen3-30b-a3b",
    layers=48,
    qk_norm=True,
    experts=Experts(num_experts=128, top_k=8, ffn=768),
)


def big(model: ModelShape, mesh: Mesh, *, node: int = 8, **changes: Any) -> Plan:
    """Return a plan of a model of full size."""
    plan = plan_of()
    layers = model.layers
    bounds = [round(layers * stage / mesh.pp) for stage in range(mesh.pp + 1)]
    layout = Layout(
        mesh=mesh,
        microbatch_sequences=2,
        pipeline=Pipeline(stages=tuple(tuple(range(a, b)) for a, b in pairwise(bounds))),
        experts=changes.get("experts", ExpertLayout()),
    )
    mathematics = replace(
        plan.mathematics,
        model=model,
        global_sequences=2 * mesh.dp * 2 * mesh.pp,
        sequence_length=4096,
        balance=changes.get("balance", Balance()),
    )
    cluster = replace(plan.cluster, devices_per_node=node, nodes=mesh.world_size // node)
    return replace(plan, mathematics=mathematics, layout=layout, cluster=cluster)


@pytest.mark.parametrize(
    ("model", "mesh", "count"),
    [
        (MIXTRAL_8X7B, Mesh(dp_shard=8, ep=8), 8),
        (MIXTRAL_8X7B, Mesh(dp_shard=4, tp=2, ep=4), 8),
        (MIXTRAL_8X7B, Mesh(dp_shard=2, ep=2), 4),
        (MIXTRAL_8X7B, Mesh(dp_shard=2), 4),
        (DEEPSEEK_V3, Mesh(dp_shard=8, ep=8), 24),
        (DEEPSEEK_V3, Mesh(pp=4, dp_shard=16, ep=16), 32),
        (DEEPSEEK_V3, Mesh(cp=2, dp_shard=2, ep=4), 24),
        (QWEN3_30B, Mesh(dp_shard=8, ep=8), 16),
        (QWEN3_30B, Mesh(dp_shard=2), 9),
    ],
)
def test_few_experts_have_all_choices(model: ModelShape, mesh: Mesh, count: int) -> None:
    plan = big(model, mesh)
    small = shrink(plan)
    assert not list(plan_problems(small))
    assert small.mesh == mesh
    experts, whole = small.model.experts, model.experts
    assert experts is not None
    assert whole is not None
    assert experts.num_experts == count
    assert count // mesh.ep >= min(2, whole.num_experts // mesh.ep)
    sizes = {"num_experts": 0, "ffn": 0, "first_dense_layers": 0}
    assert replace(experts, **sizes) == replace(whole, **sizes)
    assert experts.top_groups * (count // experts.groups) > experts.top_k
    assert experts.first_dense_layers == min(1, whole.first_dense_layers)
    kinds = [small.model.layer_has_experts(layer) for layer in range(small.model.layers)]
    assert any(kinds)
    assert all(kinds) == (whole.first_dense_layers == 0)
    assert num_parameters(small.model) < 500_000


def test_latent_attention_keeps_its_widths_apart() -> None:
    latent = shrink(big(DEEPSEEK_V3, Mesh(tp=2))).model.latent
    assert latent is not None
    assert latent.value_dim == latent.nope_dim > latent.rope_dim
    assert shrink(big(MIXTRAL_8X7B, Mesh(tp=2))).model.latent is None
    assert DEEPSEEK_V3.latent is not None
    for value, same in ((192, 6), (96, 3), (160, 5)):
        wide = replace(DEEPSEEK_V3, latent=replace(DEEPSEEK_V3.latent, value_dim=value))
        small = shrink(big(wide, Mesh(tp=2)))
        assert small.model.latent is not None
        assert small.model.latent.value_dim == same
        assert small.model.head_dim == 6
        assert not list(plan_problems(small))


@pytest.mark.quick("model2-0.5", "model0-4.0", "model1-1.25")
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("model", [MIXTRAL_8X7B, DEEPSEEK_V3, QWEN3_30B])
def test_some_tokens_are_dropped_and_some_are_kept(model: ModelShape, factor: float) -> None:
    balance = Balance(kind="aux", capacity_factor=factor)
    plan = shrink(big(model, Mesh(dp_shard=2, ep=2), balance=balance), precision="fp64")
    for routed in run_oracle(plan, 1)[0].routed.values():
        assert 0 < routed.dropped < routed.kept_BTK.numel()


def test_coefficients_show_and_what_is_off_stays_off() -> None:
    weak = Balance(kind="both", aux_coefficient=1e-4, z_coefficient=1e-6, bias_rate=1e-4)
    small = shrink(big(DEEPSEEK_V3, Mesh(dp_shard=2, ep=2), balance=weak)).mathematics.balance
    assert small == replace(weak, aux_coefficient=0.01, z_coefficient=1e-3, bias_rate=0.02)
    strong = Balance(kind="aux", aux_coefficient=0.5, bias_rate=0.1)
    mesh = Mesh(dp_shard=2, ep=2)
    assert shrink(big(DEEPSEEK_V3, mesh, balance=strong)).mathematics.balance == strong


def test_two_hops_still_cross_nodes_and_chunks_divide() -> None:
    travel = ExpertLayout(dispatch="two-hop", chunks=16, zero_stage=1)
    plan = big(DEEPSEEK_V3, Mesh(dp_shard=8, tp=2, ep=16), node=8, experts=travel)
    small = shrink(plan)
    assert small.layout.experts == replace(travel, chunks=2)
    assert small.cluster == plan.cluster
    assert not list(plan_problems(small))
    cut = ExpertLayout(expert_tp=2, chunks=3)
    small = shrink(big(MIXTRAL_8X7B, Mesh(dp_shard=4, tp=2, ep=4), experts=cut))
    assert small.layout.experts == replace(cut, chunks=2)
    assert not list(plan_problems(small))
