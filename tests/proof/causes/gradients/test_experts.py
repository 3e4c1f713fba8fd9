"""A wrong gradient of an expert is told by whose it is; of a router, by how often losses count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.experts import AuxiliaryScope, Balance
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.experts import aux_loss, flat, loads_in, wrong_shares
from echelon.proof.causes.gradients.gradients import explain_gradient
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.oracle import build_decoder, loss_of_tokens, run_oracle
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.replicas import replicas

BALANCE = Balance(kind="aux", aux_coefficient=0.5, aux_over="sequence", z_coefficient=0.25)
PLAN = shrink(plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=BALANCE), precision="fp64")
EXPERT = "layers.1.mlp.experts.0.down.weight"
REMOTE = "layers.1.mlp.experts.3.down.weight"
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
    assert finding.description == "the gradient of expert 3: experts are permuted"


def test_a_sum_over_the_wrong_ranks_holds_the_gradients_of_other_experts() -> None:
    finding = told(EXPERT, RIGHT[EXPERT] + RIGHT[REMOTE])
    assert (finding.factor, finding.axis) == ("wrong group", "ep")
    assert "summed with the gradients of experts 3" in finding.description


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


def test_loads_are_counted_by_scope() -> None:
    chosen_NK = torch.tensor([[0, 1], [0, 2], [2, 1], [2, 0]])
    scope_N = torch.tensor([0, 1, 1, 0])
    assert loads_in(chosen_NK, scope_N, 3).tolist() == [[2, 1, 1], [1, 1, 2]]
    by_sequence = torch.arange(2 * 3 * 1).view(2, 3, 1)
    assert flat(by_sequence)[:, 0].tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("over", "axes"),
    [
        ("global", {"dp and microbatches", "dp", "microbatches", ""}),
        ("sequence", set[str]()),
    ],
)
def test_wrong_shares_give_another_loss_than_right_ones(
    over: AuxiliaryScope, axes: set[str]
) -> None:
    balance = Balance(kind="aux", aux_coefficient=0.5, aux_over=over)
    plan = shrink(plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=balance), precision="fp64")
    evidence = replicas(plan, 2)
    oracle = evidence.steps[1]
    model = build_decoder(plan, oracle.before, routing=oracle.routing)
    loss_of_tokens(plan, model, oracle)
    found = {one.axis: loss.item() for one, loss in wrong_shares(evidence, oracle, model)}
    assert found.keys() == axes
    # Every token takes the shares of the step before: what a right run differentiates.
    last = {layer: flat(one.picked_BTK) for layer, one in evidence.steps[0].routed.items()}
    scope_N = torch.zeros(len(next(iter(last.values()))), dtype=torch.int64)
    right = aux_loss(plan, model, last, scope_N).item()
    assert all(abs(loss / right - 1) > 1e-6 for loss in found.values())
