"""The parts of a figure: whatever a name holds, XML comes out, and texts are not underestimated."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from echelon.core.svg import figure, fill, key, line, number, rect, style, text, text_width

NAMESPACE = "{http://www.w3.org/2000/svg}"


@given(st.text())
def test_any_name_is_valid_xml_and_loses_only_what_cannot_be_printed(name: str) -> None:
    body = [text(1, 2, name, "key"), rect("box", 0, 0, 1, 1, name or "-")]
    drawn = figure(body, name=name, rules=style(), width=10, height=20, description=name or "-")
    root = ElementTree.fromstring(drawn)
    shown = "".join(char if char.isprintable() else " " for char in name)
    assert (root.find(f"{NAMESPACE}title") or root[0]).text == (shown or None)
    assert root[1].tag == f"{NAMESPACE}desc"
    assert root[1].text == (shown or "-")
    assert [node.text for node in root.iter(f"{NAMESPACE}text")] == [shown or None]


def test_a_figure_says_its_size_and_is_an_image_with_a_name() -> None:
    root = ElementTree.fromstring(
        figure([line(0, 0, 5, 5, "x")], name='a "b"', rules=style(), width=30.5, height=20)
    )
    assert root.attrib == {
        "width": "30.5",
        "height": "20",
        "viewBox": "0 0 30.5 20",
        "role": "img",
        "aria-label": 'a "b"',
    }
    assert [child.tag.removeprefix(NAMESPACE) for child in root] == [
        "title",
        "style",
        "rect",
        "line",
    ]


def test_rules_for_dark_pages_stand_in_the_dark_part() -> None:
    rules = style(light=".mine { fill: #123456; }\n", dark="  .mine { fill: #abcdef; }\n")
    light, dark = re.split(r"@media \(prefers-color-scheme: dark\)", rules)
    assert "#123456" in light
    assert "#abcdef" in dark
    assert "#abcdef" not in light
    assert rules.count("{") == rules.count("}")


def test_numbers_are_short_and_zero_has_no_sign() -> None:
    assert [number(value) for value in (1.0, 0.126, -0.001, 10.5)] == ["1", "0.13", "0", "10.5"]


def test_a_color_is_written_with_six_digits() -> None:
    assert fill(0, 0.5, 1.0) == "#ff0000"
    assert fill(240, 0.0) == "#000000"


def test_a_longer_or_larger_text_is_wider() -> None:
    assert text_width("", 12) == 0
    assert text_width("ab", 12) == 2 * text_width("ab", 6)
    assert text_width("abc", 12) > text_width("ab", 12)
    # Advances of DejaVu Sans, a wide font, in em: M 0.863, space 0.318, 0 0.636, W 0.989.
    assert text_width("M 0W", 100) >= 100 * (0.863 + 0.318 + 0.636 + 0.989)


def test_a_key_goes_on_in_a_new_line_where_the_page_ends() -> None:
    entries = [(["a0", "a1"], "shades"), (["b"], "other boxes"), (["c"], "lines")]
    wide, bottom = key(entries, left=10, right=1000, top=5)
    assert bottom == 19
    assert re.findall(r'class="(\w+)" x="([\d.]+)" y="5"', "".join(wide))[:2] == [
        ("a0", "10"),
        ("a1", "25"),
    ]
    narrow, lower = key(entries, left=10, right=11, top=5, thin=["c"])
    assert lower == 59
    assert narrow[0] == '<rect class="a0" x="10" y="5" width="14" height="14"/>'
    assert narrow[-2] == '<rect class="c" x="10" y="50" width="14" height="4"/>'
    assert narrow[-1] == '<text class="key" x="30" y="56.5">lines</text>'
