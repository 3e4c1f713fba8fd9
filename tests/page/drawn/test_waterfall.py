"""Bars of a step's seconds start where the one before ended, and the total has its band."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.load import load_job
from echelon.page.documents.plan import plan_page
from echelon.page.drawn.bars import draw_waterfall
from echelon.page.drawn.document import drawing
from echelon.planner.view.document import WaterfallFigure
from tests.page.drawn.reading import assert_words_are_clear, boxes, texts
from tests.walks import examples


def test_bars_join_and_are_as_long_as_their_seconds() -> None:
    page = plan_page(load_job("nano", ("mesh.pp=2",)).plan)
    section = next(one for one in page.sections if one.id == "step")
    figure = section.figure
    assert isinstance(figure, WaterfallFigure)
    found = drawing(section)
    assert found is not None
    places = list(boxes(found).values())
    parts = [part.seconds for row in figure.rows for part in row.parts]
    assert len(places) == len(parts)
    scale = places[0][2] / parts[0]
    assert [place[2] for place in places] == pytest.approx([scale * s for s in parts], abs=0.02)
    for one, after in pairwise(places):
        assert after[0] == pytest.approx(one[0] + one[2], abs=0.03)
    said = texts(found)
    assert [row.text for row in figure.rows if row.text not in said] == []
    assert figure.total_text in said
    assert any(figure.band_text in one for one in said)
    assert_words_are_clear(found)


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(), st.floats(), st.floats())
def test_any_seconds_are_drawn(total: float, low: float, high: float) -> None:
    figure = WaterfallFigure(
        rows=(),
        tones=(),
        others=(),
        total=total,
        total_text="?",
        low=low,
        high=high,
        band_text="?",
    )
    assert_words_are_clear(draw_waterfall(figure, "Seconds", ""))
