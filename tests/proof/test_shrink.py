"""Shrinking keeps everything that can go wrong."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import product

import pytest

from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import family_of, num_parameters, parameters
from echelon.core.plan import Layout, Optimizer, Pipeline, Plan, Recompute, Zero
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import same_dtypes, shrink
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
    assert num_parameters(small.model) < 3_000_000
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
