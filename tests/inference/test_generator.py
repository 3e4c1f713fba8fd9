"""What ranks write from a cache is, token for token, what one process writes without one."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.core.experts import ExpertLayout
from echelon.cost.bytes.generate import kind_cache_sizes
from echelon.launch.local.supervisor import RankPool
from tests.inference.cases import MODELS, PROMPTS, first_difference, without_cache
from tests.inference.runs import COUNT, generation_plan, split_name, written


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_writes_what_one_process_writes_without_a_cache(
    name: str, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan)
    assert first_difference(found.texts, without_cache(plan, PROMPTS, COUNT)) == ""
    assert len({tuple(text) for text in found.texts}) == len(PROMPTS)
    assert found.num_free == found.num_blocks


SPLIT = [
    ("gqa", {"tp": 2}),
    ("mha", {"tp": 4}),
    ("gqa", {"pp": 2}),
    ("gqa", {"pp": 4}),
    ("gqa", {"tp": 2, "pp": 2}),
    ("mqa", {"pp": 2}),
    ("latent", {"tp": 4}),
    ("latent", {"tp": 2, "pp": 2}),
    ("window", {"tp": 2}),
    ("window", {"pp": 2}),
    ("window-latent", {"tp": 2}),
    ("soft-cap", {"tp": 2}),
    ("qk-norm", {"tp": 2, "pp": 2}),
    ("learned", {"tp": 2, "pp": 2}),
    ("learned", {"tp": 4}),
    ("width-norm", {"tp": 2}),
    ("experts", {"tp": 2}),
    ("experts", {"tp": 2, "experts": ExpertLayout(expert_tp=2)}),
    ("experts", {"tp": 2, "ep": 2}),
    ("biased-experts", {"tp": 2, "experts": ExpertLayout(expert_tp=2)}),
    ("biased-experts", {"tp": 2, "ep": 2}),
    ("plain-queries", {"tp": 2}),
    ("shared-experts", {"tp": 2, "ep": 2}),
    ("shared-experts", {"tp": 2, "ep": 2, "pp": 2}),
]


@pytest.mark.system("S16")
@pytest.mark.quick("gqa-pp2", "latent-tp4", "experts-tp2-ep2")
@pytest.mark.parametrize(("name", "split"), SPLIT, ids=split_name)
def test_ranks_write_what_one_process_writes_without_a_cache(
    name: str, split: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    expected = without_cache(plan, PROMPTS, COUNT)
    model, mesh = plan.model, plan.mesh
    alone = kind_cache_sizes(
        generation_plan(name),
        range(model.layers),
        [len(one) for one in PROMPTS],
        max_tokens=COUNT,
        block_tokens=4,
    )
    # By blocks of the model and by heads; a latent vector has none, and every rank reads it.
    parts = mesh.pp * (1 if model.latent else mesh.tp)
    for found in written(rank_pool, plan):
        assert first_difference(found.texts, expected) == ""
        assert found.cache_bytes * parts == alone.num_bytes
        assert found.num_free == found.num_blocks


def test_a_text_ends_where_the_model_ends_it(rank_pool: RankPool) -> None:
    plan = generation_plan("gqa", pp=2)
    whole = without_cache(plan, PROMPTS, COUNT)
    end = whole[0][5]
    expected = without_cache(plan, PROMPTS, COUNT, end)
    assert {len(one) for one in expected} != {COUNT}
    for found in written(rank_pool, plan, end=end):
        assert found.texts == expected
        assert found.num_free == found.num_blocks


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
