# SPDX-License-Identifier: Apache-2.0
"""All lessons, in the order of their topics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from echelon.page.lessons.collectives import all_reduce_algorithms, four_collectives
from echelon.page.lessons.data_parallel import batch_on_ranks, ddp_flow
from echelon.page.lessons.dimensions import baby_steps, three_dimensions
from echelon.page.lessons.expert_travel import expert_travel
from echelon.page.lessons.grid import grid_and_links, three_degrees
from echelon.page.lessons.guides.attention import attention_guide
from echelon.page.lessons.guides.glossary import errata, glossary
from echelon.page.lessons.guides.memory import memory_guide, weights_guide
from echelon.page.lessons.guides.which_split import decision_tree, model_trees
from echelon.page.lessons.key_slices import key_slices
from echelon.page.lessons.lesson import Lesson, LessonBook
from echelon.page.lessons.pipeline_schedules import pipeline_schedules, pipeline_walk
from echelon.page.lessons.pipeline_stages import pipeline_stages
from echelon.page.lessons.ring_attention import ring_attention
from echelon.page.lessons.tensor.linear import column_parallel, row_parallel
from echelon.page.lessons.tensor.pair import mlp_pair
from echelon.page.lessons.tensor.splits import matrix_splits
from echelon.page.lessons.tensor.toy_mlp import toy_mlp
from echelon.page.lessons.zero import sharding, zero_breakdown, zero_stages

_LESSONS: tuple[Callable[[], Lesson], ...] = (
    three_dimensions,
    batch_on_ranks,
    ddp_flow,
    four_collectives,
    all_reduce_algorithms,
    matrix_splits,
    column_parallel,
    row_parallel,
    mlp_pair,
    toy_mlp,
    pipeline_stages,
    pipeline_walk,
    pipeline_schedules,
    sharding,
    zero_breakdown,
    zero_stages,
    ring_attention,
    key_slices,
    expert_travel,
    baby_steps,
    three_degrees,
    grid_and_links,
    memory_guide,
    weights_guide,
    attention_guide,
    decision_tree,
    model_trees,
    errata,
    glossary,
)


@lru_cache(maxsize=1)
def lesson_book() -> LessonBook:
    """Return all lessons; each is made once."""
    return LessonBook(lessons=tuple(make() for make in _LESSONS))
