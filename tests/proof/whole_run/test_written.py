"""Text that a trained model writes: the first wrong block, and why its attention is wrong."""

from __future__ import annotations

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.whole_run import TrainerTargets, whole_run_pass
from tests.proof.layouts import layout

WRONG = "tests.proof.whole_run.wrong_trainers"

WRITING_BUGS = {
    "each_end_starts_a_document": ("document starts", "without a cache"),
    "documents_of_a_prompt_meet": ("documents see one another", "over a cache"),
    "cache_off_by_one_position": ("oldest key left out", "over a cache"),
    "positions_of_a_cache_off_by_one": ("positions off", "over a cache"),
    "keys_cached_without_rotary": ("keys without rotary", "over a cache"),
    "last_piece_of_a_prompt_not_cached": ("last piece of a prompt", "over a cache"),
    "cache_written_late": ("cache off by one", "over a cache"),
    "cache_shared_by_two": ("stale cache", "over a cache"),
    "cache_padded": ("padding in the softmax", "over a cache"),
    "scores_unscaled_over_a_cache": ("multiplier", "over a cache"),
}
"""For each bug of text that is written: its cause, and how the text is written."""


@pytest.mark.one_in(5)
@pytest.mark.quick("keys_cached_without_rotary", "cache_shared_by_two")
@pytest.mark.parametrize("bug", WRITING_BUGS)
def test_a_bug_of_writing_is_named_by_layer_and_cause(rank_pool: RankPool, bug: str) -> None:
    cause, how = WRITING_BUGS[bug]
    trainer = TrainerTargets(read_back=f"{WRONG}:{bug}")
    documents = "separate" if "document" in bug else "joined"
    shrunk = shrink(layout(documents=documents), precision="fp64")
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run, trainer=trainer).diagnosis
    assert found is not None
    tensor = f"layers.0.attention, where text is written {how}"
    assert (found.rule, found.tensor, found.factor) == ("prove-trainer-text", tensor, cause)


def test_a_bug_of_an_mlp_over_a_cache_has_its_layer_and_no_cause(rank_pool: RankPool) -> None:
    trainer = TrainerTargets(read_back=f"{WRONG}:mlp_of_a_token_doubled")
    shrunk = shrink(layout(), precision="fp64")
    found = whole_run_pass(shrunk, run_ranks=rank_pool.run, trainer=trainer).diagnosis
    assert found is not None
    assert found.tensor == "layers.0, where text is written over a cache"
    assert (found.factor, "before it, is right" in found.says) == ("none", True)
