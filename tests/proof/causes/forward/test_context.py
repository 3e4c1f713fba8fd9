"""Every mistake of a split sequence, of pairs and of rows, shows in the losses."""

from __future__ import annotations

import pytest
import torch

from echelon.proof.causes.forward.context import context_variants, row_variants
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, run_oracle, token_losses
from tests.proof.layouts import CONTEXTS, context_layout


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
