"""Where parameters are: copies, pieces and slices multiply to the ranks that hold any of them."""

from __future__ import annotations

from echelon.core.plan import Zero
from echelon.layout.variables import variables_of
from tests.parallel.layouts import DEEPSEEK, GPT2, plan_of


def test_copies_pieces_and_slices_of_a_mesh() -> None:
    plan = plan_of(dp=2, dp_shard=2, tp=2, zero=Zero(stage=3))
    found = {one.name: one for one in variables_of(plan)}
    weight = found["layers.0.attention.q.weight"]
    assert (weight.copies, weight.pieces, weight.slices) == (2, 2, 2)
    norm = found["layers.0.attention_norm.weight"]
    assert (norm.copies, norm.pieces, norm.slices) == (4, 1, 2)
    assert not any(one.mirrored for one in found.values())


def test_a_tied_embedding_is_mirrored_at_both_ends() -> None:
    found = {one.name: one for one in variables_of(plan_of(model=GPT2, pp=2))}
    assert found["embedding.weight"].mirrored
    assert {name for name, one in found.items() if one.mirrored} == {"embedding.weight"}


def test_experts_are_where_their_ranks_are() -> None:
    found = {one.name: one for one in variables_of(plan_of(model=DEEPSEEK, dp_shard=4, ep=2))}
    routed = [one for name, one in found.items() if ".experts." in name]
    assert routed
    assert {one.copies for one in routed} == {2}
    assert found["embedding.weight"].copies == 4
