"""Weights and bytes of the fullest rank: those of the exact formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from echelon.config.load import load_job
from echelon.core.experts import ExpertLayout
from echelon.core.model_shape import ModelShape
from echelon.core.plan import Plan
from echelon.cost.bytes.held import bytes_held
from echelon.cost.bytes.model_sizes import block_weights, embedding_weights, head_weights
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.cost.seconds.from_plan import (
    cost_inputs_from_plan,
)
from echelon.layout.stage import held_parameters, pieces_of, rank_part
from tests.cost.layouts import MIXED, WIDE, zero_plan
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
    """Return how many weights a rank holds: of its list of parameters, and by formula."""
    part = rank_part(plan, pp_rank)
    listed = sum(s.local_numel(pieces_of(plan, s)) for s in held_parameters(plan, part))
    work = cost_inputs_from_plan(plan)
    dense, _ = block_weights(work.model, work.layout, mixture=False)
    mixed = block_weights(work.model, work.layout, mixture=True)
    mixtures = sum(map(plan.model.layer_has_experts, part.blocks))
    held = (len(part.blocks) - mixtures) * dense + mixtures * sum(mixed)
    head, embedding = (f(work.model, work.layout) for f in (head_weights, embedding_weights))
    held += embedding * part.first + head * part.last
    if part.first and part.last and plan.model.tied:
        held -= plan.model.hidden * work.model.vocab / plan.mesh.tp
    return listed, float(held)


DEGREES = [(1, 1, 1, 1), (2, 3, 1, 1), (4, 4, 1, 1)]


MIXED_DEGREES = [(1, 1, 1, 1), (2, 4, 8, 1), (2, 3, 4, 2)]


@pytest.mark.quick("gpt3-175b", "llama2-70b", "mixtral-8x7b", "nano", "gpt2", "qwen3-8b")
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
    terms = fullest_rank_bytes(cost_inputs_from_plan(plan)).terms
    held: dict[str, float] = {}
    padding = 0
    for term in bytes_held(plan, 0):
        kind = term.name if term.name in ("parameters", "gradients") else "optimizer"
        held[kind] = held.get(kind, 0) + term.bytes - term.padding
        padding += term.padding
    for kind, exact in held.items():
        assert float(terms[kind]) == pytest.approx(exact, abs=padding + 1), kind


def test_tied_ends_of_a_pipeline_both_hold_the_embedding() -> None:
    plan = plan_of(model=GPT2, pp=2)
    for rank in (0, 1):
        listed, held = _both(plan, rank)
        assert held == listed
