"""The calls of a GPU's attention are proven by what they are told; what is wrong there is named."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.proof.run import prove
from tests.proof.device_calls import flash_calls
from tests.proof.device_calls.flash_calls import WINDOW
from tests.proof.layouts import layout
from tests.proof.mutants.context_layouts import DOCUMENTS, split
from tests.proof.mutants.planting import Told, mutants_of
from tests.proof.planted import assert_caught

PLANS: dict[str, dict[str, Any]] = {
    "documents": {**DOCUMENTS},
    "window": {**WINDOW},
    "ring": split("ring", **DOCUMENTS),
    "gathered": split("gathered", **WINDOW),
    "striped": split("striped", **DOCUMENTS),
    "ulysses": split("ulysses", **DOCUMENTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_plans_are_proven_by_the_calls_for_a_gpu(plan: str, rank_pool: RankPool) -> None:
    subject = f"{flash_calls.__name__}:nothing_wrong"
    proof = prove(layout(**PLANS[plan]), run_ranks=rank_pool.run, subject=subject)
    proof.require()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("mutant", "told"), mutants_of(flash_calls))
def test_a_wrong_argument_is_caught_and_named(mutant: str, told: Told, rank_pool: RankPool) -> None:
    assert_caught(mutant, told, rank_pool)
