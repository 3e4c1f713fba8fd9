"""Every mistake of a split sequence, of pairs and of rows, shows in the losses."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from echelon.proof.causes.forward.context import context_variants, row_variants
from echelon.proof.causes.forward.variants import RemappedRows
from echelon.proof.causes.token_ranks import context_positions, heads_of_member
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, run_oracle, token_losses
from echelon.proof.shrink import shrink
from tests.proof.layouts import CONTEXTS, context_layout, layout


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_every_mistake_shows_in_the_losses(kind: str) -> None:
    plan = context_layout(kind)
    (oracle,) = run_oracle(plan, 1)
    batch = global_batch(plan, 0)
    tried: dict[str, float] = {}
    with torch.no_grad():
        right = token_losses(plan, build_decoder(plan, oracle.before), batch, 0)
        for variant in (*row_variants(plan), *context_variants(plan)):
            found = token_losses(plan, variant.build(plan, oracle), batch, 0)
            assert bool(found.isfinite().all()), variant.finding.description
            assert variant.finding.axis == "cp"
            tried[variant.finding.description] = float((found - right).norm() / right.norm())
    assert len(tried) > 10
    # Whether a query meets keys in a second and a third piece is a matter of the mask, and whether
    # a document starts where two places meet one of the batch.
    moot = ("the outputs of pieces", "documents start one position")
    assert not [s for s, change in tried.items() if change < 1e-7 and not s.startswith(moot)]


def test_where_no_sequence_is_split_no_row_is_taken_for_another() -> None:
    assert list(row_variants(shrink(layout(dp=2), precision="fp64"))) == []


def test_each_kind_of_row_is_told_under_what_it_makes_wrong() -> None:
    told = {v.finding.factor: v.finding.tensor for v in row_variants(context_layout("ring"))}
    assert told == {
        "positions": "layers.0.attention.q.weight",
        "labels": "loss",
        "tokens": "embedding.weight",
        "tokens and labels": "embedding.weight",
    }
    dropped = {v.finding.factor for v in row_variants(context_layout("ulysses-ring"))}
    assert dropped >= {"dropout", "heads permuted", "wrong heads"}
    learned = [v.finding.tensor for v in row_variants(context_layout("ulysses"))]
    assert learned[0] == "positions.weight"


def test_labels_meet_the_logits_of_the_row_that_is_taken_for_theirs() -> None:
    plan = context_layout("ring")
    places = context_positions(plan.placement)
    labels = [
        v.operations
        for v in row_variants(plan)
        if v.finding.description == "labels are those of the next context rank"
    ]
    assert isinstance(labels[0], RemappedRows)
    labels_T = labels[0].labels_T
    assert labels_T is not None
    next_T = places.moved_ranks(1)
    assert labels_T[next_T].tolist() == list(range(plan.mathematics.sequence_length))
    # Two ranks: the next one is the other one, row by row.
    assert bool((places.rank_T[next_T] == 1 - places.rank_T).all())


def test_heads_come_back_in_four_other_orders() -> None:
    plan = context_layout("ulysses-ring")
    heads = [v for v in row_variants(plan) if v.finding.factor == "heads permuted"]
    assert len({v.finding.description for v in heads}) == len(heads) == 4
    members = [heads_of_member(plan, m) for m in range(plan.layout.context.ulysses_degree)]
    assert sorted(chain.from_iterable(members)) == list(range(plan.model.heads))
