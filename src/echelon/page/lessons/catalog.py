"""All lessons, in the order of their topics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from echelon.page.lessons.book import LessonBook
from echelon.page.lessons.collectives.all_reduce import all_reduce_algorithms
from echelon.page.lessons.collectives.four import four_collectives
from echelon.page.lessons.data.batch import batch_on_ranks
from echelon.page.lessons.data.flow import ddp_flow
from echelon.page.lessons.lesson import Lesson
from echelon.page.lessons.mesh.baby_steps import baby_steps
from echelon.page.lessons.mesh.degrees import three_degrees
from echelon.page.lessons.mesh.links import grid_and_links
from echelon.page.lessons.mesh.three_dimensions import three_dimensions
from echelon.page.lessons.tensor.column import column_parallel
from echelon.page.lessons.tensor.pair import mlp_pair
from echelon.page.lessons.tensor.row import row_parallel
from echelon.page.lessons.tensor.splits import matrix_splits
from echelon.page.lessons.tensor.toy_mlp import toy_mlp
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
    zero_stages,
    baby_steps,
    three_degrees,
    grid_and_links,
)


@lru_cache(maxsize=1)
def lesson_book() -> LessonBook:
    """Return all lessons; each is made once."""
    return LessonBook(lessons=tuple(make() for make in _LESSONS))
