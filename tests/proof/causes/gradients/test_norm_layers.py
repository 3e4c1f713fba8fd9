"""A wrong norm is told by its formula: epsilon, kind, weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.gradients.microbatch_weights import WrongGradientOfPlan
from echelon.proof.causes.gradients.norm_layers import (
    explain_norm_layer,
    missing_rows,
    parts_of_tokens,
)
from echelon.proof.claims.checks import copies_at
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(), precision="fp64")


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(
    ("formula", "factor"),
    [
        (lambda x, w: rms(x, 1e-3) * w, "epsilon"),
        (lambda x, w: rms(x - x.mean(-1, keepdim=True), PLAN.model.norm_eps) * w, "norm kind"),
        (lambda x, w: rms(x, PLAN.model.norm_eps), "no weight"),
    ],
)
@pytest.mark.parametrize("site", ["layers.0.attention_norm", "layers.1.mlp_norm", "norm"])
def test_the_formula_of_a_wrong_norm_is_found(
    formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], factor: str, site: str
) -> None:
    evidence = replicas(PLAN)
    oracle = evidence.steps[0]
    oracle.before[f"{site}.weight"].mul_(torch.linspace(0.5, 2, PLAN.model.hidden))  # type: ignore[attr-defined]
    right = oracle.activations
    read = {
        "layers.0.attention_norm": right["layers.0.input"],
        "layers.1.mlp_norm": right["layers.1.input"] + right["layers.1.attention"],
        "norm": right[f"layers.{PLAN.model.layers - 1}.output"],
    }[site]
    made = formula(read, oracle.before[f"{site}.weight"]).flatten(0, 1)
    (copy,) = copies_at(evidence.plan, evidence.run, 0)[site]
    wrong = replace(copy, values_nW=made[copy.place_n])
    found = next(explain_norm_layer(oracle, site, [wrong], evidence))
    assert (found.factor, found.tensor) == (factor, f"{site}.weight")
    if factor == "epsilon":
        assert found.value == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize("name", ["layers.0.attention_norm.weight", "norm.weight"])
def test_rows_that_the_gradient_of_a_norm_leaves_out_are_counted(name: str) -> None:
    right = replicas(PLAN)
    oracle = right.steps[0]
    parts_BTD = parts_of_tokens(right, oracle, name)
    assert parts_BTD is not None
    whole_D = oracle.gradients[name]
    torch.testing.assert_close(parts_BTD.sum((0, 1)), whole_D)

    def told(wrong_D: torch.Tensor) -> list[ProofFinding]:
        shards = right.run.parts("gradients", 0, name)
        wrong = [replace(piece, tensor=wrong_D) for piece in shards]
        gradient = WrongGradientOfPlan(
            evidence=right, step=oracle, name=name, wrong=wrong, known=()
        )
        return list(missing_rows(gradient))

    (found,) = told(whole_D - parts_BTD[:, 6:].sum((0, 1)))
    assert found.factor == "rows missing"
    assert "rows 6:8 of each microbatch" in found.description
    assert not told(1.1 * whole_D)
    assert not told(whole_D - parts_BTD[:, 3:5].sum((0, 1))), "neither the first nor the last"
    assert not told(whole_D - parts_BTD[0, 6:].sum(0)), "of one microbatch of several"


def test_only_norms_between_blocks_have_parts_of_tokens() -> None:
    right = replicas(PLAN)
    for name in ("layers.0.mlp.up.weight", "embedding.weight"):
        assert parts_of_tokens(right, right.steps[0], name) is None
