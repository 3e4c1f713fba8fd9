"""No plan that a command makes of a legal plan breaks a rule: 2,000 random plans of all families.

A rule of training that were asked of such a plan would refuse a run that `echelon plan` has taken.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.proof.changes import require_nothing_mended
from echelon.proof.shrink import shrink
from tests.walks.plans.derived_plans import broken_rules, derived_plans, exported_again
from tests.walks.plans.random_families import FAMILIES, draw_family
from tests.walks.plans.random_settings import PRESET, flags_of

NAMES = ("any", *FAMILIES)
PLANS = 2000
"""Plans of all families together, in `make test-all`."""
QUICK_PLANS = 2
"""Plans of each family in `make test`."""
MOST_REFUSED = 0.6  # of the draws of a family


def legal_plans(family: str, count: int) -> list[Plan]:
    """Return random plans that `echelon plan` takes; most draws of a family are plans."""
    found: list[Plan] = []
    number = 0
    while len(found) < count:
        random = Random(f"derived/{family}/{number}")
        number += 1
        drawn = draw_family(random, "/nowhere", "" if family == "any" else family)
        try:
            found.append(load_job(PRESET, flags_of(drawn)).plan)
        except ConfigError:
            continue
    assert count > (1 - MOST_REFUSED) * number or number < 10
    return found


def problems_of(plan: Plan) -> list[str]:
    """Return the broken rules of a plan and of all that is derived of it, with their plans."""
    found = [f"the plan: {one}" for one in broken_rules(plan)]
    for name, derived in derived_plans(plan):
        found += [f"{name}: {one}" for one in broken_rules(derived)]
    require_nothing_mended(plan, shrink(plan))
    exported_again(plan)
    return found


@pytest.mark.parametrize("family", NAMES)
def test_derived_plans_of_a_family_are_legal(family: str) -> None:
    for plan in legal_plans(family, QUICK_PLANS):
        assert problems_of(plan) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_derived_plans_of_two_thousand_plans_are_legal(family: str) -> None:
    plans = legal_plans(family, -(-PLANS // len(NAMES)))
    problems = {plan.content_hash(): problems_of(plan) for plan in plans}
    assert {key: told for key, told in problems.items() if told} == {}


def test_every_family_is_what_it_says() -> None:
    (mixture,) = legal_plans("capacity", 1)
    assert mixture.mathematics.balance.capacity_factor is not None
    (sunk,) = legal_plans("sinks", 1)
    assert sunk.model.sinks
    (island,) = legal_plans("islands", 1)
    assert island.mathematics.local_sgd.active
    (served,) = legal_plans("servers", 1)
    assert served.mesh.servers


def test_a_derived_plan_with_a_broken_rule_is_told() -> None:
    """capacity-holds-tokens, as a text of one token broke it when it had the capacity of a run."""
    (mixture,) = legal_plans("capacity", 1)
    short = replace(mixture.mathematics, sequence_length=mixture.mesh.tp * mixture.mesh.cp * 2)
    balance = replace(short.balance, capacity_factor=0.01)
    told = broken_rules(replace(mixture, mathematics=replace(short, balance=balance)))
    assert any(one.startswith("capacity-holds-tokens: ") for one in told)


def test_a_kernel_of_fp32_is_not_of_a_proof_in_float64() -> None:
    """no-effect: the update of parameters has a kernel for fp32 masters only."""
    plan = load_job("nano", ["cluster.preset=8xh100"]).plan
    assert "update" in plan.layout.kernels.fused
    assert "update" not in shrink(plan, precision="fp64").layout.kernels.fused
    assert "update" in shrink(plan).layout.kernels.fused
