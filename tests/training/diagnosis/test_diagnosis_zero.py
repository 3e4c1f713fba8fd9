"""What is not finite under ZeRO: who is named where slices are sent round, and fp16's overflows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.cli.main import main
from echelon.core.plan import Plan, Precision, Zero
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.training.diagnosis import explain_not_finite
from tests.parallel.layouts import QWEN, plan_of
from tests.training import engine_targets
from tests.training.engine_targets import Poisoned, batches_of, make_engine
from tests.training.small_runs import TINY, small_data

LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 1, hybrid": {"dp": 2, "dp_shard": 2, "zero": Zero(stage=1)},
    "stage 2": {"dp_shard": 4, "zero": Zero(stage=2, accumulate="slices")},
    "stage 3, pp2": {"dp_shard": 2, "pp": 2, "zero": Zero(stage=3, accumulate="slices")},
    "stage 3, tp2, once a step": {
        "dp_shard": 2,
        "tp": 2,
        "zero": Zero(stage=3, accumulate="slices", reshard_after_forward=False),
    },
}
FP16 = Precision(
    parameters="fp16",
    gradients="fp16",
    reduction="fp16",
    master="fp32",
    loss_scaling="dynamic",
    loss_scale=1024.0,
)


def explain(context: RankContext, argument: tuple[Plan, str, int]) -> str:
    """Take a step with a NaN in a weight or a gradient of one rank; return what is told of it."""
    plan, where, culprit = argument
    engine = make_engine(context, plan)
    name = "layers.3.mlp_norm.weight"
    if context.rank == culprit and where == "weight":
        (bucket,) = (b for b in engine.model.buckets if name in b.plan.names)
        (slot,) = (slot for slot in bucket.slots if slot.spec.name == name)
        part = bucket.within_own_slice(slice(slot.start, slot.end))
        assert part.stop > part.start, "this rank holds nothing of it"
        bucket.value_slice[part] = float("nan")
    if context.rank == culprit and where == "gradient":
        parameter = dict(next(iter(engine.model.stages.values())).named_parameters())[name]
        store: Any = engine.model.store
        add = store.add

        def broken(target: torch.Tensor, gradient: torch.Tensor) -> None:
            add(target, gradient * float("nan") if target is parameter else gradient)

        store.add = broken
    batches = batches_of(engine, 0)
    result = engine.step(batches, 0)
    assert not result.finite
    before = {name: shards[0].tensor.clone() for name, shards in engine.parameters().items()}
    message = explain_not_finite(engine, batches, 1, result).problems[0].message
    for name, shards in engine.parameters().items():
        assert torch.equal(shards[0].tensor.nan_to_num(), before[name].nan_to_num())
    return message


def holder(plan: Plan, rank_pool: RankPool) -> int:
    """Return the last rank that holds a part of the weight which is made NaN."""
    held = rank_pool.run(f"{__name__}:holds", plan, 4)
    return max(rank for rank, holds in enumerate(held) if holds)


def holds(context: RankContext, plan: Plan) -> bool:
    """Return whether this rank holds a part of the weight."""
    return "layers.3.mlp_norm.weight" in make_engine(context, plan).masters()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_weight_that_is_nan_is_named_with_its_layer_and_its_rank(
    layout: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = plan_of(model=QWEN, **layout)
    culprit = holder(plan, rank_pool)
    (message,) = set(rank_pool.run(explain, (plan, "weight", culprit), 4))
    who = f"rank {culprit} ({plan.mesh.label(culprit)})"
    assert "in layers.3.mlp_norm; " in message
    assert f"; not finite itself is the weight layers.3.mlp_norm.weight of {who}; " in message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_gradient_that_is_nan_is_named_with_its_layer_and_its_rank(
    layout: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = plan_of(model=QWEN, **layout)
    (message,) = set(rank_pool.run(explain, (plan, "gradient", 3), 4))
    microbatch = "" if plan.layout.zero.accumulate == "whole" else ", microbatch 0"
    assert (
        f"; first seen on rank 3 ({plan.mesh.label(3)}){microbatch}, "
        "in the gradient of layers.3.mlp_norm.weight; " in message
    )
    assert "not finite itself" not in message


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    layout: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = plan_of(model=QWEN, precision=FP16, **layout)
    ranks: list[Poisoned] = rank_pool.run(engine_targets.poison, (plan, "gradient", 2), 4)
    for rank in ranks:
        assert [result.skipped for result in rank.results] == [False, True, False]
        assert [result.loss_scale for result in rank.results] == [1024.0, 1024.0, 512.0]
        assert all(result.finite for result in rank.results)
        for name, shards in rank.before.items():
            assert torch.equal(shards[0].tensor, rank.after[name][0].tensor)
        for one, other in zip(*rank.moments, strict=True):
            assert torch.equal(one, other)


def test_a_nan_in_the_loss_is_no_overflow(rank_pool: RankPool) -> None:
    plan = plan_of(model=QWEN, precision=FP16, **LAYOUTS["stage 2"])
    ranks: list[Poisoned] = rank_pool.run(engine_targets.poison, (plan, "loss", 1), 4)
    for rank in ranks:
        assert [result.finite for result in rank.results] == [True, False, True]
        assert not any(result.skipped for result in rank.results)
        assert [result.loss_scale for result in rank.results] == [1024.0] * 3


def test_skipped_steps_are_in_the_log_and_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = [
        *(one for one in TINY if not one.startswith("train.steps")),
        *("train.steps=6", "data.source=words.txt", "mesh.dp_shard=2", "zero.stage=3"),
        *("precision.parameters=fp16", "precision.loss_scaling=dynamic"),
        "precision.loss_scale=4194304.0",
    ]
    assert main(["train", "nano", *(word for one in settings for word in ("--set", one))]) == 0
    lines = (tmp_path / "runs/nano/metrics.jsonl").read_text().splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    skipped = [entry["step"] for entry in steps if entry["skipped"]]
    assert skipped[0] == 1
    assert len(skipped) < 6
    scales = [entry["loss_scale"] for entry in steps]
    for before, after, entry in zip(scales, scales[1:], steps, strict=False):
        assert after == (before / 2 if entry["skipped"] else before)
    printed = capfd.readouterr().err
    told = [line for line in printed.splitlines() if line.startswith("step") and "skipped" in line]
    assert [line.split()[1] for line in told] == [f"{step}/6" for step in skipped]
