"""Every kind of figure that a page can have is drawn."""

from __future__ import annotations

from typing import get_args

from echelon.page.drawn.document import DRAWN_BY, drawing
from echelon.planner.view.document import Figure, Section
from tests.page.browser.documents import documents


def test_each_kind_has_what_draws_it() -> None:
    kinds = {get_args(one.__dataclass_fields__["kind"].type) for one in get_args(Figure)}
    names = {one.__dataclass_fields__["kind"].default for one in get_args(Figure)}
    assert names == set(DRAWN_BY), kinds


def test_a_part_without_a_figure_has_no_drawing() -> None:
    assert drawing(Section(id="a", title="A", summary="a")) is None


def test_every_figure_of_every_page_has_a_drawing_with_its_name() -> None:
    kinds = set[str]()
    for document in documents().values():
        for section in document.sections:
            found = drawing(section)
            assert (found is None) == (section.figure is None)
            if found is not None and section.figure is not None:
                assert (found.name, found.description) == (section.title, section.summary)
                kinds.add(section.figure.kind)
    assert kinds == set(DRAWN_BY)
