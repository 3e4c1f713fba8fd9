"""Each number that a proof changes, and what its small value must not hide."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm, log2, pi, sqrt

import pytest

from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.counter_random import initial_values
from echelon.proof.changes import changes
from echelon.proof.shrink import shrink
from tests.walks.plans.test_random_families import NAMES, legal_plans

HIDES: dict[str, str] = {
    "model.layers": "a block that is taken for the next: two in a stage that has two",
    "model.hidden": "a scale of 1 / sqrt(hidden) that is 1 / 2 or 1 / 4",
    "model.heads": "heads of a rank that are permuted: two key heads, each with its queries",
    "model.kv_heads": "the same",
    "model.head_dim": "a scale of 1 / 2; halves of one pair, which are as good as interleaved ones",
    "model.ffn": "a width that is taken for another",
    "model.vocab": "the same; the padding of the last rank",
    "model.max_positions": "positions that are counted from the end",
    "model.window": "a window that ends at the border of a chunk",
    "model.layer_kinds": "a block that is taken to be of the other kind",
    "model.initial_std": "blocks that add next to nothing to the stream",
    "model.initial_spread": "norms, biases and sinks that are swapped",
    "model.rotary.fraction": "one pair, which is the same interleaved and in halves",
    "model.rotary.none_every": "a block without positions",
    "model.rope_scaling.original_positions": "sequences that are longer than it, or shorter",
    "model.rope_scaling.short_factors": "a divisor of another pair",
    "model.rope_scaling.long_factors": "the same",
    "model.latent.query_rank": "a width that is taken for another",
    "model.latent.kv_rank": "the same",
    "model.latent.nope_dim": "parts of a head that are swapped",
    "model.latent.rope_dim": "one pair, which is the same interleaved and in halves",
    "model.latent.value_dim": "values that are as wide as keys",
    "model.experts.num_experts": "a mean load that is a whole number",
    "model.experts.ffn": "a width that is taken for another",
    "model.experts.limit": "activations that are all below it",
    "model.experts.shared_experts": "a shared expert that is counted once",
    "model.experts.first_dense_layers": "a dense block that is taken for a block with experts",
    "global_sequences": "a sample that is read twice",
    "sequence_length": "a position that is on another rank",
    "optimizer.learning_rate": "a rate of another step",
    "optimizer.eps": "updates that are signs, of whatever size gradients are",
    "optimizer.clip_norm": "clipping that does nothing",
    "optimizer.weight_decay": "a decay as small as rounding",
    "optimizer.warmup_steps": "a step before the end of the rise",
    "optimizer.decay_steps": "a step before the fall",
    "optimizer.total_steps": "a rate that falls too fast to be seen",
    "precision.loss_scale_window": "a scale that never grows",
    "precision.loss_scale_hysteresis": "a scale that never falls",
    "precision.fp8_history": "numbers that scales never forget",
    "precision.fp8_block": "one block to a row",
    "precision.int8_block": "the same",
    "balance.aux_coefficient": "a loss as small as rounding",
    "balance.z_coefficient": "the same",
    "balance.bias_rate": "a bias that sends no token elsewhere",
    "balance.capacity_factor": "experts that drop nothing",
    "local_sgd.every": "a round that ends after the proof",
    "local_sgd.fragments": "fragments without a block",
    "local_sgd.outer_block": "one block to a row",
    "local_sgd.delay": "a sum that is never late",
    "microbatch_sequences": "a sequence that is taken for the other",
    "pipeline.stages": "stages of as many blocks",
    "recompute.every": "a block that is not recomputed",
    "zero.bucket_bytes": "a bucket that is taken for the next one",
    "zero.prefetch": "a unit that is gathered too late",
    "zero.unit_blocks": "a block of another unit",
    "zero.keep_whole_below": "parameters that are kept whole",
    "zero.offload_buffers": "a buffer that is used too early",
    "experts.chunks": "a chunk that is taken for the other",
    "tp_overlap": "a word: matmuls in a ring in place of fused kernels",
    "kernels.fused": "words: kernels that take no float64",
    "kernels.provider": "a word: the same",
}
"""What a small value of each number would hide, if it were neutral."""

PER_PLAN = 12
"""Plans of each family."""


def small_plans(family: str) -> list[tuple[Plan, Plan]]:
    return [(plan, shrink(plan)) for plan in legal_plans(family, PER_PLAN)]


@pytest.mark.parametrize("family", NAMES)
def test_each_number_that_is_changed_is_listed(family: str) -> None:
    names = {change.name for plans in small_plans(family) for change in changes(*plans)}
    assert names <= HIDES.keys()
    assert names


def _not_a_power_of_two(value: float) -> bool:
    return log2(value) != round(log2(value))


def _even_load(plan: Plan, count: int) -> bool:
    experts = plan.model.experts
    assert experts is not None
    return plan.mathematics.sequence_length * experts.top_k % count == 0


def _blends(plan: Plan) -> bool:
    scaling, turned = plan.model.rope_scaling, plan.model.turned_dims
    if scaling is None or scaling.kind != "llama3":
        return True
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert scaling.original_positions is not None
    assert low is not None
    assert high is not None
    exponents = [pair / turned for pair in range(0, turned, 2)]
    waves = [2 * pi * plan.model.rope_theta**one for one in exponents]
    return any(low < scaling.original_positions / wave < high for wave in waves)


FEWEST = 4  # a stream that is narrower than the only head


NEUTRAL: dict[str, Callable[[Plan], bool]] = {
    "a root of the width of heads is a power of two": lambda plan: (
        not _not_a_power_of_two(sqrt(plan.model.head_dim))
    ),
    "a root of the width of the stream is one": lambda plan: (
        plan.model.hidden > FEWEST and not _not_a_power_of_two(sqrt(plan.model.hidden))
    ),
    "one pair of dims turns": lambda plan: plan.model.turned_dims == 2,
    "no frequency of llama3 is a blend of a low and a high one": lambda plan: not _blends(plan),
    "both parts of a latent head are as wide": lambda plan: (
        plan.model.latent is not None and plan.model.latent.nope_dim == plan.model.latent.rope_dim
    ),
}
"""What no small model may be, whatever the plan is."""


@pytest.mark.parametrize("family", NAMES)
def test_no_number_is_neutral(family: str) -> None:
    for _, small in small_plans(family):
        assert [name for name, is_so in NEUTRAL.items() if is_so(small)] == []


def test_loads_of_experts_are_even_only_where_the_plan_has_too_few_for_others() -> None:
    mixtures = [
        (plan, small)
        for family in NAMES
        for plan, small in small_plans(family)
        if small.model.experts is not None
    ]
    uneven = 0
    for plan, small in mixtures:
        given, few = plan.model.experts, small.model.experts
        assert given is not None
        assert few is not None
        step = lcm(plan.mesh.ep, given.groups)
        if _even_load(small, few.num_experts):
            counts = range(few.num_experts + step, given.num_experts + 1, step)
            assert all(_even_load(small, count) for count in counts)
        else:
            uneven += 1
    assert uneven > len(mixtures) // 3


def test_what_begins_at_0_or_1_begins_at_many_values() -> None:
    for family in ("sinks", "adapters", "any"):
        for _, small in small_plans(family)[:3]:
            for spec in parameters(small.model):
                if spec.initial in ("ones", "zeros") and spec.numel > 1:
                    values = initial_values(small.model, spec, seed=3)
                    around = float(spec.initial == "ones")
                    assert values.unique().numel() == values.numel(), spec.name
                    assert (values - around).abs().max() <= small.model.initial_spread
