"""Mistakes that are planted into generation are found, and said to be where they show."""

from __future__ import annotations

import re

import pytest

from echelon.launch.local.pool import RankPool
from tests.inference.cases import PROMPTS, first_difference, without_cache
from tests.inference.mistakes import MISTAKES
from tests.inference.runs import COUNT, generation_plan, written

CAUGHT = {
    "reads_one_position_less": ("gqa", {}),
    "turns_by_the_next_position": ("gqa", {}),
    "writes_one_position_late": ("gqa", {}),
    "every_rank_keeps_the_first_heads": ("gqa", {"tp": 2}),
    "gives_a_block_to_two": ("gqa", {}),
    "forgets_a_sum": ("gqa", {"tp": 2}),
    "sees_padding": ("gqa", {}),
    "forgets_the_cap": ("soft-cap", {}),
    "forgets_the_window": ("window", {}),
}


def test_every_mistake_has_a_case() -> None:
    assert set(CAUGHT) == set(MISTAKES)


@pytest.mark.one_in(2)
@pytest.mark.system("S16")
@pytest.mark.parametrize("mistake", CAUGHT)
def test_a_planted_mistake_is_named_by_the_first_token_that_differs(
    mistake: str, rank_pool: RankPool
) -> None:
    name, split = CAUGHT[mistake]
    plan = generation_plan(name, **split)
    found = written(rank_pool, plan, "tests.inference.mistakes:write_with_mistake", mistake=mistake)
    told = first_difference(found[0].texts, without_cache(plan, PROMPTS, COUNT))
    assert re.fullmatch(r"prompt \d, token \d+: \d+ instead of \d+", told)
