"""One device keeps what passes between the parts of the model, and the gradients there."""

from __future__ import annotations

import torch

from echelon.proof.oracle.oracle import run_oracle, with_routers
from echelon.proof.shrink import shrink
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.proof.layouts import layout


def test_activations_are_whole_and_their_gradients_are_those_of_the_mean_loss() -> None:
    plan = shrink(layout(dp=2), precision="fp64")
    (step,) = run_oracle(plan, 1)
    right = step.activations
    shape = (plan.mathematics.global_sequences, plan.mathematics.sequence_length)
    assert all(value.shape == (*shape, plan.model.hidden) for value in right.values())
    assert list(step.activation_gradients) == list(reversed([*right]))
    # The weight of the last norm multiplies its output: sum(y dy) = sum(weight dweight).
    dot = (right["norm"] * step.activation_gradients["norm"]).sum()
    weights = (step.before["norm.weight"] * step.gradients["norm.weight"]).sum()
    assert torch.isclose(dot, weights, rtol=1e-10)


def test_scores_and_gates_stand_before_what_experts_make() -> None:
    plan = shrink(plan_of(model=MIXTRAL), precision="fp64")
    (step,) = run_oracle(plan, 1)
    names = list(step.activations)
    at = names.index("layers.0.mlp")
    assert names[at - 2 : at] == ["layers.0.scores", "layers.0.gates"]
    gates_BTE = step.activations["layers.0.gates"]
    assert torch.allclose(gates_BTE.sum(-1), step.routed[0].gates_BTK.sum(-1))
    assert list(with_routers({"norm": gates_BTE}, step.routed)) == ["norm"]
