"""Modules under pipelines equal one process: losses, norms, parameters, state, and bytes sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.errors import ConfigError, EchelonError, InfeasiblePlan
from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.parallel.module.loss import CAUSAL
from echelon.parallel.module.pipeline.build import (
    apply_pipeline,
    check_stages,
    stages_of_parameters,
)
from echelon.parallel.module.pipeline.chain import BlockChain, follow, leaving_no_trace
from echelon.parallel.module.pipeline.stage import ModuleStage, Window
from tests.parallel.module.models import WIDTH
from tests.parallel.module.pipeline import targets
from tests.parallel.module.pipeline.chains import LOSS, made, tokens
from tests.parallel.module.pipeline.targets import Case, plan
from tests.parallel.module.sent_bytes import module_pipeline_bytes

SLICES = Zero(stage=3, accumulate="slices")
STOCK = ["gpt2", "llama", "qwen2", "mistral", "gpt_neox", "gemma2", "phi3"]

STAGES = ((0,), (1, 2), (3,))
WINDOWS = [
    Window(stage=0, start=0, stop=1, first=True, last=False),
    Window(stage=1, start=1, stop=3, first=False, last=False),
    Window(stage=2, start=3, stop=4, first=False, last=True),
]


def assert_as_in_one_process(rank_pool: RankPool, case: Case) -> None:
    """Compare every number after three steps with torch alone, and the bytes with the formula."""
    expected = targets.one_process(case)
    ranks = rank_pool.run(targets.train, case, world_size=case.plan.mesh.world_size)
    for rank, one in enumerate(ranks):
        assert one.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)
        assert one.norms == pytest.approx(expected.norms, rel=1e-10, abs=0)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-10, abs=0)
        width = WIDTH if case.kind == "own" else 16
        elements = case.plan.layout.microbatch_sequences * case.length * width
        assert one.sent == module_pipeline_bytes(
            case.plan, one.buckets, rank=rank, stream_elements=elements
        )
        assert one.sent["pp"] > 0
    assert set(ranks[0].after) == set(expected.after)
    for name, value in expected.after.items():
        torch.testing.assert_close(ranks[0].after[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_two_stages(rank_pool: RankPool, schedule: str) -> None:
    assert_as_in_one_process(rank_pool, Case(plan=plan(schedule=schedule)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "gpipe", "stages": ((0,), (1, 2, 3))},
        {"schedule": "interleaved-1f1b", "virtual_stages": 2},
        {"schedule": "breadth-first", "virtual_stages": 2},
        {"schedule": "zb-h1", "stages": ((0, 1, 2, 3), ())},
        {"schedule": "zb-h2", "pp": 4, "microbatches": 8},
        {"schedule": "zb-v", "virtual_stages": 2},
        {"schedule": "dualpipe"},
        {"schedule": "dualpipe-v", "virtual_stages": 2},
        {"schedule": "1f1b", "microbatch_sequences": 2},
    ],
)
def test_schedules_and_stages(rank_pool: RankPool, changes: dict[str, Any]) -> None:
    assert_as_in_one_process(rank_pool, Case(plan=plan(**changes)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "zero",
    [
        Zero(),
        Zero(stage=1),
        Zero(stage=2, accumulate="slices"),
        SLICES,
        Zero(stage=3),
        Zero(stage=3, reshard_after_forward=False),
        Zero(stage=3, keep_whole_below=50),
    ],
)
def test_zero_under_pipelines(rank_pool: RankPool, schedule: str, zero: Zero) -> None:
    data = "dp_shard" if zero.stage else "dp"
    for changes in ({}, {"frozen_block": True}):
        case = Case(plan=plan(schedule=schedule, zero=zero, **{data: 2}), changes=changes)
        assert_as_in_one_process(rank_pool, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"dp": 2, "dp_shard": 2, "zero": SLICES},
        {"dp": 2, "dp_shard": 2, "zero": Zero(stage=1), "schedule": "zb-v", "virtual_stages": 2},
        {"dp_shard": 2, "zero": Zero(stage=2), "schedule": "dualpipe"},
    ],
)
def test_replicas_of_slices_under_pipelines(rank_pool: RankPool, changes: dict[str, Any]) -> None:
    assert_as_in_one_process(rank_pool, Case(plan=plan(**changes)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "qwen2", "mistral", "gpt_neox", "gemma2", "phi3"]
)
def test_models_of_transformers(rank_pool: RankPool, kind: str) -> None:
    assert_as_in_one_process(rank_pool, Case(plan=plan(schedule="1f1b"), kind=kind))
    zero = plan(schedule="zb-h1", dp_shard=2, zero=SLICES)
    assert_as_in_one_process(rank_pool, Case(plan=zero, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_checkpointed_blocks(rank_pool: RankPool, schedule: str) -> None:
    own = Case(plan=plan(schedule=schedule), changes={"checkpointed": True})
    assert_as_in_one_process(rank_pool, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"pp": 1, "dp": 2}), ({"pp": 1, "dp": 2}, {"schedule": "zb-h1"})],
)
@pytest.mark.parametrize("zero", [Zero(), SLICES])
def test_a_state_of_one_layout_goes_on_in_another(
    rank_pool: RankPool, before: dict[str, Any], after: dict[str, Any], zero: Zero
) -> None:
    def under(changes: dict[str, Any]) -> Case:
        mesh = dict(changes)
        if zero.stage:
            mesh.pop("dp", None)
            mesh["dp_shard"] = 2
        microbatches = 4 // (2 if "dp" in mesh or "dp_shard" in mesh else 1)
        return Case(plan=plan(zero=zero, microbatches=microbatches, **mesh))

    first, second = under(before), under(after)
    saved = rank_pool.run(targets.save, first, world_size=first.plan.mesh.world_size)[0]
    expected = targets.one_process(first)
    ranks = rank_pool.run(targets.resume, (second, saved), world_size=second.plan.mesh.world_size)
    found = ranks[0][0]
    assert set(found) == set(expected.after)
    for name, value in expected.after.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)
    for _, losses, shown in ranks:
        assert losses == pytest.approx(expected.losses[1:], rel=1e-10, abs=0)
        for name, value in shown.items():
            wanted = expected.after[f"parameters {name}"]
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-10, msg=name)


def test_what_goes_wrong_in_a_loop(rank_pool: RankPool) -> None:
    for said in rank_pool.run(targets.mistakes, Case(plan=plan()), world_size=2):
        rules = {what: text.split("]")[0].removeprefix("error[") for what, text in said.items()}
        assert rules == {
            "forward": "stage-forward",
            "state_dict": "values-away",
            "step": "module-batch",
            "batch": "module-batch",
            "ranks": "module-batch",
            "twice": "module-batch",
        }


def test_what_the_module_and_the_plan_must_agree_on() -> None:
    # One rank is not there: what is wrong is found before any is needed.
    case = Case(plan=plan(layers=6))
    for one, rule in [
        (case, "module-ranks"),
        (Case(plan=plan(tp=2)), "module-tensor-rules"),
        (Case(plan=plan(zero=Zero(stage=3, parameter_offload="host"))), "module-settings"),
    ]:
        with pytest.raises(EchelonError) as caught:
            apply_pipeline(one.plan, one.make(), split="blocks", loss=CAUSAL, example=one.example())
        assert caught.value.rules == (rule,)


def one_rank(split: str, layers: int) -> None:
    """Cut a module of four blocks on one rank."""
    case = Case(plan=plan(pp=1, layers=layers))
    apply_pipeline(case.plan, case.make(), split=split, loss=CAUSAL, example=case.example())


def test_the_plan_has_as_many_layers_as_the_module_has_blocks() -> None:
    with pytest.raises(InfeasiblePlan, match=r"model\.layers = 6") as caught:
        one_rank("blocks", 6)
    assert caught.value.rules == ("module-split",)
    with pytest.raises(ConfigError, match="module-split"):
        one_rank("layers", 4)
    one_rank("blocks", 4)


def checked(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the stages of parameters, after every stage was run alone."""
    chain, named = BlockChain(model, "blocks", guarded=True), dict(model.named_parameters())
    with leaving_no_trace(model):
        trace = follow(model, chain, LOSS, tokens(), at=frozenset((0, 1, 3, 4)))
        stages_of = stages_of_parameters(chain, trace, named, STAGES)
        stages = [ModuleStage(model, chain, LOSS, one) for one in WINDOWS]
        check_stages(named, stages, trace, stages_of)
    return stages_of


def test_a_chain_passes_and_keeps_its_values() -> None:
    model = made()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    found = checked(model)
    assert found["embed.weight"] == (0,)
    assert found["blocks.2.bias"] == (1,)
    assert found["norm.weight"] == (2,)
    assert found["extra"] == (0,)  # nothing uses it
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name])


def dropout_in_training(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = torch.nn.functional.dropout(block(x), 0.5)
    return x


def test_random_numbers_are_those_of_the_whole_module() -> None:
    assert checked(made(dropout_in_training))["norm.bias"] == (2,)


def hidden_residual(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first = x.detach()
    for block in model.blocks:
        x = block(x) + first
    return x


def sum_of_all(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for block in model.blocks:
        x = block(x)
        total = total + x
    return total


def adds_what_blocks_say(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    said: list[torch.Tensor] = []
    kept = [
        block.register_forward_hook(lambda _, __, y: said.append(y.square().mean()))
        for block in model.blocks
    ]
    for block in model.blocks:
        x = block(x)
    for one in kept:
        one.remove()
    return x + torch.stack(said).sum()


@pytest.mark.parametrize("walk", [hidden_residual, sum_of_all, adds_what_blocks_say])
def test_a_dependence_on_another_stage_is_found(walk: Any) -> None:
    with pytest.raises(ConfigError, match="module-chain") as caught:
        checked(made(walk))
    assert "run alone" in str(caught.value)
    assert "NaN" in str(caught.value)


def test_parameters_that_several_stages_share() -> None:
    model = made()
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(ConfigError, match="module-shared") as caught:
        checked(model)
    assert "stages 0, 1" in str(caught.value)
    model = made()
    model.blocks[2].weight = model.blocks[1].weight
    assert checked(model)["blocks.1.weight"] == (1,)
