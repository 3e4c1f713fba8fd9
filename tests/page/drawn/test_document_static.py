"""A page without a script: all that its document says, nothing that runs, and no end of bytes."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from echelon.page.drawn.document import MOST_BYTES, static_html
from echelon.planner.view.document import (
    DataTable,
    Fact,
    LineSeries,
    LinesFigure,
    PageDocument,
    Section,
)
from tests.page.browser.documents import documents
from tests.page.drawn.reading import HOSTILE

HARMLESS = {
    *("div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    *("pre", "svg", "rect", "title", "text", "path", "line"),
}
"""The elements that a notebook gets: none of them loads or runs anything."""


class Reader(HTMLParser):
    """Read a piece of HTML back: its elements, its words, the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes = set[str](), set[str]()
        self.said, self.cells, self.open = list[str](), list[str](), list[str]()
        self.feed(text)
        self.close()
        assert self.open == [], "every element has an end"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1] += data


@pytest.mark.parametrize("name", ["plan", "run", "proof", "rehearsal"])
def test_it_says_what_the_document_says(name: str) -> None:
    document = documents()[name]
    found = Reader(static_html(document))
    said = "".join(found.said)
    assert document.verdict in said
    assert found.tags <= HARMLESS
    assert not {one for one in found.attributes if one.startswith("on")}
    assert not found.attributes & {"id", "class", "href", "src"}
    for fact in document.facts:
        at = found.cells.index(fact.name)
        assert found.cells[at : at + 3] == [fact.name, fact.value, fact.note]
    for section in document.sections:
        assert section.title in said
        assert section.summary in said
        if section.table is not None and len(section.table.rows) <= 24:
            wanted = [cell for row in section.table.rows for cell in row[:16]]
            assert [cell for cell in wanted if cell not in found.cells] == []


def document(*sections: Section, said: str = "x") -> PageDocument:
    return PageDocument(
        title=said,
        subject=said,
        verdict=said,
        good=False,
        facts=(Fact("a", "b"),),
        sections=sections,
        made_by=said,
    )


def test_hostile_names_are_words() -> None:
    table = DataTable(head=(HOSTILE,), rows=((HOSTILE,),) * 3)
    section = Section(id="a", title=HOSTILE, summary=HOSTILE, table=table, commands=(HOSTILE,))
    text = static_html(document(section, said=HOSTILE))
    found = Reader(text)
    assert found.tags <= HARMLESS
    assert "<img" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    # It's cut where nobody reads on.
    assert len(text) < 40_000


def curve(count: int, name: str = "loss") -> Section:
    figure = LinesFigure(
        unit="loss",
        steps=tuple(range(count)),
        series=(LineSeries(name=name, values=tuple(float(x % 7) for x in range(count))),),
        planned=None,
        planned_text="",
    )
    return Section(id="a", title=f"Loss {count}", summary="It moves.", figure=figure)


def test_it_is_bounded_and_says_what_is_left_out() -> None:
    text = static_html(document(curve(40_000), curve(10)))
    assert len(text.encode()) < MOST_BYTES + 5000
    # The small one is drawn, whatever stands before it.
    assert text.count("<svg") == 1
    assert text.index("Its figure is too large to be shown here") < text.index("<svg")
    rows = tuple((f"{place}", "x" * 5000) for place in range(10_000))
    large = replace(curve(10), figure=None, table=DataTable(head=("a", "b"), rows=rows))
    text = static_html(document(*(replace(large, title=f"Part {at}") for at in range(400))))
    assert len(text.encode()) < 200_000
    assert "9,976 more rows are on the page (--out FILE.html)." in text
    assert "Too large to be shown here, and on the page (--out FILE.html): Part " in text
