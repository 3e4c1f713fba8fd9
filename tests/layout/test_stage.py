"""What each stage holds: every parameter somewhere, the ends where they belong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters, parameters
from echelon.core.plan import Optimizer, Plan
from echelon.layout.stage import (
    decays,
    held_parameters,
    partial_over_tensor,
    plan_of_layer,
    pp_rank_of,
    rank_part,
    shared_by_ends,
    update_rule_of,
)
from tests.core.test_parameters import DEEPSEEK_V3, LLAMA2_7B
from tests.parallel.layouts import GPT2, NANO, QWEN, cut, plan_of


def held(plan: Plan) -> Counter[str]:
    """Return on how many stages each parameter stands."""
    parts = [rank_part(plan, stage) for stage in range(plan.num_stages)]
    return Counter(spec.name for part in parts for spec in held_parameters(plan, part))


@pytest.mark.parametrize("model", [NANO, QWEN, GPT2], ids=lambda model: model.name)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_together_are_the_model(model: ModelShape, pp: int) -> None:
    counts = held(plan_of(model=model, pp=pp))
    assert set(counts) == {spec.name for spec in parameters(model)}
    twice = {name for name, count in counts.items() if count > 1}
    assert twice == ({"embedding.weight"} if model.tied and pp > 1 else set())


def test_the_ends_of_the_model() -> None:
    plan = plan_of(model=GPT2, pp=3, stages=((0,), (1, 2), (3,)))
    parts = [rank_part(plan, stage) for stage in range(3)]
    assert [(p.blocks, p.first, p.last) for p in parts] == [
        ((0,), True, False),
        ((1, 2), False, False),
        ((3,), False, True),
    ]
    ends = [
        [spec.name for spec in held_parameters(plan, part) if spec.layer is None] for part in parts
    ]
    assert ends == [
        ["embedding.weight", "positions.weight"],
        [],
        ["embedding.weight", "norm.weight", "norm.bias"],
    ]


def test_every_rank_of_a_pipeline_coordinate_has_its_stage() -> None:
    plan = plan_of(pp=2, dp=2, tp=2)
    assert [pp_rank_of(plan, rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_edge_stages_of_a_seven_billion_model_are_heavier() -> None:
    plan = replace(plan_of(pp=4), mathematics=replace(plan_of().mathematics, model=LLAMA2_7B))
    pipeline = replace(plan.layout.pipeline, stages=cut(32, 4))
    plan = replace(plan, layout=replace(plan.layout, pipeline=pipeline))
    total = num_parameters(LLAMA2_7B)
    shares = [
        sum(spec.numel for spec in held_parameters(plan, rank_part(plan, stage))) / total
        for stage in range(4)
    ]
    assert [round(share, 4) for share in shares] == [0.2597, 0.2403, 0.2403, 0.2597]


def names_of_partial(plan: Plan) -> set[str]:
    """Return the last parts of the names of parameters whose gradients tensor ranks sum."""
    specs = parameters(plan.model)
    return {
        spec.name.split(".", 2)[-1] if spec.layer is not None else spec.name
        for spec in specs
        if partial_over_tensor(plan, spec)
    }


def test_which_gradients_are_parts_over_the_tensor_ranks() -> None:
    assert names_of_partial(plan_of(model=QWEN)) == set()
    heads = {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert names_of_partial(plan_of(model=QWEN, tp=2)) == heads
    norms = {"attention_norm.weight", "mlp_norm.weight", "norm.weight"}
    assert names_of_partial(plan_of(model=QWEN, tp=2, sequence_parallel=True)) == heads | norms
    stream = {n.replace("weight", "bias") for n in norms} | norms
    biases = {"attention.o.bias", "mlp.down.bias", "positions.weight"}
    assert names_of_partial(plan_of(model=GPT2, tp=2, sequence_parallel=True)) == stream | biases


def test_only_a_tied_embedding_on_two_stages_is_shared() -> None:
    def shared(plan: Plan) -> list[tuple[int, str]]:
        return [
            (stage, spec.name)
            for stage in range(plan.num_stages)
            for spec in held_parameters(plan, rank_part(plan, stage))
            if shared_by_ends(plan, rank_part(plan, stage), spec)
        ]

    assert shared(plan_of(model=QWEN)) == []
    assert shared(plan_of(pp=4)) == []
    assert shared(plan_of(model=QWEN, pp=4)) == [(0, "embedding.weight"), (3, "embedding.weight")]


MODELS = (NANO, QWEN, GPT2, DEEPSEEK_V3)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_biases_and_norms_do_not_decay_and_by_choice_neither_do_the_ends(model: ModelShape) -> None:
    for spec in parameters(model):
        small = spec.name.endswith(".bias") or "norm" in spec.name
        end = spec.name in ("embedding.weight", "head.weight", "positions.weight")
        assert decays(Optimizer(), spec) is not small
        assert decays(Optimizer(decay="blocks"), spec) is not (small or end)
        assert decays(Optimizer(decay="all"), spec)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_muon_is_for_the_matrices_of_blocks(model: ModelShape) -> None:
    for spec in parameters(model):
        matrix = spec.name.startswith("layers.") and "norm" not in spec.name
        matrix = matrix and not spec.name.endswith(".bias")
        assert update_rule_of(Optimizer(kind="muon"), spec) == ("muon" if matrix else "adamw")
        assert update_rule_of(Optimizer(kind="sgd"), spec) == "sgd"
        assert update_rule_of(Optimizer(), spec) == "adamw"


def test_adam_keeps_two_moments_the_others_one() -> None:
    assert {name: len(record.state) for name, record in OPTIMIZERS.items()} == {
        "adamw": 2,
        "sgd": 1,
        "muon": 1,
    }


def test_all_blocks_are_as_one() -> None:
    model = replace(NANO, window=3, layer_kinds=("local", "global"), local_rope_theta=50.0)
    plan = plan_of(model=model)
    near, far = (plan_of_layer(plan, layer).model for layer in (0, 3))
    assert (near.window, near.rope_theta, near.layer_kinds) == (3, 50.0, ())
    assert (far.window, far.rope_theta, far.layer_kinds) == (None, model.rope_theta, ())
    plain = plan_of()
    assert plan_of_layer(plain, 2) is plain
