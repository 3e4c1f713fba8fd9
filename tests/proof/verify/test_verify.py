"""Right programs are proven, planted bugs are named: DDP, with unequal tokens and clipping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.proof.verify.planted_programs import proof_of

OPTIMIZER = "optimizer = optimizer_of(model)\n    rank"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
DDP = "DDP(Net().to(case.dtype))"
LOSS = "loss.backward()"


def test_ddp_is_proven_in_both_precisions(rank_pool: RankPool, tmp_path: Path) -> None:
    proof = proof_of(rank_pool, tmp_path, "ddp")
    assert proof.proven, proof.diagnosis
    assert [one.precision for one in proof.passes] == ["fp64", "fp32"]
    assert (proof.mesh, proof.framework, proof.num_parameters) == ("dp2", "torch", 7)
    compared = {claim.rule.id: claim.compared for claim in proof.passes[0].claims}
    assert compared["prove-gradients"] == compared["prove-clipped-update"] == 7 * 3
    assert compared["verify-local-gradients"] == 7 * 3
    assert compared["verify-optimizer-state"] == 2 * 7 * 3


BUGS = {
    "mean of means": (
        {"tokens = (batch(number)[1] != -100).sum()": "tokens = dp * (labels != -100).sum()"},
        ("verify-local-gradients", "head.bias", "mean of means", "dp"),
    ),
    "not reduced": (
        {DDP: "Net().to(case.dtype)"},
        ("prove-gradients", "head.bias", "missing sum", "dp"),
    ),
    "clipped by the norm of the head": (
        {CLIP: CLIP.replace("model.", "model.module.head.")},
        ("prove-gradients", "head.bias", "partial clip", ""),
    ),
    "clipped by a norm of its own": (
        {
            CLIP: "nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, nn.utils.get_total_norm("
            "[p.grad for i, p in enumerate(model.parameters()) if i != rank]))"
        },
        ("prove-gradients", "head.bias", "partial norm", "dp"),
    ),
    "another rate": (
        {OPTIMIZER: OPTIMIZER.replace("(model)", "(model, 3e-2)")},
        ("prove-clipped-update", "embedding.weight", "number", ""),
    ),
    "no decay": (
        {OPTIMIZER: OPTIMIZER.replace("(model)", "(model, decay=0.0)")},
        ("prove-clipped-update", "embedding.weight", "weight decay", ""),
    ),
    "same rows": (
        {"chunk(dp)[rank]": "chunk(dp)[0]"},
        ("verify-local-gradients", "head.bias", "same data", "dp"),
    ),
    "not zeroed": (
        {"optimizer.zero_grad()": "pass"},
        ("prove-gradients", "head.bias", "accumulated", ""),
    ),
    "wrong sign on a rank": (
        {LOSS: "(loss if rank == 0 else -loss).backward()"},
        ("verify-local-gradients", "head.bias", "ranks weighted", "dp"),
    ),
    "another seed on a rank": (
        {"manual_seed(case.seed)\n    model = DDP(Net": "manual_seed(case.rank)\n    model = (Net"},
        ("prove-initial-weights", "embedding.weight", "none", "dp"),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named(bug: str, rank_pool: RankPool, tmp_path: Path) -> None:
    changes, wanted = BUGS[bug]
    proof = proof_of(rank_pool, tmp_path, "ddp", {"DTYPE = torch.float32": EXACT, **changes})
    told = proof.diagnosis
    assert told is not None
    assert (told.rule, told.tensor, told.factor, told.axis) == wanted, told.says


SCALED = {"return self.head(h)": "return self.scale * self.head(h)"}
FIRST = {
    "self.embedding = nn": "self.scale = nn.Parameter(torch.ones(1))\n        self.embedding = nn"
}
LAST = {
    "self.head = nn.Linear(WIDTH, VOCAB)": "self.head = nn.Linear(WIDTH, VOCAB)\n"
    "        self.scale = nn.Parameter(torch.ones(1))"
}


@pytest.mark.parametrize(
    ("bug", "place", "wanted"),
    [
        ("mean of means", LAST, ("head.bias", "mean of means", "dp")),
        ("no decay", FIRST, ("embedding.weight", "weight decay", "")),
        ("another rate", FIRST, ("scale", "number", "")),
    ],
)
def test_a_single_number_fits_any_factor_and_others_name_the_cause(
    bug: str,
    place: Mapping[str, str],
    wanted: tuple[str, str, str],
    rank_pool: RankPool,
    tmp_path: Path,
) -> None:
    changes = {"DTYPE = torch.float32": EXACT, **SCALED, **place, **BUGS[bug][0]}
    told = proof_of(rank_pool, tmp_path, "ddp", changes).diagnosis
    assert told is not None
    assert (told.tensor, told.factor, told.axis) == wanted, told.says


EXACT = "DTYPE = torch.float64"
