"""What ranks write from a cache is, token for token, what one process writes without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from echelon.core.experts import ExpertLayout
from echelon.cost.bytes.cache import cache_size
from echelon.core.plan import Plan
from echelon.cost.bytes.generate import generated_bytes, greedy_passes
from echelon.launch.local.pool import RankPool
from tests.inference.cases import MODELS, PROMPTS, first_difference, without_cache
from tests.inference.mistakes import MISTAKES
from tests.parallel.layouts import plan_of

COUNT = 14  # tokens: more than a window, and than two blocks
WRITE = "tests.inference.targets:write"


def written(pool: RankPool, plan: Plan, **changes: Any) -> list[Any]:
    """Return what each rank wrote."""
    argument = {"plan": plan.to_json(), "prompts": PROMPTS, "max_tokens": COUNT, **changes}
    return pool.run(WRITE, argument, plan.mesh.world_size)


def generation_plan(name: str, **changes: Any) -> Plan:
    """Return a plan that generates: one microbatch crosses the pipeline."""
    return plan_of(model=MODELS[name], schedule="gpipe", microbatches=1, **changes)


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
    ("experts", {"tp": 2}),
    ("experts", {"tp": 2, "experts": ExpertLayout(expert_tp=2)}),
    ("experts", {"tp": 2, "ep": 2}),
    ("shared-experts", {"tp": 2, "ep": 2}),
    ("shared-experts", {"tp": 2, "ep": 2, "pp": 2}),
]


def split_name(value: object) -> str:
    """Return how a case is called."""
    if isinstance(value, dict):
        return "-".join(f"{k}{v if isinstance(v, int) else ''}" for k, v in value.items())
    return str(value)


@pytest.mark.parametrize(("name", "split"), SPLIT, ids=split_name)
def test_ranks_write_what_one_process_writes_without_a_cache(
    name: str, split: dict[str, Any], rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    expected = without_cache(plan, PROMPTS, COUNT)
    model, mesh = plan.model, plan.mesh
    size = cache_size(
        model,
        map(len, PROMPTS),
        max_tokens=COUNT,
        block_tokens=4,
        tp=mesh.tp,
        layers=model.layers // mesh.pp,
        dtype="fp64",
    )
    for found in written(rank_pool, plan):
        assert first_difference(found.texts, expected) == ""
        assert found.cache_bytes == size.num_bytes
        assert found.num_free == found.num_blocks


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


@pytest.mark.parametrize("mistake", CAUGHT)
def test_a_planted_mistake_is_named_by_the_first_token_that_differs(
    mistake: str, rank_pool: RankPool
) -> None:
    name, split = CAUGHT[mistake]
    plan = generation_plan(name, **split)
    argument = {"plan": plan.to_json(), "prompts": PROMPTS, "max_tokens": COUNT}
    target = "tests.inference.mistakes:write_with_mistake"
    found = rank_pool.run(target, argument | {"mistake": mistake}, plan.mesh.world_size)
    told = first_difference(found[0].texts, without_cache(plan, PROMPTS, COUNT))
    assert re.fullmatch(r"prompt \d, token \d+: \d+ instead of \d+", told)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("gqa", {"tp": 2}),
        ("gqa", {"pp": 2}),
        ("gqa", {"tp": 2, "pp": 2}),
        ("latent", {"tp": 4}),
        ("experts", {"tp": 2, "ep": 2}),
        ("experts", {"tp": 2}),
        ("shared-experts", {"tp": 2, "ep": 2}),
    ],
    ids=split_name,
)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
def test_ranks_send_the_bytes_of_the_formula(
    name: str, split: dict[str, Any], greedy: bool, rank_pool: RankPool
) -> None:
    plan = generation_plan(name, **split)
    sampling = {} if greedy else {"temperature": 1.0}
    passes = greedy_passes([len(one) for one in PROMPTS], COUNT, plan.mesh.pp)
    for rank, found in enumerate(written(rank_pool, plan, sampling=sampling)):
        assert found.sent == generated_bytes(plan, rank, passes, greedy=greedy)


def test_a_text_ends_where_the_model_ends_it(rank_pool: RankPool) -> None:
    plan = generation_plan("gqa", pp=2)
    whole = without_cache(plan, PROMPTS, COUNT)
    end = whole[0][5]
    expected = without_cache(plan, PROMPTS, COUNT, end)
    assert {len(one) for one in expected} != {COUNT}
    for found in written(rank_pool, plan, end=end):
        assert found.texts == expected
        assert found.num_free == found.num_blocks


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_the_size_of_blocks_changes_nothing(
    name: str, block_tokens: int, rank_pool: RankPool
) -> None:
    plan = generation_plan(name)
    (found,) = written(rank_pool, plan, block_tokens=block_tokens)
    assert found.texts == without_cache(plan, PROMPTS, COUNT)


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
