"""Tensor ranks, stages, context ranks and data ranks together equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.axis import Axis
from echelon.core.plan import Zero
from echelon.launch.local.supervisor import RankPool
from echelon.layout.stage import part_of
from tests.parallel.module.composed import composed_targets as targets
from tests.parallel.module.composed.composed_targets import Composed, ComposedTrained, composed_plan
from tests.parallel.module.sent_bytes import StageLayers, module_pipeline_bytes, module_tensor_bytes
from tests.parallel.module.tensor.families import WIDTH

SLICES = Zero(stage=3, accumulate="slices")
SEQUENCE: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


def assert_as_in_one_process(pool: RankPool, case: Composed) -> list[ComposedTrained]:
    """Compare losses, norms, parameters and state of three steps with torch alone."""
    expected = targets.on_one_device(case)
    size = case.plan.mesh.world_size
    ranks = pool.run(targets.train, case, world_size=size, timeout_s=200.0)
    for rank, one in enumerate(ranks):
        assert one.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)
        assert one.norms == pytest.approx(expected.norms, rel=1e-10, abs=0)
        assert one.evaluated == pytest.approx(expected.evaluated, rel=1e-10, abs=0)
        place = case.plan.mesh.coordinates(rank)
        shards = case.plan.mesh.degree(Axis.DP_SHARD)
        assert one.data_rank == place[Axis.DP_REPLICATE] * shards + place[Axis.DP_SHARD]
    assert set(ranks[0].after) == set(expected.after)
    for name, value in expected.after.items():
        torch.testing.assert_close(ranks[0].after[name], value, rtol=0, atol=1e-9, msg=name)
    return ranks


def assert_bytes(case: Composed, ranks: list[ComposedTrained]) -> None:
    """Compare what each rank sent in the last step, by axis, with the formulas."""
    plan = case.plan
    tokens = plan.layout.microbatch_sequences * case.length
    for rank, one in enumerate(ranks):
        part = part_of(plan, rank)
        degree = plan.mesh.tp if plan.layout.sequence_parallel else 1
        elements = tokens * WIDTH // degree
        right = module_pipeline_bytes(plan, one.buckets, rank=rank, stream_elements=elements)
        blocks = tuple(f"{case.split}.{block}" for block in part.blocks)
        ends = ("tokens",) * part.first + ("head",) * part.last
        stage = StageLayers(modules=(*blocks, *ends), first=part.first, last=part.last)
        each = module_tensor_bytes(one.split, tokens, 8, stage=stage, loss_bytes=8)
        right["tp"] = right.get("tp", 0) + plan.num_microbatches * each
        assert one.sent == right


@pytest.mark.parametrize("changes", [{**SEQUENCE, "pp": 2}])
def test_stages_of_tensor_ranks(rank_pool: RankPool, changes: dict[str, Any]) -> None:
    case = Composed(plan=composed_plan(**changes))
    assert_bytes(case, assert_as_in_one_process(rank_pool, case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 2, "pp": 2, "schedule": "1f1b"},
        {"tp": 2, "pp": 2, "schedule": "zb-h1"},
        {**SEQUENCE, "pp": 2, "schedule": "zb-h1"},
        {**SEQUENCE, "pp": 2, "dp_shard": 2, "zero": SLICES},
        {**SEQUENCE, "pp": 2, "dp_shard": 2, "zero": Zero(stage=2)},
        {"tp": 2, "pp": 2, "dp": 2, "schedule": "zb-h1"},
    ],
)
def test_stages_tensor_and_data_ranks(rank_pool: RankPool, changes: dict[str, Any]) -> None:
    case = Composed(plan=composed_plan(**changes))
    assert_bytes(case, assert_as_in_one_process(rank_pool, case))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "gemma2", "mixtral"])
def test_slices_of_tensor_ranks_without_stages(rank_pool: RankPool, kind: str) -> None:
    plan = composed_plan(**SEQUENCE, dp_shard=2, zero=Zero(stage=3))
    assert_as_in_one_process(rank_pool, Composed(plan=plan, kind=kind))


@pytest.mark.slow
def test_frozen_parameters(rank_pool: RankPool) -> None:
    plan = composed_plan(**SEQUENCE, pp=2, schedule="zb-h1")
    frozen = ("tokens", "blocks.0.attention.qkv", "blocks.1.down", "norm")
    assert_as_in_one_process(rank_pool, Composed(plan=plan, frozen=frozen))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tp": 2}, SEQUENCE])
@pytest.mark.parametrize("kind", ["own", "llama"])
def test_context_and_tensor_ranks(rank_pool: RankPool, kind: str, changes: dict[str, Any]) -> None:
    plan = composed_plan(cp=2, sequence_length=8, **changes)
    assert_as_in_one_process(rank_pool, Composed(plan=plan, kind=kind, attention="sdpa"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "llama"])
def test_context_tensor_and_stages(rank_pool: RankPool, kind: str) -> None:
    plan = composed_plan(cp=2, sequence_length=8, pp=2, tp=2)
    assert_as_in_one_process(rank_pool, Composed(plan=plan, kind=kind, attention="sdpa"))


@pytest.mark.slow
def test_a_file_of_one_layout_goes_on_in_any_other(rank_pool: RankPool, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"microbatches": 4},
        {**SEQUENCE, "pp": 2, "microbatches": 4},
        {"tp": 2, "dp_shard": 2, "zero": Zero(stage=3)},
        {"pp": 2, "dp_shard": 2, "zero": Zero(stage=2)},
    ]

    def run(changes: dict[str, Any], file: Path, *, first: bool) -> dict[str, torch.Tensor]:
        plan = composed_plan(**changes)
        case = Composed(plan=plan)
        size = plan.mesh.world_size
        given = (case, str(file), first)
        return rank_pool.run(targets.saved_and_loaded, given, world_size=size, timeout_s=200.0)[0]

    for number, changes in enumerate(layouts):
        run(changes, tmp_path / f"{number}.pt", first=True)
    right = run(layouts[0], tmp_path / "0.pt", first=False)
    for number, changes in enumerate(layouts):
        after = run(changes, tmp_path / f"{(number + 1) % len(layouts)}.pt", first=False)
        for name, value in right.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("own", {"tp": 2, "pp": 2}),
        pytest.param("own", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(
            "own", {**SEQUENCE, "pp": 2, "dp_shard": 2, "zero": SLICES}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", {"tp": 2, "dp_shard": 2, "zero": SLICES}, marks=pytest.mark.slow),
        pytest.param("mixtral", {**SEQUENCE, "pp": 2}, marks=pytest.mark.slow),
    ],
)
def test_all_parameters_are_whole_inside_of_whole(
    rank_pool: RankPool, kind: str, changes: dict[str, Any]
) -> None:
    case = Composed(plan=composed_plan(**changes), kind=kind)
    size = case.plan.mesh.world_size
    ranks = rank_pool.run(targets.shown_whole, case, world_size=size, timeout_s=200.0)
    shapes = {name: one.shape for name, one in case.make().named_parameters()}
    assert {name: one.shape for name, one in ranks[0].full.items()} == shapes
    for one in ranks:
        assert one.untouched
        assert one.rules == ("values-away",)
        for name, value in ranks[0].full.items():
            assert torch.equal(one.shown[name], value), name
        assert one.losses == ranks[0].losses
    for name, value in ranks[0].loaded.items():
        assert torch.equal(value, ranks[0].given[name]), name
