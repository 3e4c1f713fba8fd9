"""All lessons, in the order of their topics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from echelon.page.lessons.book import LessonBook
from echelon.page.lessons.lesson import Lesson
from echelon.page.lessons.zero.stages import zero_stages

_LESSONS: tuple[Callable[[], Lesson], ...] = (zero_stages,)


@lru_cache(maxsize=1)
def lesson_book() -> LessonBook:
    """Return all lessons; each is made once."""
    return LessonBook(lessons=tuple(make() for make in _LESSONS))
