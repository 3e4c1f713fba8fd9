"""Both kinds of evidence answer the same questions."""

from __future__ import annotations

import torch

from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas
from tests.proof.verify.captures import evidence_of


def test_gradients_are_wanted_as_they_are_read() -> None:
    clipped = evidence_of({}, clip=0.1)
    step = clipped.steps[0]
    assert torch.equal(clipped.wanted_gradient(0, "w"), step.clipped("w"))
    plan = replicas(shrink(layout(dp=2), precision="fp64"))
    name = next(iter(plan.steps[0].gradients))
    assert torch.equal(plan.wanted_gradient(0, name), plan.steps[0].gradients[name])


def test_axes_have_the_names_of_the_mesh() -> None:
    assert dict(evidence_of({}).axes()) == {"dp": ((0, 1),)}
    plan = replicas(shrink(layout(dp=2), precision="fp64"))
    assert dict(plan.axes())["dp"] == ((0, 1),)
    assert plan.explained == evidence_of({}).explained
