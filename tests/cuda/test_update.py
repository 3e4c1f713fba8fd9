"""The optimizer on a GPU: updates in one pass, and norms that copy no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from echelon.core.choices.kernels import Kernels
from echelon.core.plan import OptimizerKind, Plan, ZeroStage
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from echelon.training.optimizer.step import _squares
from tests.cuda.test_layouts import MIXED, SUBJECT, _alone, _plan
from tests.training.optimizer.test_trained_ranges import LENGTH, RULES, updated

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]
GPU = torch.device("cuda", 0)
ELEMENTS = 5_000_011  # odd, and more than a program takes


@pytest.fixture(scope="module")
def nccl_rank() -> Iterator[RankPool]:
    """Yield a pool of one rank that has the GPU for itself."""
    with RankPool(1, backend="nccl") as pool:
        yield pool


def _in_one_pass(plan: Plan) -> Plan:
    """Return a plan with gradients of bf16, master copies in fp32 and the kernel that casts."""
    layout = replace(plan.layout, kernels=Kernels(provider="triton", fused=("update",)))
    mathematics = replace(plan.mathematics, precision=MIXED)
    return replace(plan, mathematics=mathematics, layout=layout)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scratch", [False, True])
def test_it_is_the_update_of_many_passes(kind: str, gradients: torch.dtype, scratch: bool) -> None:
    """Roundings differ: a few of float32 beside numbers of up to 1, one of bf16 in values."""
    first, second = (
        updated(
            kind, gradients, master=torch.float32, scratch=scratch, one_pass=one_pass, device=GPU
        )
        for one_pass in (False, True)
    )
    for one, other in zip(first[:-2], second[:-2], strict=True):
        assert other.shape == (LENGTH,)
        off = 2.0**-21 if one.dtype == torch.float32 else torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=off, atol=off)
    gradient, before = second[-2:]
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_norm_copies_no_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    run = torch.randn(ELEMENTS, device=GPU).to(dtype)
    exact = float(run.double().square().sum())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = float(_squares([run[:1], run[1:]]))
    assert torch.cuda.max_memory_allocated() - before < ELEMENTS
    assert found == pytest.approx(exact, rel=1e-12 if dtype == torch.float64 else 1e-5)
    run[7] = float("nan")
    assert not _squares([run]).isfinite()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_rank_on_nccl_is_proven_in_one_pass(
    stage: ZeroStage, optimizer: OptimizerKind, nccl_rank: RankPool
) -> None:
    plan = _in_one_pass(_alone(_plan(stage, "dp2", optimizer=optimizer)))
    proof = prove(plan, run_ranks=nccl_rank.run, subject=SUBJECT)
    assert proof.proven, proof.diagnosis


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_that_share_a_gpu_are_proven_in_one_pass(
    stage: ZeroStage, rank_pool: RankPool
) -> None:
    """Slices begin anywhere: their parts are updated as the whole would be."""
    plan = _in_one_pass(_plan(stage, "dp2"))
    proof = prove(plan, run_ranks=rank_pool.run, subject=SUBJECT)
    assert proof.proven, proof.diagnosis
