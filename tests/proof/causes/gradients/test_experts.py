"""A wrong gradient of an expert is told by whose it is; of a router, by how often losses count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.experts import Balance
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.gradients import explain_gradient
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.evidence import replicas

BALANCE = Balance(kind="aux", aux_coefficient=0.5, aux_over="sequence", z_coefficient=0.25)
PLAN = shrink(plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=BALANCE), precision="fp64")
EXPERT = "layers.1.mlp.experts.0.down.weight"
REMOTE = "layers.1.mlp.experts.2.down.weight"
ROUTER = "layers.1.mlp.router.weight"
RIGHT = run_oracle(PLAN, 1)[0].gradients


def told(name: str, gradient: object) -> ProofFinding:
    """Return what is said where all ranks hold this gradient."""

    def shard(piece: ObservedShard) -> object:
        return gradient if (piece.kind, piece.name) == ("gradients", name) else piece.tensor

    evidence = replicas(PLAN, shard=shard)  # pyright: ignore[reportArgumentType]
    return explain_gradient(evidence, Check(0, name, 1.0))


def test_an_expert_that_has_the_gradient_of_another_rank_s_is_permuted() -> None:
    finding = told(EXPERT, RIGHT[REMOTE])
    assert (finding.factor, finding.axis, finding.ranks) == ("experts permuted", "ep", (0, 1))
    assert finding.description == "the gradient of expert 2: experts are permuted"


def test_a_sum_over_the_wrong_ranks_holds_the_gradients_of_other_experts() -> None:
    finding = told(EXPERT, RIGHT[EXPERT] + RIGHT[REMOTE])
    assert (finding.factor, finding.axis) == ("wrong group", "ep")
    assert "summed with the gradients of experts 2" in finding.description


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"aux_coefficient": 1.0}, "the auxiliary loss counts 2 times"),
        ({"z_coefficient": 0.125}, "the z-loss counts 0.5 times"),
        ({"z_coefficient": 0.0}, "the z-loss is missing (zero)"),
    ],
)
def test_losses_of_routers_that_count_otherwise_are_told(
    changed: dict[str, float], says: str
) -> None:
    mathematics = replace(PLAN.mathematics, balance=replace(BALANCE, **changed))
    other = run_oracle(replace(PLAN, mathematics=mathematics), 1)[0].gradients
    assert told(ROUTER, other[ROUTER]).description.startswith(says)
