"""A weight without a gradient whose module has one: where it went is told, or nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.passing.modules import explain_lost_weight, lost_calls
from echelon.proof.causes.passing.places import PassedStep
from echelon.proof.evidence.run import Passed, PassedTensor
from tests.proof.causes.passing.passes import SEQUENCES, evidence_of_passes, one_device, passed_on

NAME = "last.weight"


def told(
    pieces: Mapping[tuple[str, str], torch.Tensor], *, right: bool = True
) -> ProofFinding | None:
    def change(rank: int, one: PassedTensor) -> torch.Tensor:
        return one.values if right or not one.gradient else one.values.square()

    reference = one_device()
    ranks = [passed_on(reference, rank, change) for rank in range(2)]
    evidence = evidence_of_passes(reference, ranks, mesh={"dp": 2}, pieces=pieces)
    return explain_lost_weight(evidence, 0, NAME)


def test_a_tensor_in_the_place_of_the_weight_has_the_gradient() -> None:
    gradient = one_device().steps[0].gradients[NAME]
    found = told({("stand-ins", NAME): gradient * 2})
    assert found is not None
    assert (found.factor, found.axis) == ("parameter replaced", "dp")
    assert "keeps 1 parameters that the model no longer has" in found.description
    other = told({("stand-ins", NAME): gradient.square()})
    assert other is not None
    assert other.factor == "weight gradient lost"


def test_backward_came_to_the_module_and_its_weight_has_none() -> None:
    zeros = {("gradients", name): value * 0 for name, value in one_device().initial.items()}
    found = told(zeros)
    assert found is not None
    assert (found.factor, found.axis) == ("weight gradient lost", "")
    assert told(zeros, right=False) is None


def test_microbatches_that_are_lost_are_counted_by_layer() -> None:
    reference = one_device()
    outputs = {(o.name, o.gradient): o.values for o in reference.passed.tensors}
    tensors = [
        replace(one, call=call, values=one.values.chunk(SEQUENCES)[call])
        for one in reference.passed.tensors
        for call in range(SEQUENCES)
    ]
    seen = outputs["second", True][2:].flatten(0, 1).T @ outputs["first", False][2:].flatten(0, 1)
    kept = {
        ("gradients", "second.weight"): seen,
        ("gradients", NAME): reference.initial[NAME] * 0,
    }
    evidence = evidence_of_passes(
        reference, [Passed(tensors=tensors)] * 2, mesh={"dp": 2}, pieces=kept
    )
    assert lost_calls(PassedStep(evidence, 0)) == {"second": (0, 1), "last": (0, 1, 2, 3)}
    found = explain_lost_weight(evidence, 0, NAME)
    assert found is not None
    assert found.description.endswith(
        "lost of other layers: microbatches [0, 1] of second, microbatches [0, 1, 2, 3] of last"
    )
    # Both ranks hold both layers: no axis says which microbatches are lost.
    assert found.axis == ""
