"""How far scores must be off for a choice, or a drop, of the ranks to be the right one; ties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.models.counter_random import initial_values
from echelon.parallel.expert import router
from echelon.proof.claims.checks import Check
from echelon.proof.claims.choice_errors import choice_error, drop_error, with_ties_of_ranks
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.claims.routing_checks import routes, routes_note
from echelon.proof.oracle import batches
from echelon.proof.oracle import oracle as one_device
from echelon.proof.oracle.operations import ForcedRouting
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.run import prove
from echelon.proof.shrink import shrink
from echelon.proof.subject import ReportedRoute, ReportedRouting, ReportedRoutingSummary, StepRecord
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
from tests.proof.mutants.planting import Mutant
from tests.proof.replicas import replicas

BALANCE = Balance(kind="both", aux_coefficient=0.1, z_coefficient=0.01, bias_rate=0.05)


DROPPING = replace(BALANCE, capacity_factor=1.0, drop="score")


def test_one_device_that_is_told_what_it_does_does_the_same() -> None:
    for balance in (BALANCE, DROPPING):
        plan = shrink(plan_of(model=DEEPSEEK, balance=balance), precision="fp64")
        steps = run_oracle(plan, 2)
        told = [_told(step) for step in steps]
        for one, other in zip(steps, run_oracle(plan, 2, forced=told), strict=True):
            assert one.loss == other.loss
            assert all(torch.equal(one.gradients[n], other.gradients[n]) for n in one.gradients)
            for layer, routed in other.routed.items():
                assert choice_error(plan, routed) == drop_error(plan, routed) == (0.0, 0)
                assert routed.aux_loss == one.routed[layer].aux_loss


def _told(step: OracleStep) -> ForcedRouting:
    return {layer: (routed.picked_BTK, routed.kept_BTK) for layer, routed in step.routed.items()}


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK])
def test_the_error_of_a_choice_is_half_of_the_gap_or_more(model: Any) -> None:
    plan = shrink(plan_of(model=model, balance=Balance()), precision="fp64")
    first = run_oracle(plan, 1)[0]
    layer, routed = next(iter(first.routed.items()))
    chosen, wanted_E = routed.picked_BTK[0, 0].tolist(), routed.wanted_BTE[0, 0]
    errors: dict[int, float] = {}
    for other in set(range(len(wanted_E))) - set(chosen):
        told = _told(first)
        told[layer][0][0, 0, -1] = other
        went = run_oracle(plan, 1, forced=[told])[0].routed[layer]
        errors[other], count = choice_error(plan, went)
        assert count == 1
        assert errors[other] >= float(wanted_E[chosen[-1]] - wanted_E[other]) / 2 - 1e-15
        told[layer][0][0, 0, -1] = chosen[-1]
    if model is MIXTRAL:
        best = max(errors, key=lambda expert: float(wanted_E[expert]))
        assert errors[best] == min(errors.values()) > 0
    else:
        # Three groups are more than a token may meet.
        groups = [{one // 2 for one in (*chosen[:-1], other)} for other in errors]
        assert [error == float("inf") for error in errors.values()] == [len(g) > 2 for g in groups]


@pytest.mark.parametrize("drop", ["position", "score"])
def test_who_is_dropped_is_judged_by_the_rule(drop: Any) -> None:
    balance = replace(DROPPING, kind="aux", drop=drop)
    plan = shrink(plan_of(model=MIXTRAL, balance=balance), precision="fp64")
    first = run_oracle(plan, 1)[0]
    layer, routed = next((i, one) for i, one in first.routed.items() if one.dropped)
    row, position, place = torch.nonzero(~routed.kept_BTK)[0].tolist()
    expert = routed.picked_BTK[row, position, place]
    full = (routed.picked_BTK[row] == expert) & routed.kept_BTK[row]
    told = _told(first)
    told[layer][1][row, position, place] = True

    too_many = run_oracle(plan, 1, forced=[told])[0].routed[layer]
    assert drop_error(plan, too_many) == (float("inf"), 1)

    other = torch.nonzero(full)[-1].tolist()
    told[layer][1][row, other[0], other[1]] = False
    swapped = run_oracle(plan, 1, forced=[told])[0].routed[layer]
    gap = float(routed.gates_BTK[row, other[0], other[1]] - routed.gates_BTK[row, position, place])
    error, count = drop_error(plan, swapped)
    assert count == 2
    assert error == (float("inf") if drop == "position" else pytest.approx(gap / 2))


def _tie_two_experts(patch: pytest.MonkeyPatch) -> None:
    """Let experts 0 and 1 begin with the same score for every token."""

    def tied(shape: Any, spec: Any, seed: int) -> torch.Tensor:
        values = initial_values(shape, spec, seed).clone()
        if spec.name.endswith("router.weight"):
            values[1] = values[0]
        return values

    patch.setattr(one_device, "initial_values", tied)


def _with_routes(plan: Plan, told: list[ForcedRouting]) -> PlanEvidence:
    """Return the evidence of one rank that sends tokens where it is told."""

    def report(_: int, step: int, record: StepRecord) -> StepRecord:
        length = plan.mathematics.sequence_length
        tokens_BT = torch.tensor(record.samples)[:, None] * length + torch.arange(length)
        said = [
            ReportedRoute(
                layer=layer,
                microbatch=0,
                tokens=tokens_BT.flatten().tolist(),
                chosen=chosen_BTK.flatten(0, 1).tolist(),
                kept=kept_BTK.flatten(0, 1).tolist(),
            )
            for layer, (chosen_BTK, kept_BTK) in told[step].items()
        ]
        summary = ReportedRoutingSummary(
            assignments=0, dropped=0, aux_loss=0.0, z_loss=0.0, imbalance=1.0
        )
        return replace(
            record,
            routing=ReportedRouting(routes=said, loads={}, summary=summary, biases={}, shares={}),
        )

    evidence = replicas(plan, len(told), report=report)
    return replace(evidence, steps=with_ties_of_ranks(plan, evidence.steps, evidence.run))


def _wrong(evidence: PlanEvidence) -> list[Check]:
    return [check for check in routes(evidence) if not check.error <= check.allowed]


TIED = shrink(plan_of(model=MIXTRAL, balance=Balance()), precision="fp64")


def _other_of_two(step: OracleStep) -> ForcedRouting:
    """Return the choices of the first layer with expert 1 for 0, and 0 for 1, where one is."""
    layer, (chosen_BTK, kept_BTK) = next(iter(_told(step).items()))
    few_BTK = chosen_BTK < 2
    one_BTK = few_BTK & (few_BTK.sum(-1, keepdim=True) == 1)
    return {layer: (torch.where(one_BTK, 1 - chosen_BTK, chosen_BTK), kept_BTK)}


def test_the_oracle_takes_over_ties_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _tie_two_experts(monkeypatch)
    plain = run_oracle(TIED, 2)
    went = run_oracle(TIED, 2, forced=[_other_of_two(plain[0]), {}])
    assert went[0].loss != plain[0].loss, "the two experts are not the same"

    told = [_told(step) for step in went]
    evidence = _with_routes(TIED, told)
    assert not _wrong(evidence)
    assert [one.loss for one in evidence.steps] == [one.loss for one in went]
    assert "choices differ by rounding" in routes_note(evidence, ())

    # A worse expert in the second step: the ties of the first stay, and it is told.
    layer, routed = next(iter(went[1].routed.items()))
    chosen_BTK = told[1][layer][0].clone()
    chosen_BTK[0, 3, -1] = int(routed.wanted_BTE[0, 3].argmin())
    worse = [told[0], {**told[1], layer: (chosen_BTK, told[1][layer][1])}]
    (found,) = [check for check in _wrong(_with_routes(TIED, worse)) if check.step == 1][:1]
    assert found.detail.startswith("1 of 16 tokens go elsewhere: position 3 of sequence 0")
    assert not [check for check in _wrong(_with_routes(TIED, worse)) if check.step == 0]


def test_without_ties_the_oracle_goes_its_own_way() -> None:
    plain = run_oracle(TIED, 1)
    right = _with_routes(TIED, [_told(plain[0])])
    assert right.steps[0].forced_routing is None
    assert routes_note(right, ()) == ""
    evidence = _with_routes(TIED, [{**_told(plain[0]), **_other_of_two(plain[0])}])
    assert evidence.steps[0].forced_routing is None
    assert _wrong(evidence), "experts 0 and 1 score otherwise"


def _repeat_one_token(sequence: Any, *_: Any, **__: Any) -> None:
    sequence[:] = 5


@Mutant
def later_of_equals(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Of gates that are equal but for rounding, prefer those of later positions."""
    right = router.kept_assignments

    def kept(chosen_NK: torch.Tensor, gates_NK: torch.Tensor, *rest: Any, **more: Any) -> Any:
        later_N1 = 1e-12 * torch.arange(len(gates_NK))[:, None]
        return right(chosen_NK, gates_NK + later_N1, *rest, **more)

    patch.setattr(router, "kept_assignments", kept)
    patch.setattr(batches, "_make_distinct", _repeat_one_token)


@Mutant
def lower_of_two(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Drop the higher gates."""
    right = router.kept_assignments

    def kept(chosen_NK: torch.Tensor, gates_NK: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return right(chosen_NK, -gates_NK, *rest, **more)

    patch.setattr(router, "kept_assignments", kept)


def test_ranks_that_drop_the_other_one_of_equals_are_right(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_make_distinct", _repeat_one_token)
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=replace(DROPPING, kind="aux"))
    name = f"{__name__}:later_of_equals"
    proof = prove(plan, run_ranks=rank_pool.run, subject=name, own_precision=False)
    proof.require()
    (claim,) = [one for one in proof.passes[0].claims if one.rule.id == "prove-routes"]
    assert "choices differ by rounding" in claim.note
    assert not claim.note.startswith("0 of")


@pytest.mark.slow
def test_ranks_that_drop_the_better_one_are_not(rank_pool: RankPool) -> None:
    plan = plan_of(model=MIXTRAL, dp_shard=2, ep=2, balance=replace(DROPPING, kind="aux"))
    name = f"{__name__}:lower_of_two"
    proof = prove(plan, run_ranks=rank_pool.run, subject=name, own_precision=False)
    assert proof.diagnosis is not None
    assert (proof.diagnosis.rule, proof.diagnosis.step) == ("prove-routes", 0)
