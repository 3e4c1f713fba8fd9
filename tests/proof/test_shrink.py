"""Shrinking keeps everything that can go wrong."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from echelon.config.rules.finders import plan_problems
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import Experts, LatentAttention, ModelShape, RopeScaling
from echelon.core.parameters import family_of, num_parameters, parameters
from echelon.core.plan import Layout, Optimizer, Pipeline, Plan, Recompute, Zero
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.proof.oracle.optimizers import learning_rate
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.run import same_dtypes
from echelon.proof.shrink import (
    num_overflows,
    num_rounded_steps,
    num_steps,
    num_updates,
    shrink,
    shrink_stages,
    small_kinds,
    small_stretch,
    stages_of,
)
from tests.parallel.layouts import NANO, plan_of
from tests.proof.layouts import FP16, layout


def big(mesh: Mesh, *, stages: tuple[tuple[int, ...], ...], microbatches: int) -> Plan:
    """Return a plan of Llama-3-70B's proportions."""
    plan = layout()
    model = replace(
        plan.model,
        layers=sum(len(stage) for stage in stages),
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128257,
        max_positions=8192,
    )
    mathematics = replace(
        plan.mathematics,
        model=model,
        global_sequences=4 * mesh.dp * microbatches,
        sequence_length=4096,
        optimizer=Optimizer(warmup_steps=2000, total_steps=100_000, clip_norm=1.0),
    )
    chosen = Layout(
        mesh=mesh,
        microbatch_sequences=4,
        pipeline=Pipeline(stages=stages),
        sequence_parallel=True,
        zero=Zero(stage=2),
        recompute=Recompute(policy="full", every=4),
    )
    return replace(plan, mathematics=mathematics, layout=chosen)


STAGES = (tuple(range(21)), tuple(range(21, 41)), tuple(range(41, 61)), tuple(range(61, 80)))


def test_the_shape_stays_and_the_sizes_go() -> None:
    plan = big(Mesh(pp=4, dp_replicate=2, dp_shard=2, tp=4), stages=STAGES, microbatches=18)
    small = shrink(plan)

    assert small.mesh == plan.mesh
    assert small.layout.sequence_parallel
    assert small.layout.zero.stage == 2
    assert small.layout.pipeline.schedule == plan.layout.pipeline.schedule
    assert small.layout.recompute == Recompute(policy="full", every=2)
    assert small.model.heads / small.model.kv_heads == 8
    assert small.model.kv_heads % 4 == 0
    assert small.model.kv_heads // 4 == 2
    assert small.model.query_dim == small.model.hidden
    assert small.model.ffn % 4 == 0
    assert small.model.vocab % 4 == plan.model.vocab % 4 == 1
    assert small.model.max_positions > small.mathematics.sequence_length
    assert small.mathematics.sequence_length % 8 == 0
    assert small.num_microbatches == 4 + 18 % 4
    assert [len(stage) for stage in small.layout.pipeline.stages] == [3, 2, 2, 1]
    assert num_parameters(small.model) < 7_000_000
    assert small.layout.zero.bucket_bytes < plan.layout.zero.bucket_bytes


@pytest.mark.parametrize(
    ("pp", "count", "wanted"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (1, 3, 3),
        (1, 64, 4),
        (1, 65, 5),
        (4, 2, 2),
        (4, 4, 4),
        (4, 64, 8),
        (4, 66, 6),
        (2, 3, 3),
        (2, 5, 5),
        (2, 64, 4),
    ],
)
def test_microbatches_keep_their_remainder_over_the_stages(
    pp: int, count: int, wanted: int
) -> None:
    stages = tuple((stage,) for stage in range(pp))
    assert shrink(big(Mesh(pp=pp), stages=stages, microbatches=count)).num_microbatches == wanted


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden": 64, "ffn": 352, "vocab": 257},
        {"hidden": 64, "ffn": 192, "vocab": 32001},
        {"hidden": 1024, "ffn": 512, "vocab": 50304},
        {"hidden": 1024, "ffn": 1024, "vocab": 260},
        {"hidden": 64, "ffn": 64, "vocab": 64},
        {"hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 128, "ffn": 768, "vocab": 999},
    ],
)
def test_the_order_of_widths_stays(tp: int, sizes: dict[str, int]) -> None:
    heads = {"heads": 8, "kv_heads": 4, "head_dim": 8}
    plan = layout(tp=tp, model={**heads, **sizes})

    def order(shape: ModelShape) -> list[bool]:
        widths = (shape.hidden, shape.ffn, shape.vocab)
        pairs = [*product(widths, widths), (shape.hidden, shape.query_dim)]
        return [compare(a, b) for a, b in pairs for compare in (operator.lt, operator.eq)]

    small = shrink(plan).model
    assert order(small) == order(plan.model)
    assert small.vocab % tp == plan.model.vocab % tp
    assert small.ffn % tp == 0


def test_names_are_told_apart_where_they_are_looked_up() -> None:
    model = {"layers": 32}
    for zero, optimizer, dp, layers in (
        ({"stage": 1}, {}, 2, 2),
        ({"stage": 1, "optimizer_offload": "host"}, {}, 2, 11),
        ({"stage": 3, "parameter_offload": "nvme"}, {}, 2, 11),
        ({"stage": 1}, {"kind": "muon"}, 2, 11),
        ({"stage": 0}, {"kind": "muon"}, 1, 2),
    ):
        plan = layout(dp=dp, zero=zero, optimizer=optimizer, model=model)
        stages = (tuple(range(32)),)
        whole = replace(plan.layout, pipeline=replace(plan.layout.pipeline, stages=stages))
        plan = replace(plan, layout=whole)
        assert shrink(plan).model.layers == 2
        small = shrink(plan, names_apart=True)
        assert small.model.layers == layers
        buckets = len(plan_buckets(small, rank_part(small, 0, 0)))
        assert buckets >= 11 or layers == 2


def test_float64_is_float64_throughout() -> None:
    precision = shrink(layout(), precision="fp64").mathematics.precision
    assert {precision.parameters, precision.gradients, precision.reduction, precision.master} == {
        "fp64"
    }
    assert shrink(layout()).mathematics.precision == layout().mathematics.precision


def test_an_optimizer_without_clipping_stays_so() -> None:
    plan = layout()
    free = replace(plan.mathematics.optimizer, clip_norm=None, weight_decay=0.0, warmup_steps=0)
    small = shrink(replace(plan, mathematics=replace(plan.mathematics, optimizer=free)))
    assert small.mathematics.optimizer.clip_norm is None
    assert small.mathematics.optimizer.weight_decay == 0.0
    assert small.mathematics.optimizer.warmup_steps == 0


def test_what_is_kept_whole_stays_what_is_kept_whole() -> None:
    plan = layout(dp=2, zero={"stage": 3, "keep_whole_below": 33}, model={"qkv_bias": True})
    small = shrink(plan)

    def kept(one: Plan) -> set[str]:
        below = one.layout.zero.keep_whole_below
        return {family_of(s.name) for s in parameters(one.model) if s.numel < below}

    assert kept(small) == kept(plan)
    assert {"norm.weight", "layers.*.attention.k.bias"} < kept(plan)
    assert "head.weight" not in kept(plan)
    assert shrink(layout(dp=2, zero={"stage": 3})).layout.zero.keep_whole_below == 0


def test_settings_of_zero_stay_and_units_are_several() -> None:
    zero = {
        "stage": 3,
        "accumulate": "slices",
        "reshard_after_forward": False,
        "prefetch": 7,
        "unit_blocks": 4,
        "optimizer_offload": "nvme",
        "parameter_offload": "host",
        "offload_dir": "somewhere",
        "offload_buffers": 9,
    }
    plan = big(Mesh(dp_shard=2), stages=(tuple(range(80)),), microbatches=4)
    plan = replace(plan, layout=replace(plan.layout, zero=Zero(**zero)))
    small = shrink(plan).layout
    limits = {"prefetch": 2, "unit_blocks": 2, "offload_buffers": 2}
    assert small.zero == Zero(**{**zero, **limits, "bucket_bytes": small.zero.bucket_bytes})
    assert len(small.pipeline.stages[0]) == 3


def test_few_steps_are_enough_for_the_loss_scale_to_change() -> None:
    scaling = {"loss_scale_window": 2000, "loss_scale_hysteresis": 5, "loss_scale_min": 4.0}
    plan = layout(precision={**FP16, **scaling})
    small, exact = shrink(plan), shrink(plan, precision="fp64")
    for one in (small, exact):
        precision = one.mathematics.precision
        assert (precision.loss_scale_window, precision.loss_scale_hysteresis) == (2, 2)
        assert (precision.loss_scaling, precision.loss_scale_min) == ("dynamic", 4.0)
    assert not same_dtypes(small.mathematics.precision, exact.mathematics.precision)
    assert same_dtypes(small.mathematics.precision, plan.mathematics.precision)


def test_sgd_moves_values_by_as_much_as_adamw() -> None:
    small = shrink(layout(optimizer={"kind": "sgd", "momentum": 0.7})).mathematics.optimizer
    assert (small.kind, small.momentum) == ("sgd", 0.7)
    steps = run_oracle(shrink(layout(optimizer={"kind": "sgd"}), precision="fp64"), 1)[0]
    update = steps.updates["head.weight"]
    share = float(update.total.norm() / steps.before["head.weight"].norm())
    assert 1e-4 < share < 0.1
    assert 0.1 < float(update.decay.norm() / update.main.norm()) < 10


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_a_small_model_does_not_diverge(kind: str, clip_norm: float | None) -> None:
    """Losses that explode enlarge roundings a millionfold, and overflow in fp16."""
    plan = shrink(layout(optimizer={"kind": kind, "clip_norm": clip_norm}), precision="fp64")
    losses = [step.loss for step in run_oracle(plan, 7)]
    assert losses[-1] != losses[0]
    assert max(losses) < 1.5 * losses[0]


def test_few_blocks_are_of_both_kinds() -> None:
    shape = replace(NANO, window=3, layer_kinds=("local",) * 5 + ("global",))
    assert small_kinds(shape, 2) == ("local", "global")
    assert small_kinds(shape, 6) == shape.layer_kinds
    assert small_kinds(NANO, 2) == ()


def test_a_narrow_head_has_fewer_divisors_and_a_long_sequence_stays_long() -> None:
    scaling = RopeScaling(
        kind="longrope",
        factor=4.0,
        original_positions=8,
        short_factors=(1.0, 1.5),
        long_factors=(2.0, 4.0),
    )
    model = replace(NANO, rope_scaling=scaling)
    found = small_stretch(plan_of(model=model, sequence_length=16), 12, 2)
    assert found is not None
    assert (found.short_factors, found.long_factors) == ((1.0,), (2.0,))
    assert found.original_positions == 6
    short = small_stretch(plan_of(model=model, sequence_length=8), 12, 8)
    assert short is not None
    assert (short.original_positions, len(short.long_factors)) == (12, 4)


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


def big_mixture(model: ModelShape, mesh: Mesh, *, node: int = 8, **changes: Any) -> Plan:
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
        (MIXTRAL_8X7B, Mesh(dp_shard=2, ep=2), 6),
        (MIXTRAL_8X7B, Mesh(dp_shard=2), 5),
        (DEEPSEEK_V3, Mesh(dp_shard=8, ep=8), 24),
        (DEEPSEEK_V3, Mesh(pp=4, dp_shard=16, ep=16), 48),
        (DEEPSEEK_V3, Mesh(cp=2, dp_shard=2, ep=4), 24),
        (QWEN3_30B, Mesh(dp_shard=8, ep=8), 24),
        (QWEN3_30B, Mesh(dp_shard=2), 9),
    ],
)
def test_few_experts_have_all_choices(model: ModelShape, mesh: Mesh, count: int) -> None:
    plan = big_mixture(model, mesh)
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
    assert num_parameters(small.model) < 600_000


def test_latent_attention_keeps_its_widths_apart() -> None:
    latent = shrink(big_mixture(DEEPSEEK_V3, Mesh(tp=2))).model.latent
    assert latent is not None
    assert latent.value_dim == latent.nope_dim > latent.rope_dim
    assert shrink(big_mixture(MIXTRAL_8X7B, Mesh(tp=2))).model.latent is None
    assert DEEPSEEK_V3.latent is not None
    for value, same in ((192, 10), (96, 5), (160, 7)):
        wide = replace(DEEPSEEK_V3, latent=replace(DEEPSEEK_V3.latent, value_dim=value))
        small = shrink(big_mixture(wide, Mesh(tp=2)))
        assert small.model.latent is not None
        assert small.model.latent.value_dim == same
        assert small.model.head_dim == 10
        assert not list(plan_problems(small))


@pytest.mark.quick("model2-0.5", "model0-4.0", "model1-1.25")
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("model", [MIXTRAL_8X7B, DEEPSEEK_V3, QWEN3_30B])
def test_some_tokens_are_dropped_and_some_are_kept(model: ModelShape, factor: float) -> None:
    balance = Balance(kind="aux", capacity_factor=factor)
    plan = shrink(big_mixture(model, Mesh(dp_shard=2, ep=2), balance=balance), precision="fp64")
    for routed in run_oracle(plan, 1)[0].routed.values():
        assert 0 < routed.dropped < routed.kept_BTK.numel()


def test_coefficients_show_and_what_is_off_stays_off() -> None:
    weak = Balance(kind="both", aux_coefficient=1e-4, z_coefficient=1e-6, bias_rate=1e-4)
    small = shrink(
        big_mixture(DEEPSEEK_V3, Mesh(dp_shard=2, ep=2), balance=weak)
    ).mathematics.balance
    assert small == replace(weak, aux_coefficient=0.01, z_coefficient=1e-3, bias_rate=0.02)
    strong = Balance(kind="aux", aux_coefficient=0.5, bias_rate=0.1)
    mesh = Mesh(dp_shard=2, ep=2)
    assert shrink(big_mixture(DEEPSEEK_V3, mesh, balance=strong)).mathematics.balance == strong


def test_two_hops_still_cross_nodes_and_chunks_divide() -> None:
    travel = ExpertLayout(dispatch="two-hop", chunks=16, zero_stage=1)
    plan = big_mixture(DEEPSEEK_V3, Mesh(dp_shard=8, tp=2, ep=16), node=8, experts=travel)
    small = shrink(plan)
    assert small.layout.experts == replace(travel, chunks=2)
    assert small.cluster == plan.cluster
    assert not list(plan_problems(small))
    cut = ExpertLayout(expert_tp=2, chunks=3)
    small = shrink(big_mixture(MIXTRAL_8X7B, Mesh(dp_shard=4, tp=2, ep=4), experts=cut))
    assert small.layout.experts == replace(cut, chunks=2)
    assert not list(plan_problems(small))


@pytest.mark.parametrize(
    ("counts", "small"),
    [
        ((6,), (2,)),
        ((1,), (1,)),
        ((4, 4), (2, 2)),
        ((4, 2), (3, 2)),
        ((3, 3, 3, 3), (1, 2, 1, 1)),
        ((1, 1, 1), (1, 1, 1)),
        ((8, 9, 9, 6), (2, 3, 3, 1)),
        ((0, 2, 2, 1), (0, 2, 2, 1)),
        ((0, 0, 0, 2), (0, 0, 0, 2)),
    ],
)
def test_uneven_stages_stay_uneven(counts: tuple[int, ...], small: tuple[int, ...]) -> None:
    shrunk = shrink_stages(stages_of(counts))
    assert tuple(len(stage) for stage in shrunk) == small
    assert [block for stage in shrunk for block in stage] == list(range(sum(small)))


def test_a_stage_of_many_has_blocks_of_two_units() -> None:
    shrunk = shrink_stages(stages_of((8, 8, 8, 8)), unit=2)
    assert [len(stage) for stage in shrunk] == [1, 3, 1, 1]


@pytest.mark.parametrize(
    ("counts", "small"),
    [
        ((32,), (11,)),
        ((16, 16), (6, 6)),
        ((8, 8, 8, 8), (3, 4, 3, 3)),
        ((4, 4), (4, 4)),
        ((2, 30), (2, 9)),
    ],
)
def test_as_many_blocks_as_are_asked_for(counts: tuple[int, ...], small: tuple[int, ...]) -> None:
    shrunk = shrink_stages(stages_of(counts), least=11)
    assert tuple(len(stage) for stage in shrunk) == small


def rates(plan: Plan) -> list[float]:
    """Return the learning rates of the steps of a proof that update, over the highest."""
    small, skipped = shrink(plan), num_overflows(plan)
    optimizer = small.mathematics.optimizer
    taken = [step for step in range(num_steps(small)) if step not in range(1, 1 + skipped)]
    return [learning_rate(optimizer, step) / optimizer.learning_rate for step in taken]


def scheduled(**optimizer: Any) -> Plan:
    """Return a plan whose final rate is half of the highest."""
    chosen = {"total_steps": 900, "final_ratio": 0.5, **optimizer}
    return layout(optimizer=chosen)


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"schedule": "linear"}, [0.5, 1.0, 1.0, 5 / 6, 4 / 6]),
        ({"schedule": "cosine"}, [0.5, 1.0, 1.0, 0.875, 0.625]),
        ({"schedule": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "wsd", "decay_steps": 90}, [0.5, 1.0, 1.0, 1.0, 0.75]),
        ({"schedule": "linear", "warmup_steps": 0}, [1.0, 0.9, 0.8, 0.7, 0.6]),
        ({"schedule": "wsd", "decay_steps": 90, "warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0, 0.75]),
        ({"schedule": "linear", "kind": "sgd"}, [0.5, 1.0, 1.0, 5 / 6, 4 / 6]),
        ({"schedule": "constant", "kind": "sgd", "warmup_steps": 0}, [1.0, 1.0, 1.0]),
        ({"schedule": "constant", "kind": "sgd"}, [0.5, 1.0, 1.0]),
        ({"schedule": "linear", "kind": "sgd", "warmup_steps": 0}, [1.0, 5 / 6, 4 / 6]),
    ],
)
def test_every_phase_is_met_on_both_sides(optimizer: dict[str, Any], wanted: list[float]) -> None:
    assert rates(scheduled(**optimizer)) == pytest.approx(wanted)


def test_a_decay_of_another_speed_or_start_has_other_rates() -> None:
    for schedule in ("linear", "cosine", "wsd"):
        found = rates(scheduled(schedule=schedule, decay_steps=90 if schedule == "wsd" else 0))
        assert found[0] < found[1] == found[2] > found[-1]
        assert found[-1] > 0.5, "twice as fast is over: the last rate"


def test_steps_that_overflow_hide_no_phase() -> None:
    chosen = {"schedule": "linear", "final_ratio": 0.5, "total_steps": 900}
    for hysteresis in (1, 2, 5):
        precision = {**FP16, "loss_scale_hysteresis": hysteresis}
        plan = layout(optimizer=chosen, precision=precision)
        assert num_overflows(plan) == min(2, hysteresis)
        assert num_steps(plan) == 5 + min(2, hysteresis)
        assert num_rounded_steps(plan) == 3 + min(2, hysteresis)
        first, *rest = rates(plan)
        assert first < 0.5
        assert rest == pytest.approx([1.0, 1.0, 5 / 6, 4 / 6])
        assert all(earlier >= later for earlier, later in pairwise(rest))


def test_what_counts_updates_takes_five() -> None:
    still = {"schedule": "constant", "warmup_steps": 0}
    for kind, steps in (("adamw", 5), ("muon", 5), ("sgd", 3)):
        plan = layout(optimizer={**still, "kind": kind})
        assert num_updates(plan.mathematics) == num_updates(shrink(plan).mathematics) == steps
    scaled = layout(optimizer={**still, "kind": "sgd"}, precision=FP16)
    assert num_updates(scaled.mathematics) == 5
