"""Wrong gradients by name."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.diagnose import diagnose
from echelon.proof.claims.claims import judge
from tests.proof.verify.captures import GRADIENT, Values, evidence_of, reference


def told(values: Values, clip: float | None = None) -> tuple[str, str, str, str]:
    evidence = evidence_of(values, clip=clip)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    return found.rule, found.tensor, found.factor, found.axis


def on_all(change: float, name: str = "w") -> Values:
    return {(rank, "gradients"): {name: GRADIENT[name] * change} for rank in (0, 1)}


@pytest.mark.parametrize(
    ("values", "factor", "axis"),
    [
        (on_all(0.0), "zero", ""),
        (on_all(-1.0), "sign", ""),
        (on_all(2.0), "dp", "dp"),
        (on_all(0.5), "1/dp", "dp"),
        (on_all(1.3), "number", ""),
        ({(0, "gradients"): {"w": GRADIENT["w"].flip(0)}}, "permuted", "dp"),
        ({(1, "gradients"): {"w": GRADIENT["v"]}}, "swapped", "dp"),
        ({(1, "gradients"): {"w": torch.tensor([1.0, 5.0, 2.0, 3.0])}}, "none", "dp"),
        (
            {
                (0, "gradients"): {"w": GRADIENT["w"] * torch.tensor([1.0, 0.0, 1.0, 0.0])},
                (1, "gradients"): {"w": GRADIENT["w"] * torch.tensor([0.0, 1.0, 0.0, 1.0])},
            },
            "missing sum",
            "dp",
        ),
    ],
)
def test_a_wrong_gradient_has_a_name(values: Values, factor: str, axis: str) -> None:
    assert told(values) == ("prove-gradients", "w", factor, axis)


def test_a_factor_of_all_gradients_is_another_norm_where_the_program_clips() -> None:
    step = reference(clip=0.5).steps[0]
    unclipped = {(rank, "gradients"): GRADIENT for rank in (0, 1)}
    assert told(unclipped, clip=0.5) == ("prove-gradients", "v", "1/clip scale", "")
    double = {n: g * step.clip_scale / 2**0.5 for n, g in GRADIENT.items()}
    twice = {(rank, "gradients"): double for rank in (0, 1)}
    assert told(twice, clip=0.5)[2:] == ("partial norm", "dp")
