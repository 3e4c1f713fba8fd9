"""The guide of attention: pairs, bytes, and what a cut without exchange gets wrong."""

from __future__ import annotations

import pytest

from echelon.core.attention_mask import AttentionMask
from echelon.cost.bytes.model_sizes import attention_merge_errors
from echelon.page.lessons.guides.attention import attention_guide, pairs_of_ranks
from echelon.page.lessons.lesson import FoldsFigure
from echelon.planner.view.document import HeatFigure
from tests.page.lessons.reading import facts, figure, holds


@pytest.mark.system("S58")
def test_three_facts_have_the_numbers_of_the_guides() -> None:
    pairs, storage, cut = attention_guide().scene(mask="none").frames
    assert facts(pairs)["pairs of 16 tokens"] == "256"
    claimed = holds("llm-training-43")
    assert facts(storage)["keys and values"] == f"{claimed['GiB']:.2f} GiB" == "64.00 GiB"
    both = holds("llm-training-44")
    assert facts(storage)["with 16-bit weights"] == f"{both['with_weights_GB']} GB"
    assert facts(cut)["blocks missing"] == f"{holds('llm-training-45')} of 16" == "12 of 16"


@pytest.mark.system("S58")
def test_a_plain_cut_is_wrong_and_a_merge_is_right() -> None:
    alone, equal, merged = attention_merge_errors(16, 4)
    assert alone > 0.1
    assert equal > 0.1
    assert merged < 1e-12
    cut = attention_guide().scene(mask="causal").frames[-1]
    results = [fold.result for fold in figure(cut, FoldsFigure).folds]
    assert results == [f"{alone:.2g}", f"{equal:.2g}", f"{merged:.1g}"]


def test_blocks_are_those_of_the_mask() -> None:
    causal = pairs_of_ranks(AttentionMask(causal=True))
    assert sum(map(sum, causal)) == 136
    blocks = holds("llm-training-48")
    assert sum(many > 0 for row in causal for many in row) == blocks["causal"]
    assert [sum(many > 0 for many in row) for row in causal] == blocks["causal_work_per_rank"]
    grid = figure(attention_guide().scene(mask="causal").frames[-1], HeatFigure)
    shown = [text for row in grid.rows for text in row.texts]
    assert shown.count("missing") == blocks["causal"] - 4
    assert [row.values[rank] for rank, row in enumerate(grid.rows)] == [10.0] * 4
