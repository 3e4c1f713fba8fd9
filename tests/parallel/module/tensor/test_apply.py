"""Where rules come from, and one tensor rank, for which there is nothing to split."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.layout.modules import UNSPLIT
from echelon.parallel.module.tensor.apply import TensorChoice, choose_split
from tests.parallel.layouts import plan_of
from tests.parallel.module.tensor.families import OWN_RULES, Own, batch


def test_one_rank_checks_names_and_cuts_nothing() -> None:
    plan, model = plan_of(), Own()
    assert choose_split(plan, model, TensorChoice(rules=OWN_RULES), ()).split is UNSPLIT
    assert choose_split(plan, model, TensorChoice(), ()).split is UNSPLIT
    with pytest.raises(ConfigError, match="names no module"):
        choose_split(plan, model, TensorChoice(rules={"tokenz": "vocabulary"}), ())


def test_an_accepted_guess_is_taken() -> None:
    choice = TensorChoice(rules="guess", example=(batch(0, 0),), accepts_guess=True)
    found = choose_split(plan_of(tp=2), Own(), choice, ())
    right = choose_split(plan_of(tp=2), Own(), TensorChoice(rules=OWN_RULES), ())
    assert {one.name: one.parts for one in found.split.pieces} == {
        one.name: one.parts for one in right.split.pieces
    }
    assert found.split.summed == right.split.summed
