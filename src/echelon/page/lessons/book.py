# SPDX-License-Identifier: Apache-2.0
"""All that a page has to explain: what `web/src/lessons/` draws."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.page.lessons.lesson import Lesson


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonBook:
    """Hold lessons, in the order in which they are listed."""

    lessons: tuple[Lesson, ...]
