"""The layouts of data parallelism on CUDA tensors, proven against the CPU in float64.

Run on any machine with one CUDA GPU (`bench/gpu/run.sh` does); skipped elsewhere. A single rank
talks over NCCL, two and four share the GPU and talk over Gloo. No pipeline and no Muon over several
ranks: both send messages, which Gloo cannot take from a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.core.mesh import Mesh
from echelon.core.plan import OffloadTarget, OptimizerKind, Plan, Precision, Recompute, ZeroStage
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.walks.matrix.zero_cases import STAGES, ZeroCase

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]
SUBJECT = "tests.cuda.on_gpu:build"
MIXED = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")


@pytest.fixture(scope="module")
def nccl_rank() -> Iterator[RankPool]:
    """Yield a pool of one rank that has the GPU for itself."""
    with RankPool(1, backend="nccl") as pool:
        yield pool


def _plan(
    stage: ZeroStage,
    layout: str,
    *,
    optimizer: OptimizerKind = "adamw",
    home: OffloadTarget = "none",
    accumulation: int = 3,
) -> Plan:
    case = ZeroCase(
        stage=stage,
        layout=layout,
        accumulation=accumulation,
        recompute="none",
        optimizer=optimizer,
        home=home,
        tied=False,
    )
    return case.plan()


def _alone(plan: Plan) -> Plan:
    """Return the same mathematics on one rank."""
    return replace(plan, layout=replace(plan.layout, mesh=Mesh()))


def _with_zero(plan: Plan, **changed: object) -> Plan:
    zero = replace(plan.layout.zero, **changed)
    return replace(plan, layout=replace(plan.layout, zero=zero))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", ["dp2", "replicate2-shard2", "dp2-tp2", "dp4"])
def test_ranks_that_share_a_gpu_are_proven(
    stage: ZeroStage, layout: str, rank_pool: RankPool
) -> None:
    proof = prove(
        _plan(stage, layout), run_ranks=rank_pool.run, subject=SUBJECT, own_precision=False
    )
    assert proof.proven, proof.diagnosis


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_one_rank_on_nccl_is_proven(
    stage: ZeroStage, optimizer: OptimizerKind, nccl_rank: RankPool
) -> None:
    plan = _alone(_plan(stage, "dp2", optimizer=optimizer))
    proof = prove(plan, run_ranks=nccl_rank.run, subject=SUBJECT, own_precision=False)
    assert proof.proven, proof.diagnosis


@pytest.mark.parametrize("stage", [0, 3])
def test_mixed_precision_on_nccl_is_proven(stage: ZeroStage, nccl_rank: RankPool) -> None:
    plan = _alone(_plan(stage, "dp2"))
    plan = replace(plan, mathematics=replace(plan.mathematics, precision=MIXED))
    proof = prove(plan, run_ranks=nccl_rank.run, subject=SUBJECT)
    assert [one.precision for one in proof.passes] == ["fp64", "bf16"]
    assert proof.proven, proof.diagnosis


def test_recomputed_blocks_whose_inputs_wait_in_host_memory_are_proven(
    rank_pool: RankPool,
) -> None:
    plan = _plan(3, "dp2")
    recompute = Recompute(policy="full", offload="host")
    plan = replace(plan, layout=replace(plan.layout, recompute=recompute))
    proof = prove(plan, run_ranks=rank_pool.run, subject=SUBJECT, own_precision=False)
    assert proof.proven, proof.diagnosis


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_changes_no_bit(
    stage: ZeroStage, home: OffloadTarget, rank_pool: RankPool, tmp_path: Path
) -> None:
    on_device = _plan(stage, "dp2")
    elsewhere = _with_zero(
        on_device,
        optimizer_offload=home,
        parameter_offload=home if stage == 3 else "none",
        offload_dir=str(tmp_path),
    )
    told = [
        rank_pool.run("tests.cuda.on_gpu:train", {"plan": plan.to_json()}, 2)
        for plan in (_with_zero(on_device, parameter_offload="none"), elsewhere)
    ]
    for here, there in zip(*told, strict=True):
        assert here["strays"] == []
        assert here["mistimed"] == []
        assert here["losses"] == there["losses"]
        assert here["norms"] == there["norms"]
        assert here["parameters"] == there["parameters"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_learn_alike_at_every_stage(stage: ZeroStage, rank_pool: RankPool) -> None:
    plan = _with_zero(_plan(0, "dp2"), stage=stage)
    plan = replace(plan, layout=replace(plan.layout, mesh=Mesh(dp_shard=2)))
    told = rank_pool.run("tests.cuda.on_gpu:train", {"plan": plan.to_json()}, 2)
    reference = rank_pool.run("tests.cuda.on_gpu:train", {"plan": _alone(plan).to_json()}, 1)
    for rank in told:
        assert rank["strays"] == []
        assert rank["mistimed"] == []
        assert rank["losses"] == pytest.approx(reference[0]["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(reference[0]["norms"], rel=1e-4)
