"""What one piece of rows, or one tile, does wrong shows in the first attention, each otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.proof.causes.diagnose import diagnose
from echelon.proof.causes.forward.attention import seen_by
from echelon.proof.causes.forward.row_pieces import called_tiles, row_piece_variants
from echelon.proof.causes.forward.variants import Variant
from echelon.proof.claims.claims import judge
from echelon.proof.oracle.oracle import hearing, loss_of_tokens, run_oracle
from echelon.proof.ranks import ObservedActivation
from echelon.proof.shrink import shrink
from tests.proof.layouts import context_layout, layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(model={"window": 5}), precision="fp64")
SITE = "layers.0.attention"
(ORACLE,) = run_oracle(PLAN, 1)


def attention_of(variant: Variant) -> torch.Tensor:
    """Return what attention gives in block 0 where a mistake is made."""
    model = variant.build(PLAN, ORACLE)
    with torch.no_grad(), hearing(model) as heard:
        loss_of_tokens(PLAN, model, ORACLE)
    return heard.forward[SITE].double()


def told(made_BTW: torch.Tensor) -> tuple[str, str]:
    """Return what is told where attention gives this in block 0: factor, and in words."""
    rows = made_BTW.flatten(0, 1)

    def changed(one: ObservedActivation) -> ObservedActivation:
        here = (one.name, one.gradient) == (SITE, False)
        return replace(one, values_nW=rows) if here else one

    evidence = replicas(PLAN, activation=changed)
    found = diagnose(evidence, judge(evidence))
    assert found is not None
    assert (found.rule, found.tensor) == ("prove-activations", SITE)
    return found.factor, found.says


def pieces(plan: Plan) -> dict[str, Variant]:
    return {one.finding.description: one for one in row_piece_variants(plan)}


def test_each_mistake_in_a_piece_is_told_by_its_rows() -> None:
    variants = pieces(PLAN)
    for says, factor in (
        ("queries 6:8 and keys 5:8 are not turned: rows of a rank", "positions"),
        ("keys 7:8 are not turned: rows of a rank", "positions"),
        ("queries and keys 0:3 are not turned: rows of a rank", "positions"),
    ):
        assert told(attention_of(variants[says])) == (factor, f"{says}; {PLACE}")
    tiles = [one for one in variants.values() if one.finding.factor in ("not masked", "never met")]
    assert len(tiles) > 4
    last = tiles[-1]
    assert told(attention_of(last))[0] == "never met"


PLACE = (
    "first wrong in the output of attention of block 0, "
    "right in the output of attention_norm of block 0"
)


@pytest.mark.slow
def test_other_mistakes_in_some_rows_are_told_by_their_place_alone() -> None:
    right_BTW = ORACLE.activations[SITE]
    for rows, where in ((slice(6, 8), "positions 6:8"), (slice(0, 2), "positions 0:2")):
        wrong_BTW = right_BTW.clone()
        wrong_BTW[:, rows] += 0.1 * wrong_BTW[:, rows].square()
        factor, says = told(wrong_BTW)
        assert factor == "slice"
        assert says.startswith(f"in {where} only: another function: ")
    factor, says = told(right_BTW + 0.1 * right_BTW.square())
    assert factor == "none", says


def test_tiles_cover_what_is_visible_once() -> None:
    for plan in (PLAN, context_layout("gathered"), context_layout("striped")):
        length = plan.mathematics.sequence_length
        tokens_BT = torch.zeros(1, length, dtype=torch.int64)
        batch = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.zeros(1, dtype=torch.int64))
        batch = batch.cut((), None)
        times_TS = torch.zeros(length, length, dtype=torch.int64)
        for tile in called_tiles(plan, batch):
            at = torch.meshgrid(tile.rows, tile.columns, indexing="ij")
            times_TS[at] += tile.seen_TS.long()
        assert torch.equal(times_TS, seen_by(plan.model, batch).long())
