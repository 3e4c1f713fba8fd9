"""Each wrong mask drops something else than the right one."""

from __future__ import annotations

import torch

from echelon.proof.causes.forward.variants import dropout_variants
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import run_oracle, token_losses
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout


def test_every_variant_gives_other_losses_and_no_two_the_same() -> None:
    plan = shrink(layout(dp=2, model={"dropout": 0.2}), precision="fp64")
    oracle = run_oracle(plan, 2)[1]
    batch = global_batch(plan, 1)
    variants = list(dropout_variants(plan))
    losses = [
        float(token_losses(plan, one.build(plan, oracle), batch, 1).detach().sum())
        for one in variants
    ]
    right = sum(total for total, _ in oracle.microbatch_losses.values())
    assert len(variants) == 7
    assert len({round(one, 9) for one in [*losses, right]}) == 8
    assert torch.tensor(losses).isfinite().all()


def test_a_model_without_dropout_has_no_such_mistakes() -> None:
    assert not list(dropout_variants(shrink(layout(), precision="fp64")))
