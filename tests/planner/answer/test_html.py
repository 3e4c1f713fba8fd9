"""The HTML of an answer: well formed, all escaped, nothing from outside, colors of the notebook."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from echelon.planner.answer.html import answer_html
from echelon.planner.recommend.recommend import Recommendation, recommend
from tests.planner.requests import small


@pytest.fixture(scope="module", name="found")
def _found() -> Recommendation:
    found = recommend(small(devices=7))
    assert isinstance(found, Recommendation)
    return found


def parsed(page: str) -> ElementTree.Element:
    """Return a page as XML; an error where a tag or a sign is not closed or escaped."""
    return ElementTree.fromstring(page.replace("&nbsp;", " "))


def test_it_says_what_the_page_says(found: Recommendation) -> None:
    tree = parsed(answer_html(found))
    heads = [head.text for head in tree.iter("th")]
    for word in ("model", "run", "idle", "step", "memory", "why", "preferred", "sum (step)"):
        assert word in heads
    told = " ".join("".join(tree.itertext()).split())
    assert "The simplest plan within" in told
    assert "1 of 7 devices" in told


def test_nothing_is_loaded_run_or_styled_outside_of_it(found: Recommendation) -> None:
    page = answer_html(found)
    tree = parsed(page)
    tags = {element.tag for element in tree.iter()}
    assert tags <= {
        *("div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"),
        *("svg", "rect", "line"),
    }
    names = {name for element in tree.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or name in {"href", "src", "class"}}
    assert "http" not in page
    assert "url(" not in page
    # Text and lines have the color of the notebook; boxes alone have their own.
    assert set(re.findall(r'(?:stroke|[^-]color)="?:? ?([^";]+)', page)) == {"currentColor"}
    assert "background" not in page


def test_bars_are_as_long_as_their_terms(found: Recommendation) -> None:
    tree = parsed(answer_html(found))
    rows = [row for row in tree.iter("tr") if row.find(".//line") is not None]
    assert len(rows) > 5
    for row in rows:
        cells = ["".join(cell.itertext()) for cell in row]
        rect, line = row.find(".//rect"), row.find(".//line")
        assert rect is not None
        assert line is not None
        ends = [float(line.attrib[name]) for name in ("x1", "x2")]
        assert ends[0] <= float(rect.attrib["width"]) <= ends[1]
        if cells[2] == "-":
            assert ends[0] == ends[1]
    seconds = [row for row in rows if "matmul" in "".join(row.itertext())]
    assert len(seconds) == 1


def test_a_name_is_shown_as_it_is(found: Recommendation) -> None:
    request = found.answer.request
    name = '<script>alert("1")</script>&'
    cluster = replace(request.cluster, name=name)
    other = replace(found, answer=replace(found.answer, request=replace(request, cluster=cluster)))
    page = answer_html(other)
    assert "<script" not in page
    assert name in "".join(parsed(page).itertext())
