"""The first wrong thing is told, and what of it is not a gradient or an update."""

from __future__ import annotations

import torch

from echelon.proof.causes.diagnose import diagnose
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.claims.claims import judge
from echelon.proof.evidence.captured import RankReport
from echelon.proof.evidence.run import PassedTensor
from tests.proof.causes.passing.passes import evidence_of_passes, one_device, passed_on
from tests.proof.verify.captures import AFTER, GRADIENT, Values, evidence_of, reference


def told(values: Values, *reports: RankReport) -> Diagnosis:
    evidence = evidence_of(values, reports=reports or (RankReport(), RankReport()))
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    return found


def test_what_holds_has_no_diagnosis() -> None:
    evidence = evidence_of({})
    assert diagnose(evidence, judge(evidence)) is None


def test_a_wrong_loss_is_explained_by_a_wrong_gradient_of_the_step() -> None:
    wrong = {(rank, "gradients"): {"v": GRADIENT["v"] * 2} for rank in (0, 1)}
    found = told(wrong, RankReport(loss=3.3), RankReport())
    assert (found.rule, found.tensor, found.factor) == ("prove-gradients", "v", "dp")
    assert "the loss is wrong too: 3.3 instead of 2" in found.says
    alone = told({}, RankReport(loss=4.0), RankReport())
    assert (alone.rule, alone.factor) == ("prove-loss", "dp")
    assert "gradients are right: the reported loss is wrong" in alone.says
    both = {(rank, "gradients"): {"v": GRADIENT["v"] * 3} for rank in (0, 1)}
    found = told(both, RankReport(loss=4.0), RankReport())
    assert (found.rule, found.factor) == ("prove-loss", "dp")
    assert "gradients are wrong too (v: 3 times the right value)" in found.says


def test_elements_of_a_gradient_that_nothing_explains_do_not_hide_a_wrong_loss() -> None:
    gradient = GRADIENT["v"].clone()
    gradient.view(-1)[0] += 1.0
    wrong = {(rank, "gradients"): {"v": gradient} for rank in (0, 1)}
    found = told(wrong, RankReport(loss=3.3), RankReport())
    assert found.rule == "prove-loss"


def test_what_no_factor_explains_is_looked_for_between_the_modules() -> None:
    reference = one_device()

    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        return one.values.flip(1) if one.gradient and one.name == "first" else one.values

    ranks = [passed_on(reference, rank, change) for rank in range(2)]
    pieces = {("gradients", name): one for name, one in reference.steps[0].gradients.items()}
    pieces["gradients", "first.weight"] = reference.initial["first.weight"].square()
    evidence = evidence_of_passes(reference, ranks, mesh={"tp": 2}, pieces=pieces)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.rule, found.tensor, found.factor) == ("prove-gradients", "first", "permuted")
    pieces["gradients", "first.weight"] = torch.zeros_like(reference.initial["first.weight"])
    unchanged = [passed_on(reference, rank, lambda _, one: one.values) for rank in range(2)]
    evidence = evidence_of_passes(reference, unchanged, mesh={"tp": 2}, pieces=pieces)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.tensor, found.factor) == ("first.weight", "weight gradient lost")


def test_a_wrong_norm_is_told() -> None:
    norm = reference().steps[0].grad_norm
    found = told({}, RankReport(grad_norm=norm * 2**0.5), RankReport())
    assert (found.rule, found.factor) == ("prove-gradient-norm", "partial norm")


def test_copies_that_drift_apart_are_told() -> None:
    found = told({(1, "parameters"): {"w": AFTER["w"] * (1 + 1e-6)}})
    assert (found.rule, found.where) == ("prove-parameters", "copies over dp")
    assert found.ranks == (1,)
