# SPDX-License-Identifier: Apache-2.0
"""The drawing of a part of a page, whatever its kind of figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echelon.page.drawn.bars import draw_bars, draw_heat, draw_waterfall
from echelon.page.drawn.lines import draw_lines, draw_schedule
from echelon.page.drawn.marks import Drawing
from echelon.page.drawn.mesh import draw_mesh
from echelon.planner.view.document import Section

DRAWN_BY: dict[str, Callable[[Any, str, str], Drawing]] = {
    "mesh": draw_mesh,
    "bars": draw_bars,
    "waterfall": draw_waterfall,
    "schedule": draw_schedule,
    "lines": draw_lines,
    "heat": draw_heat,
}
"""What draws each kind of figure: a function of the figure, its name, and what it shows."""


def drawing(section: Section) -> Drawing | None:
    """Return the drawing of a part's figure; None where it has none."""
    if section.figure is None:
        return None
    return DRAWN_BY[section.figure.kind](section.figure, section.title, section.summary)
