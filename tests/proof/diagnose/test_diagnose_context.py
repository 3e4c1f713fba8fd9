"""Every planted bug of context parallelism is caught and named."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.launch.local.pool import RankPool
from tests.proof.planted import Planted, assert_caught

ATTENTION = "layers.0.attention"
LAST = "layers.1"
DOCUMENTS: dict[str, Any] = {"documents": "separate"}


def split(kind: str, cp: int = 2, ulysses: int = 1, **more: Any) -> dict[str, Any]:
    """Return a plan whose sequences are split over `cp` ranks."""
    axes = {"cp": cp, **more.pop("mesh", {})}
    degree = cp if kind == "ulysses" else ulysses
    context = {"kind": kind, "ulysses_degree": degree}
    return {"mesh": axes, "context": context, "accumulation": 2, **more}


def forward(mutant: str, plan: dict[str, Any], factor: str, tensor: str = ATTENTION) -> Planted:
    """Return a bug of the forward pass."""
    return Planted(f"context:{mutant}", "prove-microbatch-loss", tensor, factor, "cp", plan=plan)


Q = f"{ATTENTION}.q.weight"
V = f"{LAST}.attention.v.weight"
PLANTED = (
    forward("lse_not_rescaled", split("ring"), "merge"),
    forward("lse_not_rescaled", split("striped", 4), "merge"),
    forward("lse_not_rescaled", split("ring", tp=2, sequence_parallel=True), "merge"),
    forward("lse_not_rescaled", split("gathered", 4), "merge"),
    forward("lse_not_rescaled", split("ring", 4, model={"window": 20}), "merge"),
    forward("lse_not_rescaled", split("ulysses-ring", 4, 2, **DOCUMENTS), "merge"),
    forward("lse_not_updated", split("ring", 4), "merge"),
    forward("mask_off_by_one_in_a_block", split("ring"), "mask off by one"),
    forward("mask_off_by_one_in_a_block", split("ring", 4, pp=2), "mask off by one"),
    forward("mask_off_by_one_between_places", split("striped"), "mask off by one"),
    forward("mask_off_by_one_on_a_rank", split("gathered"), "mask off by one"),
    forward("mask_off_by_one_on_a_member", split("ulysses"), "mask off by one"),
    forward("documents_ignored_on_a_rank", split("ring", **DOCUMENTS), "documents"),
    forward("documents_of_the_own_chunks_only", split("striped", **DOCUMENTS), "documents"),
    forward("window_of_rows", split("striped", model={"window": 5}), "window"),
    forward("later_ranks_skipped", split("ring", 4), "never met"),
    forward("block_met_twice", split("ring"), "met twice"),
    forward("positions_of_contiguous_chunks", split("ring"), "positions", Q),
    forward("positions_of_contiguous_chunks", split("gathered", 4), "positions", Q),
    forward("positions_of_contiguous_chunks", split("ulysses-ring", 4, 2), "positions", Q),
    forward(
        "learned_positions_of_rows",
        split("striped", model={"positions": "learned"}),
        "positions",
        "positions.weight",
    ),
    forward("labels_of_contiguous_chunks", split("ring"), "labels", "loss"),
    forward("data_of_contiguous_chunks", split("striped"), "tokens and labels", "embedding.weight"),
    forward(
        "dropout_of_rows", split("ring", model={"dropout": 0.1}), "dropout", "embedding.weight"
    ),
    forward("heads_interleaved", split("ulysses"), "heads permuted", f"{ATTENTION}.o.weight"),
    forward(
        "key_heads_of_the_next_member", split("ulysses"), "wrong heads", f"{ATTENTION}.k.weight"
    ),
)


def backward(
    mutant: str, plan: dict[str, Any], factor: str, tensor: str = V, axis: str = "cp"
) -> Planted:
    """Return a bug in the gradients."""
    return Planted(
        f"context_gradients:{mutant}", "prove-gradients", tensor, factor, axis, plan=plan
    )


MQA = {"heads": 4, "kv_heads": 1}
HEAD = "head.weight"
PLANTED_IN_GRADIENTS = (
    backward("keys_home_to_the_next_rank", split("ring"), "wrong rank"),
    backward("keys_home_to_the_next_rank", split("striped", 4), "wrong rank"),
    backward("others_home_to_the_next_rank", split("ring"), "wrong rank"),
    backward(
        "others_home_to_the_next_rank",
        split("ring", dp=2, zero={"stage": 3}),
        "wrong rank",
    ),
    backward("keys_home_to_the_next_rank", split("ring", tp=2, pp=2), "wrong rank"),
    backward("keys_home_to_the_next_rank", split("ulysses-ring", 4, 2), "wrong rank"),
    backward("reduce_scatter_by_position", split("gathered"), "wrong rank"),
    backward("exchanged_home_to_the_next_rank", split("ulysses"), "wrong rank"),
    backward("gathered_gradients_not_summed", split("gathered"), "missing sum"),
    backward("last_gradients_not_awaited", split("ring", 4), "stale"),
    backward("last_gradients_not_awaited", split("striped"), "missing sum"),
    backward("copies_added_twice", split("ulysses", model=MQA), "2"),
    backward("copies_added_twice", split("ulysses", 4, model=MQA), "2"),
    backward("copies_not_added", split("ulysses", 4, model=MQA), "missing sum"),
    backward("not_summed_over_context", split("ring"), "missing sum", HEAD),
    backward("not_summed_over_context", split("striped", dp=2), "missing sum", HEAD),
    backward(
        "slices_not_summed_over_context", split("ring", zero={"stage": 2}), "missing sum", HEAD
    ),
    backward("divided_by_own_tokens", split("ring", accumulation=1), "token ratio", HEAD),
    backward(
        "slices_in_another_order",
        split("ring", dp=2, zero={"stage": 1}),
        "slices permuted",
        f"{LAST}.mlp.gate.weight",
        "dp_shard and cp",
    ),
    Planted(
        "reductions:local_token_count",
        "prove-token-count",
        "token count",
        "token ratio of cp 0",
        "cp",
        plan=split("ring"),
    ),
    Planted(
        "context_gradients:loss_of_own_positions",
        "prove-loss",
        "loss",
        "missing sum",
        "cp",
        plan=split("gathered"),
    ),
    Planted(
        "context_gradients:norm_per_context_rank",
        "prove-gradient-norm",
        "gradient norm",
        "sqrt(cp)",
        "cp",
        plan=split("ring", 4, accumulation=3),
    ),
)
EVERYWHERE = PLANTED + PLANTED_IN_GRADIENTS


@pytest.mark.parametrize("planted", EVERYWHERE, ids=lambda planted: planted.mutant)
def test_a_planted_bug_of_context_parallelism_is_caught_and_named(
    planted: Planted, rank_pool: RankPool
) -> None:
    assert_caught(planted, rank_pool)
