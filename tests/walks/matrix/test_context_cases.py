"""The matrix of contexts is whole; masks, heads and windows stay in a proof."""

from __future__ import annotations

from itertools import product

from echelon.core.plan import Plan
from echelon.models.batch import IGNORED_LABEL
from echelon.proof.oracle.batches import global_batch
from echelon.proof.shrink import shrink
from tests.walks.matrix.context_cases import context_cases


def test_the_matrix_of_contexts_is_whole() -> None:
    every = list(context_cases())
    met = {(case.kind, case.cp, case.mask, case.heads, case.combination) for case in every}
    assert met == set(
        product(
            ("ring", "striped", "gathered", "ulysses", "ulysses-ring"),
            (2, 4),
            ("causal", "full", "documents", "window"),
            ("mha", "gqa", "mqa"),
            ("alone", "tp2", "tp2sp", "zero3", "pp2", "tp2pp2"),
        )
    )
    assert len(met) == len(every) == 720
    assert max(case.world_size for case in every) == 16


def test_masks_heads_and_ends_of_windows_stay_in_a_proof() -> None:
    ends: set[str] = set()
    uneven = 0
    others: set[tuple[str, bool, str]] = set()
    for case in context_cases():
        plan = case.plan()
        assert Plan.from_json(plan.to_json()) == plan
        small = shrink(plan)
        shape, tp, length = small.model, plan.mesh.tp, small.mathematics.sequence_length
        chunk = length // (2 * case.cp)
        assert chunk >= 4
        assert shape.heads // tp % plan.layout.context.ulysses_degree == 0
        assert (shape.mask.causal, shape.soft_cap) == (plan.model.causal, plan.model.soft_cap)
        assert shape.heads // shape.kv_heads == {"mha": 1, "gqa": 2, "mqa": 4}[case.heads]
        assert (small.mathematics.documents == "separate") == (case.mask == "documents")
        assert (shape.window is None) == (plan.model.window is None)
        if case.mask == "window":
            assert shape.window is not None
            ends.add("inside" if shape.window <= chunk else "beyond")
        if case.mask == "full":
            assert not shape.mask.causal
            assert shape.mask.window is None
        batch = global_batch(small, 0)
        counts = {
            int((batch.labels_BT[:, small.placement.positions(rank)] != IGNORED_LABEL).sum())
            for rank in range(case.cp)
        }
        others.add((shape.positions, shape.soft_cap is None, small.layout.recompute.policy))
        uneven += len(counts) > 1
    assert ends == {"inside", "beyond"}
    assert uneven > 0.9 * 720
    kinds = {(position, capped) for position, capped, policy in others if policy}
    assert kinds == {("rope", True), ("rope", False), ("learned", True), ("learned", False)}
