"""A document in the page: nothing of it is ever run, and nothing of it is lost."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from dataclasses import asdict
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.page.explorer.document import ExplorerDocument
from echelon.page.html import DATA, document_json, page_html, write_page
from echelon.page.lessons.catalog import lesson_book
from echelon.planner.view.document import Fact, LineSeries, LinesFigure, PageDocument, Section

HOSTILE = "</script><script>alert(1)</script><!--<script>\u2028&amp; \"quoted\" 'too'"


def document(text: str = "a run", value: float | None = 1.5) -> PageDocument:
    figure = LinesFigure(
        unit="s",
        steps=(1,),
        series=(LineSeries(name=text, values=(value,)),),
        planned=None,
        planned_text="",
    )
    return PageDocument(
        title=text,
        subject=text,
        verdict=text,
        good=True,
        facts=(Fact(text, text),),
        sections=(Section(id="one", title=text, summary=text, figure=figure),),
        made_by="Echelon",
    )


def data_of(page: str) -> str:
    found = re.findall(r'<script type="application/json" id="echelon-data">(.*?)</script>', page)
    assert len(found) == 1
    return found[0]


def test_hostile_text_is_text() -> None:
    page = page_html(document(HOSTILE))
    data = data_of(page)
    assert not set("<>&\u2028") & set(data)
    assert json.loads(data)["verdict"] == HOSTILE
    assert page.count("alert(1)") == page.count("\\u003cscript\\u003ealert(1)") + 1
    # The title is the one other place that has it, and there it is escaped, too.
    assert "<title>&lt;/script&gt;" in page


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_what_json_has_no_number_for_is_null(value: float | None) -> None:
    found = json.loads(document_json(document(value=value)))
    assert found["sections"][0]["figure"]["series"][0]["values"] == [None]


def test_the_page_loads_nothing() -> None:
    page = page_html(document())
    assert DATA not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    addresses = set(re.findall(r"""(?:src|href)=["']([^"'#][^"']*)["']""", page))
    assert {one for one in addresses if not one.startswith("data:")} == set()
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S*", "", page)
    assert "https://" not in page


def test_the_page_is_small() -> None:
    assert len(page_html(document()).encode()) < 500_000


def test_a_page_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_page(document(), path)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        write_page(document("other"), path)
    assert caught.value.problems[0].key == "--out"
    assert path.read_bytes() == before


def test_lessons_are_packed_beside_the_document_of_the_explorer() -> None:
    book = lesson_book()
    explorer = ExplorerDocument(title="Explorer", start={}, tables={}, book=book, made_by="Echelon")
    page = page_html(explorer)
    assert "book" not in json.loads(data_of(page))
    (packed,) = re.findall(
        r'<script type="application/gzip" id="echelon-book">(.*?)</script>', page
    )
    assert re.fullmatch("[A-Za-z0-9+/=]+", packed)
    assert json.loads(gzip.decompress(b64decode(packed))) == json.loads(json.dumps(asdict(book)))
    assert page == page_html(explorer)
