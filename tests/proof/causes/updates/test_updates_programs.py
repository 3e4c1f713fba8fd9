"""Wrong updates by name, the gradients being right."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.diagnose import diagnose
from echelon.proof.claims.claims import judge
from tests.proof.verify.captures import AFTER, BEFORE, GRADIENT, evidence_of

MOVED = AFTER["w"] - BEFORE["w"].double()


@pytest.mark.parametrize(
    ("added", "factor"),
    [
        (torch.zeros(4), "zero"),
        (3 * MOVED, "number"),
        (2 * MOVED, "dp"),
        (MOVED - 0.1 * 0.01 * BEFORE["w"], "undue decay"),
        (1.5 * MOVED - 0.1 * 0.01 * BEFORE["w"], "rate and decay"),
        (MOVED.sign() * torch.tensor([1.0, 2.0, 4.0, 3.0]), "other size"),
        (torch.tensor([1.0, 2.0, 4.0, 3.0]), "none"),
    ],
)
def test_a_wrong_update_has_a_name(added: torch.Tensor, factor: str) -> None:
    wrong = {"w": BEFORE["w"].double() + added}
    evidence = evidence_of({(rank, "parameters"): wrong for rank in (0, 1)})
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.rule, found.tensor, found.factor) == ("prove-clipped-update", "w", factor)


def test_an_update_along_its_value_is_made_again_and_is_no_decay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, moved = GRADIENT["w"], -0.1 * GRADIENT["w"].double()
    monkeypatch.setitem(BEFORE, "w", before)
    monkeypatch.setitem(AFTER, "w", before.double() + moved)
    wrong = {"w": before.double() + 2 * moved}
    evidence = evidence_of({(rank, "parameters"): wrong for rank in (0, 1)})
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.tensor, found.factor) == ("w", "dp")


def test_an_update_on_one_rank_only_points_at_its_axis() -> None:
    evidence = evidence_of({(0, "parameters"): {"w": BEFORE["w"].double()}})
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.factor, found.axis, found.ranks) == ("zero", "dp", (0,))
