"""The matrix of experts is whole; its settings stay in a proof and loads are as they say."""

from __future__ import annotations

from itertools import product

import pytest

from echelon.config.rules.finders import plan_problems
from echelon.core.plan import Plan
from echelon.proof.oracle.oracle import run_oracle
from echelon.proof.shrink import shrink
from tests.walks.matrix.cases import STAGES
from tests.walks.matrix.expert_cases import expert_cases


def test_the_matrix_of_experts_is_whole() -> None:
    every = list(expert_cases())
    met = {(case.ep, case.combination, case.balance, case.capacity, case.load) for case in every}
    beside = ("alone", "dp2", "replicas2", "tp2", "tp2sp", "expert_tp2", "pp2", "cp2")
    stages = [f"zero{dense}{experts}" for dense in STAGES for experts in STAGES]
    assert met == set(
        product(
            (2, 4),
            (*beside, *stages),
            ("aux", "bias"),
            (False, True),
            ("even", "empty", "one", "scores"),
        )
    )
    assert len(met) == len(every) == 768
    assert {case.world_size for case in every} == {2, 4, 8}


@pytest.mark.slow
def test_every_setting_of_experts_is_met_and_stays_in_a_proof() -> None:
    travels: set[tuple[str, bool, int]] = set()
    kinds: set[tuple[str, bool, bool]] = set()
    balances: set[tuple[str, str, bool]] = set()
    folds: set[tuple[str, int]] = set()
    for case in expert_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        small = shrink(plan)
        assert not [*plan_problems(plan), *plan_problems(small)]
        assert small.layout.experts == plan.layout.experts
        assert (small.layout.zero.stage, small.layout.experts.zero_stage) == case.zero_stages
        experts, balance = small.model.experts, small.mathematics.balance
        assert experts is not None
        assert experts.num_experts // case.ep >= 2
        assert balance.has_bias == (case.balance == "bias")
        assert (balance.capacity_factor is not None) == case.capacity
        travels.add((plan.layout.experts.dispatch, plan.layout.experts.padded, case.ep))
        kinds.add((experts.router, experts.renormalise, small.model.latent is not None))
        balances.add((balance.aux_over, balance.drop, balance.z_coefficient > 0))
        folds.add((case.combination, plan.mesh.expert_shard_degree()))
    assert travels == {
        *(("flat", padded, ep) for padded in (False, True) for ep in (2, 4)),
        ("two-hop", False, 4),
    }
    assert kinds == {
        *(("softmax", renormalised, False) for renormalised in (False, True)),
        *(("sigmoid", True, latent) for latent in (False, True)),
    }
    assert balances == set(
        product(("global", "sequence", "microbatch"), ("position", "score"), (False, True))
    )
    assert {("tp2", 1), ("tp2", 2), ("cp2", 1), ("cp2", 2), ("dp2", 2)} < folds


@pytest.mark.quick("one", "scores")
@pytest.mark.parametrize("load", ["even", "empty", "one", "scores"])
def test_loads_are_as_their_case_says(load: str) -> None:
    for case in expert_cases():
        if (case.combination, case.load) != ("alone", load):
            continue
        for routed in run_oracle(shrink(case.plan(), precision="fp64"), 1)[0].routed.values():
            counts = routed.counts_E
            assert bool(routed.dropped) <= case.capacity
            if load == "even":
                assert int(counts.max() - counts.min()) <= 1
            if load == "empty":
                assert counts[-1] == 0
            if load == "one":
                assert int((counts > 0).sum()) == routed.picked_BTK.shape[-1]
            if case.capacity and load != "even":
                assert 0 < routed.dropped < routed.kept_BTK.numel()
