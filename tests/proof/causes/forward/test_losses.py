"""Wrong losses of microbatches are told by whose they are, by a factor, or by a known mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.proof.causes.forward.losses import (
    explain_microbatch_losses,
    outdated_parameter_variants,
    with_old_values,
)
from echelon.proof.causes.forward.variants import variants
from echelon.proof.claims.checks import Check
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import run_oracle, sums_by_microbatch, token_losses
from echelon.proof.shrink import shrink
from echelon.proof.subject import StepRecord
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(dp=2, accumulation=3), precision="fp64")
LOSSES = Check(0, "loss of dp 0 microbatch 0", 1.0)

Said = dict[tuple[int, int], tuple[float, int]]


def saying(change: Callable[[Said], Said]) -> PlanEvidence:
    """Return a run whose ranks say other losses of their microbatches."""

    def report(rank: int, step: int, record: StepRecord) -> StepRecord:
        return replace(record, microbatch_losses=change(dict(record.microbatch_losses)))

    return replicas(PLAN, report=report)


def test_losses_of_other_microbatches_are_in_another_order() -> None:
    def reverse(said: Said) -> Said:
        return dict(zip(said, [*said.values()][::-1], strict=True))

    finding = explain_microbatch_losses(saying(reverse), LOSSES)
    assert finding.factor == "order"
    assert finding.description == "microbatches in another order: 0 is 2, 2 is 0, 0 is 2, 2 is 0"


def test_losses_of_another_replica_are_of_its_samples() -> None:
    right = run_oracle(PLAN, 1)[0].microbatch_losses

    def first(said: Said) -> Said:
        return {slot: right[0, slot[1]] for slot in said}

    finding = explain_microbatch_losses(saying(first), LOSSES)
    assert (finding.factor, finding.axis) == ("same data", "dp")
    assert finding.description == "dp 1 worked on the samples of dp 0"


def test_a_factor_a_count_and_a_loss_that_nobody_says() -> None:
    evidence = saying(lambda said: {slot: (2 * one, n) for slot, (one, n) in said.items()})
    assert explain_microbatch_losses(evidence, LOSSES).factor == "dp"
    evidence = saying(lambda said: {slot: (one, n + 1) for slot, (one, n) in said.items()})
    assert explain_microbatch_losses(evidence, LOSSES).factor == "token count"
    evidence = saying(lambda said: {slot: one for slot, one in said.items() if slot[1]})
    assert explain_microbatch_losses(evidence, LOSSES).factor == "missing"
    assert explain_microbatch_losses(saying(lambda said: said), LOSSES).factor == "none"


@pytest.mark.parametrize("place", [0, 1])
def test_a_known_mistake_is_recognized_by_all_of_its_losses(place: int) -> None:
    oracle = run_oracle(PLAN, 1)[0]
    mistake = list(variants(PLAN, oracle, ()))[place]
    batch = global_batch(PLAN, 0)
    with torch.no_grad():
        sums = sums_by_microbatch(
            PLAN, batch, token_losses(PLAN, mistake.build(PLAN, oracle), batch, 0)
        )
    evidence = saying(lambda said: {slot: (float(sums[slot][0]), sums[slot][1]) for slot in said})
    finding = explain_microbatch_losses(evidence, LOSSES)
    assert finding.tensor == mistake.finding.tensor == f"layers.{place}"
    assert finding.description == "block left out"


def test_old_values_are_those_of_names_and_places() -> None:
    new, old = ({"a": torch.full((2,), one), "b": torch.full((2,), one)} for one in (1.0, 0.0))
    assert {n: v.tolist() for n, v in with_old_values(new, old, ["a"]).items()} == {
        "a": [0.0, 0.0],
        "b": [1.0, 1.0],
    }
    where = {"a": torch.tensor([True, False])}
    assert with_old_values(new, old, ["a"], where)["a"].tolist() == [0.0, 1.0]


def test_each_unit_is_tried_and_the_whole_model() -> None:
    evidence = replicas(shrink(layout(dp=2, accumulation=1), precision="fp64"), 2)
    first, second = evidence.steps
    assert list(outdated_parameter_variants(evidence, first)) == []
    found = list(outdated_parameter_variants(evidence, second))
    assert {variant.finding.factor for variant in found} == {"stale"}
    assert len({variant.finding.description for variant in found}) == len(found)
    stale: dict[str, int] = {}
    for variant in found:
        for name, parameter in variant.build(evidence.plan, second).named_parameters():
            if torch.equal(parameter, first.before[name]):
                stale[name] = stale.get(name, 0) + 1
            else:
                assert torch.equal(parameter, second.before[name])
    # Every parameter is old once with its unit, and once with the whole model.
    changed = [n for n in first.before if not torch.equal(first.before[n], second.before[n])]
    assert changed
    assert {stale[name] for name in changed} == {2}
    assert sum("the whole model" in variant.finding.description for variant in found) == 1
