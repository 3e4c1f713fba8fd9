"""Blocks of any size hold the same keys, and rows stand where they belong."""

from __future__ import annotations

import pytest

from echelon.launch.local.pool import RankPool
from tests.inference.cases import PROMPTS, sequences_of, without_cache
from tests.inference.runs import COUNT, generation_plan, written

END = 36
DOCUMENTS = (
    ([3, 1, 4, END, 5, 9], [5, 9]),
    ([3, END, END, END, 2, 7, 1], [2, 7, 1]),
    ([END, 8, 2], [8, 2]),
    ([31, 30], [31, 30]),
)
"""Prompts with ends of documents, and the last document of each."""


@pytest.mark.quick("gqa-1")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["gqa", "window", "latent"])
def test_separate_documents_of_a_prompt_do_not_meet(
    name: str, tp: int, rank_pool: RankPool
) -> None:
    """Rotary positions are relative: the text is that after the last document alone."""
    plan = generation_plan(name, tp=tp)
    prompts, alone = zip(*DOCUMENTS, strict=True)
    for found in written(rank_pool, plan, prompts=prompts, separator=END, end=END):
        assert found.texts == without_cache(plan, alone, COUNT, END)
        assert found.num_free == found.num_blocks
    (joined,) = written(rank_pool, generation_plan(name), prompts=prompts, end=END)
    assert joined.texts != without_cache(plan, alone, COUNT, END)


def test_a_document_starts_behind_the_last_of_ends_in_a_row() -> None:
    (sequence,) = sequences_of([[END, 4, END, END]], END)
    assert sequence.document_starts() == [0, 1]
    sequence.tokens.append(7)
    assert sequence.document_starts() == sequence.of_kind(1).document_starts() == [0, 1, 4]


@pytest.mark.quick("gqa-3", "window-1")
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_the_size_of_blocks_changes_nothing(
    name: str, block_tokens: int, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan, block_tokens=block_tokens)
    assert found.texts == without_cache(plan, PROMPTS, COUNT)
