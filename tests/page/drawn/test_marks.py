"""The parts of drawings: nothing in a name ends its element, and words fit where they stand."""

from __future__ import annotations

from xml.etree import ElementTree

from echelon.core.svg import text_width
from echelon.page.drawn.marks import (
    Drawing,
    box,
    key,
    shortened,
    svg_file,
    svg_inside,
    words,
    wrapped,
)
from tests.page.drawn.reading import HOSTILE, assert_words_are_clear, root_of


def test_hostile_words_are_words() -> None:
    body = (box((0, 0, 5, 5), "#fff", tip=HOSTILE), words(0, 20, HOSTILE))
    drawing = Drawing(name=HOSTILE, description=HOSTILE, width=100, height=30, body=body)
    root = root_of(drawing)
    assert {one.tag.rpartition("}")[2] for one in root.iter()} == {
        *("svg", "title", "desc", "style", "rect", "text"),
    }
    assert "\x00" not in svg_file(drawing)
    assert "\u202e" not in svg_inside(drawing)


def test_a_file_is_light_or_follows_the_page() -> None:
    drawing = Drawing(name="a", description="", width=100, height=30, body=())
    assert "prefers-color-scheme: dark" in svg_file(drawing)
    light = svg_file(drawing, follows_page=False)
    assert "<style" not in light
    root = ElementTree.fromstring(light)
    # There is paper around what is drawn.
    assert root.attrib["viewBox"] == "-14 -14 128 58"


def test_words_are_shortened_and_wrapped_to_a_width() -> None:
    assert shortened("abc", 100) == "abc"
    for width in (10, 80, 300):
        assert text_width(shortened("a" * 10**6, width), 12) <= max(width, 20)
    lines = wrapped(" ".join(["word"] * 1000), 120, most=3)
    assert len(lines) == 3
    assert all(text_width(one, 12) <= 120 for one in lines)
    assert lines[-1].endswith("..")
    assert wrapped("", 100) == [""]


def test_a_key_goes_on_in_a_new_line() -> None:
    drawn, bottom = key([("#fff", f"a kind of bytes {place}") for place in range(20)], top=0)
    drawing = Drawing(name="a", description="", width=760, height=bottom, body=tuple(drawn))
    assert_words_are_clear(drawing)
    assert key([], top=7) == ([], 7)
