"""Wrong gradients by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from echelon.proof.causes.diagnose import diagnose
from echelon.proof.causes.finding import Diagnosis
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


def _of_shares(shares: Mapping[str, tuple[float, float]]) -> Diagnosis:
    evidence = evidence_of(
        {
            (rank, "gradients"): {
                name: GRADIENT[name] * pair[rank] for name, pair in shares.items()
            }
            for rank in (0, 1)
        }
    )
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    return found


def test_of_two_causes_the_one_that_explains_other_gradients_wins() -> None:
    shares = {"v": (0.25, 0.75), "w": (0.25, 0.75)}
    assert _of_shares(shares).factor == "missing sum"
    assert _of_shares({**shares, "w": (0.25, 0.9)}).factor == "factors of ranks"


def test_no_cause_says_what_was_excluded() -> None:
    bent = {(rank, "gradients"): {"v": GRADIENT["v"].square()} for rank in (0, 1)}
    evidence = evidence_of(bent)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert found.factor == "none"
    assert "no cause fits; excluded" in found.says
    assert "a factor 56.9 %, a sum over dp 56.9 %" in found.says
