"""A wrong norm is told by its formula: epsilon, kind, weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from echelon.proof.claims.activation_checks import copies_at
from echelon.proof.diagnose.norm_layers import explain_norm_layer
from echelon.proof.shrink import shrink
from tests.proof.evidence import replicas
from tests.proof.layouts import layout

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
    oracle = evidence.oracle[0]
    oracle.before[f"{site}.weight"].mul_(torch.linspace(0.5, 2, PLAN.model.hidden))  # type: ignore[attr-defined]
    right = oracle.activations
    read = {
        "layers.0.attention_norm": right["layers.0.input"],
        "layers.1.mlp_norm": right["layers.1.input"] + right["layers.1.attention"],
        "norm": right[f"layers.{PLAN.model.layers - 1}.output"],
    }[site]
    made = formula(read, oracle.before[f"{site}.weight"]).flatten(0, 1)
    (copy,) = copies_at(evidence.plan, evidence.observed, 0)[site]
    wrong = replace(copy, values_nW=made[copy.place_n])
    found = next(explain_norm_layer(oracle, site, [wrong], evidence))
    assert (found.factor, found.tensor) == (factor, f"{site}.weight")
    if factor == "epsilon":
        assert found.value == pytest.approx(1e-3, rel=1e-6)
