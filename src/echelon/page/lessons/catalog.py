# SPDX-License-Identifier: Apache-2.0
"""All lessons, in the order of their topics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from echelon.page.lessons.book import LessonBook
from echelon.page.lessons.collectives.all_reduce import all_reduce_algorithms
from echelon.page.lessons.collectives.four import four_collectives
from echelon.page.lessons.context.ring import ring_attention
from echelon.page.lessons.context.slices import key_slices
from echelon.page.lessons.data.batch import batch_on_ranks
from echelon.page.lessons.data.flow import ddp_flow
from echelon.page.lessons.experts.travel import expert_travel
from echelon.page.lessons.guides.attention_guide import attention_guide
from echelon.page.lessons.guides.memory_guide import memory_guide
from echelon.page.lessons.guides.published import errata
from echelon.page.lessons.guides.weights_guide import weights_guide
from echelon.page.lessons.guides.which_split import decision_tree, model_trees
from echelon.page.lessons.guides.words import glossary
from echelon.page.lessons.lesson import Lesson
from echelon.page.lessons.mesh.baby_steps import baby_steps
from echelon.page.lessons.mesh.degrees import three_degrees
from echelon.page.lessons.mesh.links import grid_and_links
from echelon.page.lessons.mesh.three_dimensions import three_dimensions
from echelon.page.lessons.pipeline.schedules import pipeline_schedules
from echelon.page.lessons.pipeline.stages import pipeline_stages
from echelon.page.lessons.pipeline.walk import pipeline_walk
from echelon.page.lessons.tensor.column import column_parallel
from echelon.page.lessons.tensor.pair import mlp_pair
from echelon.page.lessons.tensor.row import row_parallel
from echelon.page.lessons.tensor.splits import matrix_splits
from echelon.page.lessons.tensor.toy_mlp import toy_mlp
from echelon.page.lessons.zero.breakdown import zero_breakdown
from echelon.page.lessons.zero.sharding import sharding
from echelon.page.lessons.zero.stages import zero_stages

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
