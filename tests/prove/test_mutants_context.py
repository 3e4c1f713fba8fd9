"""Every planted bug of context parallelism is caught and named."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.launch.pool import RankPool
from tests.prove.planted import Planted, assert_caught

ATTENTION = "layers.0.attention"
LAST = "layers.1"
DOCUMENTS: dict[str, Any] = {"documents": "separate"}


def split(kind: str, cp: int = 2, ulysses: int = 1, **more: Any) -> dict[str, Any]:
    """Return a plan with context ranks and one microbatch."""
    axes = {"cp": cp, **more.pop("mesh", {})}
    degree = cp if kind == "ulysses" else ulysses
    context = {"kind": kind, "ulysses_degree": degree}
    return {"mesh": axes, "context": context, "accumulation": 2, **more}


def forward(mutant: str, plan: dict[str, Any], factor: str, tensor: str = ATTENTION) -> Planted:
    """Return a bug of the forward pass."""
    return Planted(f"context:{mutant}", "prove-microbatch-loss", tensor, factor, "cp", plan=plan)


Q = f"{ATTENTION}.q.weight"
PLANTED = (
    forward("lse_not_rescaled", split("ring"), "merge"),
    forward("lse_not_rescaled", split("striped", 4), "merge"),
    forward("lse_not_updated", split("ring", 4), "merge"),
    forward("mask_off_by_one_in_a_block", split("ring"), "mask off by one"),
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


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.mutant)
def test_a_planted_bug_of_context_parallelism_is_caught_and_named(
    planted: Planted, rank_pool: RankPool
) -> None:
    assert_caught(planted, rank_pool)
