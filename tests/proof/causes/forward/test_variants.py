"""Each wrong forward pass is the right one but for what it says."""

from __future__ import annotations

import torch

from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block
from echelon.models.operations import Operations
from echelon.proof.causes.factors import Factor
from echelon.proof.causes.forward.variants import (
    PaddedVocabulary,
    RemappedRows,
    Variant,
    dropout_variants,
    scaled,
    variants,
)
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, run_oracle, token_losses
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout

PLAN = shrink(layout(tp=2, pp=2), precision="fp64")
(ORACLE,) = run_oracle(PLAN, 1)
BATCH = global_batch(PLAN, 0)


def losses(operations: Operations | None = None, without: int | None = None) -> torch.Tensor:
    """Return the losses of one device with other operations, or without a block."""
    model = build_decoder(PLAN, ORACLE.before, operations)

    def run(block: Block, x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return x_ND if block.index == without else block(x_ND, batch)

    model.run_block = run
    with torch.no_grad():
        return token_losses(PLAN, model, BATCH, 0)


def of(variant: Variant) -> torch.Tensor:
    with torch.no_grad():
        return token_losses(PLAN, variant.build(PLAN, ORACLE), BATCH, 0)


def test_a_block_that_is_left_out_adds_nothing() -> None:
    blocks = [v for v in variants(PLAN, ORACLE, ()) if v.finding.description == "block left out"]
    assert [v.finding.tensor for v in blocks] == [
        f"layers.{layer}" for layer in range(PLAN.model.layers)
    ]
    for layer, variant in enumerate(blocks):
        assert torch.equal(of(variant), losses(without=layer))
        assert not torch.equal(of(variant), losses())


def test_every_mistake_has_a_tensor_of_its_own_and_shows() -> None:
    found = list(variants(PLAN, ORACLE, ()))
    padded = [v for v in found if v.finding.factor == "padding"]
    assert len(padded) == (PLAN.model.vocab % 2 > 0)
    assert {v.finding.factor for v in found} >= {"zero", "positions", "wrong heads"}
    assert len({v.finding.description for v in found}) == len(found) - PLAN.model.layers + 1
    for variant in found:
        change = float((of(variant) - losses()).norm() / losses().norm())
        # Keys of heads that every tensor rank has alone are right by any of their numbers.
        assert change > 1e-7 or variant.finding.factor == "wrong heads"


def test_known_factors_scale_a_parameter_alone_and_with_its_namesakes() -> None:
    twice = Factor("tp", 2.0, "tp")
    found = [v for v in variants(PLAN, ORACLE, (twice,)) if v.finding.factor == "tp"]
    alone = [v for v in found if "uses it 2 times" in v.finding.description]
    assert {v.finding.tensor for v in alone} == set(ORACLE.before)
    assert any("and its namesakes (2 tensors)" in v.finding.description for v in found)
    values = {"a": torch.ones(2), "b": torch.ones(2)}
    assert {n: one.tolist() for n, one in scaled(values, ["b"], 3.0).items()} == {
        "a": [1.0, 1.0],
        "b": [3.0, 3.0],
    }


def test_rows_that_stand_for_themselves_and_no_padding_change_nothing() -> None:
    same_T = torch.arange(PLAN.mathematics.sequence_length)
    itself = RemappedRows(tokens_T=same_T, labels_T=same_T, dropout_T=same_T)
    torch.testing.assert_close(losses(itself), losses())
    torch.testing.assert_close(losses(PaddedVocabulary(0)), losses())
    # Logits of 0 take a share of the softmax: no loss falls.
    assert bool((losses(PaddedVocabulary(3)) >= losses()).all())


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
