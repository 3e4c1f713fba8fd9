"""Models, clusters and plans as numbers: the weights and bytes are those of the exact formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from echelon.config.cluster import named_cluster
from echelon.config.load import load_job
from echelon.core.cluster import Cluster
from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Context, Plan, Recompute
from echelon.cost.bytes_held import bytes_held
from echelon.cost.lattice.memory import bytes_of_rank
from echelon.cost.lattice.numbers import LayoutNumbers, take
from echelon.cost.lattice.of_cluster import machine_numbers
from echelon.cost.lattice.of_model import mean_reach, model_numbers
from echelon.cost.lattice.of_plan import layout_numbers, software_of, work_of
from echelon.cost.lattice.pipeline import SCHEDULES
from echelon.cost.lattice.software import Software
from echelon.cost.lattice.weights import block_weights, embedding_weights, head_weights
from echelon.cost.stage import held_parameters, pieces_of, rank_part
from tests.cost.layouts import MIXED, SINGLE, WIDE, zero_plan
from tests.parallel.layouts import GPT2, NANO, cut, plan_of

MODELS = (
    "deepseek-v3",
    "gpt2",
    "gpt3-175b",
    "llama2-70b",
    "llama3.1-405b",
    "mistral-7b",
    "mixtral-8x7b",
    "nano",
    "qwen3-30b-a3b",
    "qwen3-8b",
)


@lru_cache
def _shape(name: str) -> ModelShape:
    sets = ["batch.global_sequences=8", "batch.sequence_length=128", "cluster.preset=1xh100"]
    return load_job(name, sets).plan.model


def _plan(shape: ModelShape, tp: int, pp: int, ep: int, expert_tp: int) -> Plan:
    return plan_of(
        model=shape,
        tp=tp,
        pp=pp,
        ep=ep,
        dp_shard=ep,
        experts=ExpertLayout(expert_tp=expert_tp),
        stages=cut(shape.layers, pp),
    )


def _both(plan: Plan, pp_rank: int) -> tuple[int, float]:
    """Return how many weights a rank holds: of its list of parameters, and by the lattice."""
    part = rank_part(plan, pp_rank)
    listed = sum(s.local_numel(pieces_of(plan, s)) for s in held_parameters(plan, part))
    work = work_of(plan)
    dense = block_weights(work.model, work.layout, mixture=False)
    mixed = block_weights(work.model, work.layout, mixture=True)
    mixtures = sum(map(plan.model.layer_has_experts, part.blocks))
    held = (len(part.blocks) - mixtures) * dense.shared + mixtures * (mixed.shared + mixed.routed)
    head, embedding = (f(work.model, work.layout) for f in (head_weights, embedding_weights))
    held += embedding * part.first + head * part.last
    if part.first and part.last and plan.model.tied:
        held -= plan.model.hidden * work.model.vocab / plan.mesh.tp
    return listed, float(held)


DEGREES = [(1, 1, 1, 1), (2, 3, 1, 1), (4, 4, 1, 1)]
MIXED_DEGREES = [(1, 1, 1, 1), (2, 4, 8, 1), (2, 3, 4, 2)]


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_list_of_parameters(name: str) -> None:
    shape = _shape(name)
    for tp, pp, ep, expert_tp in MIXED_DEGREES if shape.experts else DEGREES:
        if shape.heads % tp or shape.kv_heads % tp:
            continue
        plan = _plan(shape, tp, pp, ep, expert_tp)
        for rank in {0, pp - 1}:
            listed, held = _both(plan, rank)
            assert held == listed, (tp, pp, ep, expert_tp, rank)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [MIXED, WIDE])
def test_states_are_those_that_a_rank_holds(stage: int, precision: object) -> None:
    # Slices of one block each, so that padding stays small beside the whole.
    shape = replace(NANO, hidden=64, ffn=192, heads=8, head_dim=8, kv_heads=8, vocab=64)
    plan = zero_plan(stage, precision=precision, model=shape, dp_shard=4, tp=2)  # type: ignore[arg-type]
    terms = bytes_of_rank(work_of(plan)).terms
    held: dict[str, float] = {}
    padding = 0
    for term in bytes_held(plan, 0):
        kind = term.name if term.name in ("parameters", "gradients") else "optimizer"
        held[kind] = held.get(kind, 0) + term.bytes - term.padding
        padding += term.padding
    for kind, exact in held.items():
        assert float(terms[kind]) == pytest.approx(exact, abs=padding + 1), kind


def test_a_padded_vocabulary_follows_the_tensor_degree() -> None:
    numbers = model_numbers(NANO, 8, tp=np.array([1.0, 2.0, 8.0]))
    assert np.asarray(numbers.vocab).tolist() == [37.0, 38.0, 40.0]
    assert model_numbers(NANO, 8).vocab == 37.0


def test_reach_is_half_of_a_sequence_under_a_causal_mask_and_less_with_a_window() -> None:
    assert mean_reach(NANO, 16) == 8.0
    assert mean_reach(replace(NANO, causal=False), 16) == 16.0
    # Queries 0 to 15 meet 1, 2, 3, 4, 4 ... keys: 58, less half a key each.
    assert mean_reach(replace(NANO, window=4), 16) == (58 - 8) / 16


def test_a_cluster_keeps_its_tiers_and_how_near_to_its_peaks_it_comes() -> None:
    cluster = named_cluster("32xh100", "")
    assert isinstance(cluster, Cluster)
    numbers = machine_numbers(cluster, "bf16")
    assert numbers.peak_flops == cluster.device.flops("bf16")
    assert numbers.matmul == cluster.device.efficiency.matmul
    assert [tier.degree for tier in numbers.tiers] == [float(k.degree) for k in cluster.links]
    assert numbers.node == 8.0
    wide = machine_numbers(cluster, "fp32", attention_dtype="bf16")
    assert (wide.peak_flops, wide.attention_flops) == (
        cluster.device.flops("fp32"),
        cluster.device.flops("bf16"),
    )


def test_one_device_has_a_tier_too_and_an_unknown_peak_a_rate() -> None:
    alone = named_cluster("1xh100", "")
    assert isinstance(alone, Cluster)
    assert [tier.degree for tier in machine_numbers(alone).tiers] == [1.0]
    unknown = replace(alone, device=replace(alone.device, peak_flops=()))
    assert machine_numbers(unknown).peak_flops == 10.0 * alone.device.memory_bandwidth


def test_a_plan_is_its_degrees_and_choices() -> None:
    plan = plan_of(
        model=replace(NANO, layers=8),
        pp=2,
        tp=2,
        cp=4,
        dp=2,
        dp_shard=3,
        schedule="interleaved-1f1b",
        virtual_stages=2,
        microbatches=4,
        recompute=Recompute(policy="full", every=2),
        context=Context(kind="ulysses-ring", ulysses_degree=2),
        sequence_parallel=True,
    )
    found = layout_numbers(plan)
    assert (found.devices, found.dp, found.shard) == (96.0, 6.0, 12.0)
    assert (found.virtual, found.microbatches, found.recompute) == (2.0, 4.0, 0.5)
    assert (found.ulysses, found.gathered, found.sequence_parallel) == (2.0, 0.0, 1.0)
    assert SCHEDULES[int(found.schedule)] == "interleaved"


def test_dtypes_and_optimizer_say_how_many_bytes_a_weight_takes() -> None:
    mixed = software_of(Software(), MIXED)
    assert (mixed.gradient_bytes, mixed.reduced_bytes, mixed.state_bytes) == (2.0, 4.0, 12.0)
    assert software_of(Software(), SINGLE, "sgd").state_bytes == 4.0


def test_records_of_many_plans_are_cut_like_arrays() -> None:
    layout = LayoutNumbers(tp=np.array([1.0, 2.0]), pp=4.0)
    one = take(layout, 1)
    assert (one.tp, one.pp) == (2.0, 4.0)


def test_tied_ends_of_a_pipeline_both_hold_the_embedding() -> None:
    plan = plan_of(model=GPT2, pp=2)
    for rank in (0, 1):
        listed, held = _both(plan, rank)
        assert held == listed
