"""Our engine is proven in mixed precision, and what is wrong in that precision only is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from echelon.proof.shrink import num_updates
from echelon.training.optimizer import trained_ranges
from echelon.training.subject import build
from tests.proof.layouts import BF16, BF16_SUMS, FP16, layout
from tests.proof.mutants.planting import MutantSubject

HYBRID = {"dp_replicate": 2, "dp_shard": 2}
IN_FILES = {"optimizer_offload": "nvme", "parameter_offload": "nvme"}

PLANS: dict[str, dict[str, Any]] = {
    "bf16-zero0-dp4": {"dp": 4, "precision": BF16_SUMS, "zero": {"stage": 0}},
    "bf16-zero1-dp2": {"dp": 2, "precision": BF16, "zero": {"stage": 1}},
    "bf16-zero2-dp2-sgd": {
        "dp": 2,
        "precision": BF16_SUMS,
        "zero": {"stage": 2, "accumulate": "slices"},
        "optimizer": {"kind": "sgd"},
    },
    "bf16-zero3-hybrid-muon": {
        "dp": 4,
        "precision": BF16,
        "zero": {"stage": 3, "accumulate": "slices"},
        "mesh": HYBRID,
        "optimizer": {"kind": "muon"},
    },
    "bf16-zero3-files": {
        "dp": 2,
        "precision": {**BF16, "reduction": "bf16"},
        "zero": {"stage": 3, **IN_FILES},
    },
    "bf16-without-master": {
        "dp": 2,
        "precision": {**BF16_SUMS, "master": "bf16"},
        "zero": {"stage": 2},
    },
    "fp16-zero2-tied-stages-muon": {
        "dp": 2,
        "pp": 2,
        "tied": True,
        "precision": FP16,
        "zero": {"stage": 2},
        "optimizer": {"kind": "muon"},
    },
    "fp16-zero3-tensor": {
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "recompute": "full",
        "precision": {**FP16, "gradients": "fp32", "loss_scale_hysteresis": 2},
        "zero": {"stage": 3, "accumulate": "slices"},
    },
    "fp16-fixed": {
        "dp": 2,
        "precision": {**FP16, "loss_scaling": "fixed", "loss_scale": 1000.0},
        "zero": {"stage": 1},
    },
}


@pytest.mark.quick("bf16-without-master")
@pytest.mark.parametrize("name", PLANS)
def test_mixed_precision_is_proven(name: str, rank_pool: RankPool) -> None:
    plan = layout(**PLANS[name])
    proof = prove(plan, run_ranks=rank_pool.run)

    proof.require()
    exact, own = ({claim.rule.id: claim for claim in one.claims} for one in proof.passes)
    assert ("prove-master-weights" in own) == plan.mathematics.precision.has_master
    assert "prove-master-weights" not in exact
    # A step that overflows is skipped in float64, where that is sharp, and nowhere else.
    hysteresis = plan.mathematics.precision.loss_scale_hysteresis
    dynamic = plan.mathematics.precision.loss_scaling == "dynamic"
    skipped = hysteresis if dynamic else 0
    updates = num_updates(plan.mathematics)
    assert proof.num_steps == updates + skipped
    num_tensors = exact["prove-parameters"].compared
    assert exact["prove-gradients"].compared == updates * num_tensors
    assert own["prove-gradients"].compared == (3 + skipped) * num_tensors
    for claims, steps in ((exact, updates + skipped), (own, 3 + skipped)):
        assert claims["prove-loss-scale"].compared == 2 * plan.mesh.world_size * steps
        assert claims["prove-bytes-held"].compared


def scales_in_bf16(context: RankContext, plan: Plan) -> MutantSubject:
    """Build an engine that multiplies gradients in bfloat16 before it widens them."""
    patch = pytest.MonkeyPatch()
    narrow = plan.mathematics.precision.parameters == "bf16"

    def scale(gradient: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
        rounded = gradient.bfloat16() if narrow else gradient
        return (rounded * factor).to(dtype)

    patch.setattr(trained_ranges, "scale_gradient", scale)
    return MutantSubject(build(context, plan), patch)


@pytest.mark.slow
def test_an_optimizer_that_rounds_what_the_gradients_have_is_found(rank_pool: RankPool) -> None:
    proof = prove(
        layout(dp=2, precision=BF16, zero={"stage": 1}),
        run_ranks=rank_pool.run,
        subject=f"{__name__}:scales_in_bf16",
    )

    exact, own = proof.passes
    assert exact.holds
    # The oracle's tolerance has to allow for bfloat16 all the way; the replay does not.
    assert {claim.rule.id for claim in own.claims if not claim.holds} == {"prove-replayed-update"}
    assert own.diagnosis is not None
    assert own.diagnosis.factor == "reordering only"
