"""What is drawn: the same under every layout, from what may be drawn, as often as it should be."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.launch.local.pool import RankPool
from tests.inference.cases import PROMPTS, without_cache
from tests.inference.runs import COUNT, generation_plan, written


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 3},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.8, "seed": 1},
    ],
    ids=["whole", "top-k", "top-p"],
)
def test_what_is_drawn_does_not_depend_on_the_layout(
    sampling: dict[str, Any], rank_pool: RankPool
) -> None:
    (alone,) = written(rank_pool, generation_plan("gqa"), sampling=sampling)
    assert alone.texts != without_cache(generation_plan("gqa"), PROMPTS, COUNT)
    for split in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}):
        for found in written(rank_pool, generation_plan("gqa", **split), sampling=sampling):
            assert found.texts == alone.texts
    (other,) = written(
        rank_pool, generation_plan("gqa"), sampling=sampling | {"seed": sampling.get("seed", 0) + 1}
    )
    assert other.texts != alone.texts
