"""The matrix of operators that are made again is whole, and its plans are what they say."""

from __future__ import annotations

from echelon.core.plan import Plan
from echelon.proof.shrink import shrink
from tests.walks.matrix.recompute_cases import (
    POLICIES,
    SPLITS,
    operator_sets,
    recompute_cases,
)


def test_the_matrix_of_operators_is_whole() -> None:
    sets = [*operator_sets()]
    assert len(sets) == len(set(sets)) == 11
    assert ("attention",) in sets
    every = [*recompute_cases()]
    met = {(case.operators, case.split, case.policy) for case in every}
    assert met == {(names, split, how) for names in sets for split in SPLITS for how in POLICIES}
    assert len(every) == len(met)
    assert {case.world_size for case in every} == {1, 2, 4, 8}


def test_plans_redo_what_their_names_say() -> None:
    kinds: set[tuple[bool, bool]] = set()
    for case in recompute_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        recompute = plan.layout.recompute
        assert recompute.operators == case.operators
        blocks = range(plan.model.layers)
        whole = [recompute.recomputes(layer) for layer in blocks]
        assert any(whole) == (case.policy == "full")
        assert not all(whole)
        left = [recompute.operators_of(layer) for layer in blocks if not whole[layer]]
        assert all(set(one) == set(case.operators) for one in left)
        assert shrink(plan).layout.recompute.operators == case.operators
        kinds.add((plan.model.experts is not None, plan.model.positions == "rope"))
    assert {(False, True), (False, False), (True, True)} <= kinds
